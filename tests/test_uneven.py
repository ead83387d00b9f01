"""Ranks with nothing, one or ceiling-many tokens, losses that leave something out, numbers that are none, deaths."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_cases import attempt, check, dispatch, inputs
from launch import Launch, RankPool
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
    scene_for,
    train_steps,
)
from torch import Tensor

from megatron_moe_v2 import close_buffers, fused_combine, fused_dispatch
from megatron_moe_v2.settings import PREFIX


@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_a_rank_may_ignore_its_output(ranks2: RankPool, layout: str, adversary: int | None) -> None:
    counts = [(0, 9), (9, 0), (1, 9), (CEILING, 9), (5, 5)]
    scenes = [
        scene_for(2, layout, tokens=tokens, silent=silent, adversary=adversary)
        for tokens in counts
        for silent in ((0,), (1,), (0, 1))
    ]
    by_case = zip(*ranks2.run(train_steps, scenes), strict=True)
    wrong = [close_to(steps, scene, str(scene)) for steps, scene in zip(by_case, scenes, strict=True)]
    assert wrong == [[]] * len(scenes)


def sums_of_nothing(rank: int, world: int, layout: str) -> list[Tensor | None]:
    """Rank 0 receives all; the others' gradients are those of a sum over no rows, expanded from one number."""
    x, weights = torch.ones(3, 8, requires_grad=True), torch.ones(3, 1)
    with buffers():
        recv_x, *_ = fused_dispatch(x, torch.zeros(3, 1).long(), weights, 12, None, layout=layout)
        recv_x.sum().backward()
    return [x.grad]


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_the_gradient_of_a_sum_over_no_rows(ranks2: RankPool, layout: str) -> None:
    for (grad,) in ranks2.run(sums_of_nothing, layout):
        assert torch.equal(grad, torch.ones(3, 8))


LOSSES = {"both": (2.0, 3.0), "recv_x alone": (5.0, None), "recv_probs alone": (None, 7.0), "zero times": (0.0, 0.0)}


def partial_losses(rank: int, world: int, scene: Scene, losses: list[str]) -> list[Any]:
    layer = Layer(scene)
    x, weights, *_ = leaves(layer, rank)
    of_x, of_weights = LOSSES[losses[rank]]
    with buffers(adversary=scene.adversary):
        recv_x, recv_idx, recv_weights, *_ = dispatch_of(layer, rank, x, weights)
        kept = recv_weights if recv_idx is None else torch.where(recv_idx >= 0, recv_weights, 0.0)
        parts = [part.sum() * factor for part, factor in ((recv_x, of_x), (kept, of_weights)) if factor is not None]
        torch.stack(parts).sum().backward()
    return [x.grad, weights.grad]


@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("tokens", [(0, 9), (1, 9), (CEILING, 4)], ids=str)
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_a_missing_gradient_travels_as_zeros(
    ranks2: RankPool, layout: str, tokens: tuple[int, int], adversary: int | None
) -> None:
    scene = scene_for(2, layout, tokens=tokens, adversary=adversary, routing="masked")
    idx = Layer(scene).idx
    for first in LOSSES:
        for second in LOSSES:
            factors = [[part or 0.0 for part in LOSSES[name]] for name in (first, second)]
            for rank, (of_x, of_weights) in enumerate(ranks2.run(partial_losses, scene, [first, second])):
                home = idx[rank].clamp_min(0) // scene.local_experts
                picked = idx[rank] >= 0
                want_weights = torch.where(home == 1, factors[1][1], factors[0][1]) * picked
                there = [(picked & (home == r)).sum(1).double() for r in (0, 1)]
                if scene.layout == "token":
                    there = [count.clamp_max(1) for count in there]
                want_x = there[0] * factors[0][0] + there[1] * factors[1][0]
                assert torch.equal(of_weights, want_weights.double()), (first, second, rank)
                assert torch.equal(of_x, want_x[:, None].expand(-1, scene.hidden)), (first, second, rank)


def not_a_number(rank: int, world: int, scene: Scene) -> list[Tensor]:
    """Output and gradient of tokens when token 0 of rank 0 is nan and a weight of token 1 is infinite."""
    layer = Layer(scene)
    x, weights, matrices, biases = leaves(layer, rank)
    with torch.no_grad():
        if rank == 0:
            x[0] = float("nan")
            weights[1, 0] = float("inf")
    with buffers(adversary=scene.adversary):
        y = layer_forward(layer, rank, x, weights, matrices, biases)
        (y * layer.targets[rank]).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_nan_stays_with_its_token(ranks2: RankPool, layout: str) -> None:
    scene = scene_for(2, layout, adversary=3)
    (y, x_grad), rest = ranks2.run(not_a_number, scene)
    assert y[0].isnan().all()
    assert not y[1].isfinite().any()
    assert all(part.isfinite().all() for part in (y[2:], x_grad[2:], *rest))


# A rank that dies.


def killed(rank: int, world: int, when: str) -> list[Any]:
    """The last rank kills itself; what the others raise, how long it takes, and how long closing takes then."""

    def die() -> None:
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    x = torch.ones(3, 8, requires_grad=True)

    def step() -> None:
        if when == "before construction":
            die()
        recv, *_, handle = dispatch(inputs() | {"x": x})
        dist.barrier()
        if when == "before combine":
            die()
        y, _ = fused_combine(recv, None, handle)
        dist.barrier()
        if when == "before backward":
            die()
        y.sum().backward()

    with buffers():
        seen = attempt(step)
        start = time.monotonic()
        close_buffers()
        return [seen, time.monotonic() - start]


@pytest.mark.parametrize("when", ["before construction", "before combine", "before backward"])
def test_a_killed_rank_ends_the_others(when: str) -> None:
    kind = "MissingRankError" if when == "before construction" else "CommunicationError"
    outcomes = Launch.fresh(3, killed, when, timeout=40, env={f"{PREFIX}AGREE_SECS": "2"})
    assert outcomes[-1].exit_code == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.failure is None, outcome.failure
        seen, closing = outcome.value
        check([seen], kind, *(["rank 2"] if kind == "MissingRankError" else []))
        assert closing < 1.0
