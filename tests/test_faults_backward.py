"""One rank differs in what it differentiates: the others hear of it, and the next attempt works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_cases import HANG, Seen, attempt, check, dispatch, good_step, inputs
from launch import RankPool
from scene import buffers, raised_by

from megatron_moe_v2 import FlexTokenDispatcher, fused_combine, fused_dispatch


def frozen_on_one_rank(rank: int, world: int, frozen: str, checked: bool) -> list[Any]:
    """Weights or tokens need a gradient on rank 0 alone."""
    with buffers(CHECK=int(checked)):
        given = inputs()
        for name in ("x", "token_probs"):
            given[name].requires_grad_(rank == 0 or name != frozen)

        def step() -> None:
            recv, _, weights, _, handle = dispatch(given)
            fused_combine(recv * weights.sum(1, keepdim=True), None, handle)[0].sum().backward()

        seen = attempt(step)
        good_step()
    return [seen]


def test_needs_grad_differs(ranks2: RankPool) -> None:
    check([s for (s,) in ranks2.run(frozen_on_one_rank, "token_probs", False)], "RankMismatchError", "no weights")
    for frozen in ("x", "token_probs"):
        outcomes = [s for (s,) in ranks2.run(frozen_on_one_rank, frozen, True)]
        check(outcomes, "RankMismatchError", "gradients", "rank 0: ", "rank 1: ")


# A rank without rows whose loss is the sum that the README recommends.


def _without_rows(rank: int, world: int) -> list[list[int]]:
    shapes = []
    with buffers():
        for options in ({"layout": "token"}, {"layout": "expert", "expert_alignment": 4}):
            dispatcher = FlexTokenDispatcher(num_experts=4, **options)  # type: ignore[arg-type]
            for scale in (0.0, 1.0):
                tokens = 0 if rank == 1 else 3
                x = torch.randn(tokens, 8, requires_grad=True)
                idx, weights = torch.zeros(tokens, 2).long() + torch.arange(2), torch.ones(tokens, 2)
                sent = dispatcher.dispatch(x, idx, weights)
                (scale * dispatcher.combine(sent.tokens * 1, sent).sum()).backward()
                assert x.grad is not None
                shapes.append(list(x.grad.shape))
    return shapes


def test_a_rank_without_rows_goes_backward_from_a_sum(ranks2: RankPool) -> None:
    assert ranks2.run(_without_rows) == [[[3, 8]] * 4, [[0, 8]] * 4]


def _integer_rows(rank: int, world: int, layout: str) -> Any:
    with buffers():
        dispatcher = FlexTokenDispatcher(num_experts=4, layout=layout)  # type: ignore[arg-type]
        sent = dispatcher.dispatch(torch.ones(3, 8), torch.arange(2).expand(3, 2), torch.ones(3, 2))
        rows = sent.tokens.int() if rank == 1 else sent.tokens
        return {"combine": raised_by(lambda: dispatcher.combine(rows, sent, apply_weights=False))}


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_rows_of_a_wrong_dtype_on_one_rank(ranks2: RankPool, layout: str) -> None:
    for seen in ranks2.run(_integer_rows, layout):
        failure = seen["combine"]
        assert failure.type_name == "InputError"
        assert "expert_output" in failure.text


def second_derivative_on_one_rank(rank: int, world: int) -> Seen:
    with buffers():
        x = torch.ones(3, 8, requires_grad=True)
        recv_x, *_, handle = fused_dispatch(x, torch.zeros(3, 1).long(), torch.ones(3, 1), 2, None)
        y, _ = fused_combine(recv_x, None, handle)
        seen = attempt(lambda: torch.autograd.grad(y.sum(), x, create_graph=rank == 1))
        good_step()
    return seen


def test_a_refused_second_derivative_is_heard_of(ranks2: RankPool) -> None:
    check(ranks2.run(second_derivative_on_one_rank, timeout=HANG), "InputError", "create_graph=True")


def in_a_way_of_its_own(rank: int, world: int, bad_rank: int, what: str) -> list[Seen]:
    """A rank goes backward through a graph that it freed, or dispatches inside ``torch.func.grad``."""
    with buffers():
        good_step()
        arguments = inputs() | {"x": torch.ones(3, 8, requires_grad=True)}
        recv, *_ = dispatch(arguments)
        if what == "freed":
            recv.sum().backward(retain_graph=rank != bad_rank)
            seen = attempt(lambda: recv.sum().backward())
        elif rank == bad_rank:
            transformed = torch.func.grad(lambda x: dispatch(inputs() | {"x": x}, wait=what == "func")[0].sum())
            seen = attempt(lambda: transformed(torch.ones(3, 8)))
        else:
            seen = attempt(lambda: dispatch(wait=what == "func"))
        good_step()
    return [seen]


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "text"), [("freed", "second time"), ("func", "torch.func"), ("func, later", "torch.func")]
)
def test_what_autograd_refuses_on_one_rank_is_heard_of(ranks2: RankPool, what: str, text: str, bad_rank: int) -> None:
    for ((failure, seconds),) in ranks2.run(in_a_way_of_its_own, bad_rank, what, timeout=HANG):
        assert failure is not None
        assert text in failure.text
        assert seconds < 5
