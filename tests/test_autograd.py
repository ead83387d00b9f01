"""Gradients of dispatch, experts and combine: against the dense oracle, ``gradcheck`` and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import RankPool
from scene import (
    BOTH_LAYOUTS,
    CEILING,
    Layer,
    Scene,
    buffers,
    close_to,
    dispatch_of,
    layer_forward,
    leaves,
    run_experts,
    scene_for,
    train_steps,
)
from torch import Tensor

from megatron_moe_v2 import fused_combine

SCENES: dict[str, dict[str, Any]] = {
    "plain": {},
    "selections of none": {"routing": "masked", "topk": 3},
    "an expert twice in a row": {"routing": "duplicates"},
    "all tokens to one rank": {"routing": "one rank"},
    "more choices than local experts": {"topk": 3, "local_experts": 1},
    "single choice": {"topk": 1},
    "many experts": {"local_experts": 5, "topk": 4},
    "frozen tokens": {"frozen": ("x",)},
    "frozen weights": {"frozen": ("weights",)},
    "frozen experts": {"frozen": ("experts",)},
    "frozen tokens and weights": {"frozen": ("x", "weights")},
    "float32": {"dtype": torch.float32},
    "bfloat16 weights": {"dtype": torch.float32, "weights_dtype": torch.bfloat16},
    "float64 weights of float32 tokens": {"dtype": torch.float32, "weights_dtype": torch.float64},
}


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_results_and_gradients_are_the_oracle_s(ranks: RankPool, layout: str, adversary: int | None) -> None:
    scenes = {name: scene_for(ranks.world, layout, adversary=adversary, **case) for name, case in SCENES.items()}
    scenes = {name: scene for name, scene in scenes.items() if scene.topk <= scene.num_experts}
    by_case = zip(*ranks.run(train_steps, list(scenes.values())), strict=True)
    wrong = []
    for (name, scene), steps in zip(scenes.items(), by_case, strict=True):
        wrong += close_to(steps, scene, name)
        for step in steps:
            dtypes = {"y": scene.dtype, "x": scene.dtype, "weights": scene.weights_dtype or scene.dtype}
            have = {field: getattr(step, field).dtype for field in dtypes if getattr(step, field) is not None}
            wrong += [f"{name}: {field} is {dtype}" for field, dtype in have.items() if dtype != dtypes[field]]
    assert wrong == []


@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_any_number_of_tokens(ranks2: RankPool, layout: str, adversary: int | None) -> None:
    counts = [(0, 6), (6, 0), (1, CEILING), (CEILING, 1), (0, 0), (CEILING, CEILING)]
    scenes = [scene_for(2, layout, tokens=tokens, adversary=adversary) for tokens in counts]
    by_case = zip(*ranks2.run(train_steps, scenes), strict=True)
    wrong = [close_to(steps, scene, str(scene.tokens)) for steps, scene in zip(by_case, scenes, strict=True)]
    assert wrong == [[]] * len(scenes)


# gradcheck with respect to one rank's inputs: that rank leads, the others repeat each of its calls.


class _Announce(torch.autograd.Function):
    """Identity; its backward tells the followers that the backward of forward ``number`` comes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, number: int, leader: int) -> Tensor:
        ctx.command = (2, number, leader)
        ctx.set_materialize_grads(False)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        announce(*ctx.command)
        return grad, None, None


def announce(command: int, number: int, leader: int) -> tuple[int, int]:
    message = torch.tensor([command, number])
    dist.broadcast(message, leader)
    return int(message[0]), int(message[1])


def checked_by_gradcheck(rank: int, world: int, scene: Scene, leader: int) -> tuple[int, int]:
    """The number of forwards and backwards that the rank took part in."""
    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)
    counts = [0, 0]

    def forward(x: Tensor, weights: Tensor) -> Tensor:
        counts[0] += 1
        return layer_forward(layer, rank, x, weights, matrices, biases)

    def led(x: Tensor, weights: Tensor) -> Tensor:
        number = counts[0]
        announce(1, number, leader)
        y: Tensor = _Announce.apply(forward(x, weights), number, leader)
        return y

    with buffers(adversary=scene.adversary):
        if rank == leader:
            try:
                assert torch.autograd.gradcheck(led, (x, weights), eps=1e-6, atol=1e-7, rtol=1e-5)
            finally:
                announce(0, 0, leader)
            return counts[0], counts[0]
        outputs = {}
        while True:
            command, number = announce(0, 0, leader)
            if command == 0:
                return counts[0], counts[1]
            if command == 1:
                outputs[number] = forward(x, weights)
            else:
                counts[1] += 1
                outputs[number].backward(torch.zeros_like(outputs[number]), retain_graph=True)


@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("leader", [0, 1])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_gradcheck_of_one_rank_s_tokens_and_weights(
    ranks2: RankPool, layout: str, leader: int, adversary: int | None
) -> None:
    scene = scene_for(
        2, layout, tokens=(3, 4), hidden=3, topk=3, routing="masked", frozen=("experts",), adversary=adversary
    )
    forwards, backwards = ranks2.run(checked_by_gradcheck, scene, leader)[1 - leader]
    assert forwards > 2 * scene.tokens[leader] * (scene.hidden + scene.topk)
    assert backwards > 2


