"""What of CUDA graphs shows without a GPU: preparation, refusal to close, and the plain callable."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from launch import RankPool
from scene import CEILING, buffers, raised_by

from megatron_moe_v2 import capture, close_buffers, fused_dispatch, prepare_for_capture
from megatron_moe_v2.pool import pool

SIZES: dict[str, Any] = {"hidden": 8, "num_topk": 2, "num_experts": 4}


def prepared(rank: int, world: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with buffers(DECODE_MAX_TOKENS_PER_RANK=6) as built:
        fits = {"decode_max_batch": 6, "running_requests": 12, "dp_size": world}
        wrong = {**fits, "running_requests": 14 if rank == 1 else 12}
        seen["too many on one rank"] = raised_by(lambda: prepare_for_capture(**SIZES, workload=wrong))
        entry = prepare_for_capture(**SIZES, workload=fits)
        seen["ceiling"] = entry.spec.num_max_tokens_per_rank
        seen["built"] = len(built)
        seen["plain"] = capture(lambda value: value + 1, 1)(2)
    return seen


def test_preparation_checks_the_workload_on_every_rank(ranks2: RankPool) -> None:
    for seen in ranks2.run(prepared):
        assert seen["too many on one rank"].type_name == "CapacityError"
        assert "DECODE_MAX_TOKENS_PER_RANK" in seen["too many on one rank"].text
        assert (seen["ceiling"], seen["built"], seen["plain"]) == (6, 1, 3)


class Graph:
    """Stands where a captured callable stands."""

    released = False

    def release(self) -> None:
        self.released = True


def one_rank_refuses(rank: int, world: int) -> dict[str, Any]:
    """A graph still lives on rank 0 alone, on a backend that can be captured."""
    seen: dict[str, Any] = {}
    with buffers():
        entry = prepare_for_capture(**SIZES)
        kept, entry.backend = entry.backend, dataclasses.replace(entry.backend, name="deepep_v2")
        if rank == 0:
            entry.note_capture()
        seen["refused"] = raised_by(close_buffers)
        seen["closed"] = entry.closed
        entry.backend = kept
        seen["context"] = raised_by(lambda: entry.__exit__(None, None, None)) if rank == 0 else None
        seen["forced"] = raised_by(lambda: close_buffers(release_graphs=True))
    return seen


def test_ranks_refuse_to_close_together(ranks2: RankPool) -> None:
    first, second = ranks2.run(one_rank_refuses)
    for seen in (first, second):
        assert seen["refused"].type_name == "CapturedBufferError"
        assert seen["closed"] is False
        assert seen["forced"] is None
    assert first["context"].type_name == "CapturedBufferError"


def own_ceiling(rank: int, world: int) -> list[Any]:
    """A small buffer for a graph is built first: an ordinary dispatch has the usual ceiling all the same."""
    with buffers() as built:
        prepare_for_capture(**SIZES, num_max_tokens_per_rank=3, workload={"decode_max_batch": 3})
        refused = raised_by(
            lambda: prepare_for_capture(**SIZES, num_max_tokens_per_rank=2, workload={"decode_max_batch": 3})
        )
        x, idx, weights = torch.ones(CEILING, 8), torch.arange(2).expand(CEILING, 2), torch.ones(CEILING, 2)
        fused_dispatch(x, idx, weights, 4, None)
        return [len(built), refused.type_name]


def test_a_graph_s_own_ceiling_is_not_the_usual_one(ranks2: RankPool) -> None:
    assert ranks2.run(own_ceiling) == [[2, "CapacityError"]] * 2


def closing(rank: int, world: int, behind_our_back: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with buffers():
        entry = prepare_for_capture(**SIZES)
        graph = Graph()
        entry.capturing = None if behind_our_back else graph
        entry.note_capture()
        entry.capturing = None
        seen["refused"] = raised_by(close_buffers)
        seen["still there"] = (entry.closed, len(pool.entries()))
        seen["forced"] = raised_by(lambda: close_buffers(release_graphs=True))
        seen["after"] = (entry.closed, graph.released)
        entry = prepare_for_capture(**SIZES)
        entry.capturing = graph
        entry.note_capture()
        entry.capturing = None
        del graph
        seen["dropped"] = raised_by(close_buffers)
    return seen


@pytest.mark.parametrize("behind_our_back", [True, False])
def test_a_captured_buffer_refuses_to_close(ranks2: RankPool, behind_our_back: bool) -> None:
    for seen in ranks2.run(closing, behind_our_back):
        assert seen["refused"].type_name == "CapturedBufferError"
        assert seen["still there"] == (False, 1)
        assert seen["forced"] is None
        assert seen["after"] == (True, not behind_our_back)
        assert seen["dropped"] is None
