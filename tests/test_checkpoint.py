"""Recomputation: a dispatch that arrives in another order must not mix with the first one's handle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from launch import RankPool
from oracle import moe
from scene import BOTH_LAYOUTS, Layer, Scene, Step, buffers, close_to, dispatch_of, layer_forward, leaves, scene_for
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MODES: dict[str, dict[str, Any] | None] = {
    "no": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "non-reentrant, all of it": {"use_reentrant": False, "early_stop": False},
}
COUNTS = {"plenty": (5, 7), "one empty": (0, 6), "one and many": (9, 1)}


def checkpointed_step(rank: int, world: int, scene: Scene, mode: str) -> Step:
    """Two layers with the same experts, each within a checkpoint; the second routes as the first, weights reversed."""
    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)

    def one(x: Tensor, weights: Tensor) -> Tensor:
        return x + layer_forward(layer, rank, x, weights, matrices, biases)

    def through(x: Tensor, weights: Tensor) -> Tensor:
        options = MODES[mode]
        if options is None:
            return one(x, weights)
        result: Tensor = checkpoint(one, x, weights, **options)
        return result

    with buffers(adversary=scene.adversary):
        y = through(through(x, weights), weights.flip(1))
        (y * layer.targets[rank]).sum().backward()
    return Step.of(y, x, weights, matrices, biases)


def wanted(scene: Scene) -> list[Step]:
    """The same two layers, dense."""
    layer = Layer(scene)
    x = [part.clone().requires_grad_() for part in layer.x]
    weights = [part.clone().requires_grad_() for part in layer.weights]
    matrices, biases = layer.matrices.clone().requires_grad_(), layer.biases.clone().requires_grad_()
    y, gates = x, weights
    for _ in range(2):
        out = moe(y, layer.idx, gates, lambda e, rows: torch.tanh(rows @ matrices[e] + biases[e]))
        y, gates = [a + b for a, b in zip(y, out, strict=True)], [part.flip(1) for part in weights]
    torch.cat([(a * v).sum()[None] for a, v in zip(y, layer.targets, strict=True)]).sum().backward()
    assert matrices.grad is not None
    assert biases.grad is not None
    return [
        Step(
            y=y[rank].detach(),
            x=x[rank].grad,
            weights=weights[rank].grad,
            matrices=matrices.grad[layer.local(rank)],
            biases=biases.grad[layer.local(rank)],
        )
        for rank in range(len(scene.tokens))
    ]


@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_under_recomputation(
    ranks2: RankPool, counts: str, mode: str, layout: str, adversary: int | None
) -> None:
    scene = scene_for(2, layout, tokens=COUNTS[counts], adversary=adversary, topk=3)
    assert close_to(ranks2.run(checkpointed_step, scene, mode), scene, want=wanted(scene)) == []


def only_dispatch(rank: int, world: int, scene: Scene, mode: str) -> Step:
    """Dispatch and experts within one checkpoint, combine in a second: the handle crosses from one to the other."""
    from megatron_moe_v2 import FlexTokenDispatcher

    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)
    with buffers(adversary=scene.adversary):
        dispatcher = FlexTokenDispatcher(
            num_experts=scene.num_experts, layout=scene.layout, expert_alignment=scene.alignment
        )
        dispatched = dispatcher.dispatch(x, layer.idx[rank], weights)

        def experts(tokens: Tensor) -> Tensor:
            parts = tokens.split(dispatched.padded_tokens_per_expert.tolist())
            rows = [torch.tanh(part @ m + b) for part, m, b in zip(parts, matrices, biases, strict=True)]
            return torch.cat(rows)

        options = MODES[mode]
        rows = experts(dispatched.tokens) if options is None else checkpoint(experts, dispatched.tokens, **options)
        y = dispatcher.combine(rows, dispatched)
        (y * layer.targets[rank]).sum().backward()
    return Step.of(y, x, weights, matrices, biases)


@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_experts_alone_may_be_recomputed(ranks2: RankPool, layout: str, adversary: int | None) -> None:
    scene = scene_for(2, layout, adversary=adversary)
    for mode in MODES:
        assert close_to(ranks2.run(only_dispatch, scene, mode), scene, mode) == []


def test_a_wrong_pairing_of_orders_would_be_seen(ranks2: RankPool) -> None:
    """The adversary does change the order between a forward and its recomputation."""
    scene = dataclasses.replace(scene_for(2), tokens=(9, 9), adversary=3)
    assert all(ranks2.run(orders_differ, scene))


def orders_differ(rank: int, world: int, scene: Scene) -> bool:
    layer = Layer(scene)
    with buffers(adversary=scene.adversary):
        first, second = (dispatch_of(layer, rank, layer.x[rank], layer.weights[rank])[0] for _ in range(2))
    return first.shape == second.shape and not torch.equal(first, second)