# Finite differences of the loss summed over all ranks, one element of one rank at a time.


def shared(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total)


def differences(rank: int, world: int, loss: Any, tensors: list[Tensor], eps: float = 1e-5) -> list[Tensor]:
    """Per tensor of this rank the derivative of the global loss. Collective: all ranks take every turn."""
    results = [torch.zeros_like(tensor) for tensor in tensors]
    sizes = torch.tensor([tensor.numel() for tensor in tensors])
    for turn in range(world):
        theirs = sizes.clone()
        dist.broadcast(theirs, turn)
        for number, size in enumerate(theirs.tolist()):
            for element in range(size):
                values = []
                for step in (eps, -eps):
                    if rank == turn:
                        tensors[number].view(-1)[element] += step
                    values.append(shared(loss()))
                    if rank == turn:
                        tensors[number].view(-1)[element] -= step
                if rank == turn:
                    results[number].view(-1)[element] = (values[0] - values[1]) / (2 * eps)
    return results


def worst_difference(rank: int, world: int, loss: Any, leaves: list[Tensor]) -> list[float]:
    """Largest deviation of the gradients of ``loss`` from finite differences, per leaf."""
    gradients = torch.autograd.grad(loss(), leaves)
    with torch.no_grad():
        numeric = differences(rank, world, loss, leaves)
    return [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(gradients, numeric, strict=True)]


def dispatch_alone(rank: int, world: int, scene: Scene) -> list[float]:
    """A loss on what is received that does not ask for its order."""
    layer = Layer(scene)
    x, weights, _, _ = leaves(layer, rank)

    def loss() -> Tensor:
        recv_x, recv_idx, recv_weights, _, _ = dispatch_of(layer, rank, x, weights)
        kept = recv_weights if recv_idx is None else torch.where(recv_idx >= 0, recv_weights, 0.0)
        per_row = kept if recv_idx is None else (kept * (recv_idx + 2)).sum(1)
        return (rank + 1) * (recv_x.pow(3).sum() + (recv_x.sum(1) * per_row).sum() + kept.pow(2).sum())

    with buffers(adversary=scene.adversary):
        return worst_difference(rank, world, loss, [x, weights])


def combine_alone(rank: int, world: int, scene: Scene) -> list[float]:
    layer = Layer(scene)
    with buffers(adversary=scene.adversary):
        *_, handle = dispatch_of(layer, rank, layer.x[rank], layer.weights[rank])
        draw = torch.Generator().manual_seed(rank)
        rows = torch.randn(handle.num_rows, scene.hidden, generator=draw, dtype=torch.float64).requires_grad_()

        def loss() -> Tensor:
            return (fused_combine(rows, None, handle)[0].pow(3) * layer.targets[rank]).sum()

        return worst_difference(rank, world, loss, [rows])


def expert_weights(rank: int, world: int, scene: Scene) -> list[float]:
    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)

    def loss() -> Tensor:
        y = layer_forward(layer, rank, x, weights, matrices, biases)
        return (y.pow(2) * layer.targets[rank]).sum()

    with buffers(adversary=scene.adversary):
        return worst_difference(rank, world, loss, [matrices, biases])


@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("operation", [dispatch_alone, combine_alone, expert_weights], ids=lambda f: f.__name__)
def test_finite_differences_of_the_global_sum(
    ranks2: RankPool, operation: Any, layout: str, adversary: int | None
) -> None:
    scene = scene_for(2, layout, tokens=(3, 4), hidden=2, topk=3, routing="masked", adversary=adversary)
    for worst in ranks2.run(operation, scene):
        assert max(worst) < 1e-7, worst


# Dtypes.


def under_autocast(rank: int, world: int, scene: Scene) -> dict[str, Any]:
    """Dtypes inside an autocast region, and the loss with bfloat16 routing weights."""
    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)
    with buffers(), torch.autocast("cpu", dtype=torch.bfloat16):
        recv_x, recv_idx, recv_weights, _, handle = dispatch_of(layer, rank, x, weights)
        rows = handle.padded_tokens_per_expert.tolist()
        out = run_experts(recv_x, recv_idx, recv_weights, rows, matrices, biases)
        y, _ = fused_combine(out, None, handle)
        y.float().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    grads = {"x": x.grad.dtype, "weights": weights.grad.dtype}
    return {"recv_x": recv_x.dtype, "recv_weights": recv_weights.dtype, "y": y.dtype, "out": out.dtype} | grads


@pytest.mark.parametrize("layout", ["token", "expert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_leaves_dtypes_alone(
    ranks2: RankPool, layout: str, dtype: torch.dtype, weights_dtype: torch.dtype
) -> None:
    scene = scene_for(2, layout, dtype=dtype, weights_dtype=weights_dtype)
    for seen in ranks2.run(under_autocast, scene):
        assert seen["recv_x"] == seen["x"] == dtype
        assert seen["y"] == seen["out"]
        assert seen["recv_weights"] == torch.float32
        assert seen["weights"] == weights_dtype
