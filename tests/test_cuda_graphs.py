"""What of CUDA graphs shows without a GPU: preparation, refusal to close, and the plain callable."""

from __future__ import annotations

from typing import Any

import pytest
from launch import RankPool
from scene import buffers, raised_by

from megatron_moe_v2 import capture, close_buffers, prepare_for_capture
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
