"""Buffers prepared and warmed up before step 0, and the heartbeat; on the CPU, where warm-up only has to run."""

from __future__ import annotations

import logging
import time

import pytest
import torch
import torch.distributed as dist
from launch import RankPool
from scene import buffers, environment

from megatron_moe_v2 import InputError, close_buffers, fused_combine, fused_dispatch, prepare_buffer
from megatron_moe_v2.heartbeat import PERIOD_SECS, Heartbeat, heartbeat
from megatron_moe_v2.pool import pool


def _warmed(rank: int, world: int) -> tuple[int, int]:
    before, operations = pool.constructions, heartbeat.operations(dist.group.WORLD).number
    prepare_buffer(hidden=8, num_topk=2, num_experts=4, warmup=True, expert_alignment=4)
    warm = heartbeat.operations(dist.group.WORLD).number - operations
    idx = torch.zeros(3, 2, dtype=torch.int64) + torch.arange(2)
    recv_x, *_, handle = fused_dispatch(torch.ones(3, 8), idx, torch.ones(3, 2), 4, None)
    fused_combine(recv_x, None, handle)
    built = pool.constructions - before
    close_buffers()
    return built, warm


def test_warm_up_runs_both_directions_of_both_layouts_on_one_buffer(ranks2: RankPool) -> None:
    assert ranks2.run(_warmed) == [(1, 8)] * 2  # per layout a dispatch, two combines, a cached dispatch


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmup": True},
        {"warmup": True, "num_experts": 4, "num_topk": 2, "layouts": "expert"},
        {"num_sms": -1},
        {"num_sms": "tune"},
        {"static_shapes": 1},
    ],
    ids=["no number of experts", "a string for layouts", "negative SMs", "SMs in words", "a flag that is a number"],
)
def test_what_warm_up_needs(ranks1: RankPool, wrong: dict[str, object]) -> None:
    ranks1.run(_refused, wrong)


def _refused(rank: int, world: int, wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        prepare_buffer(hidden=8, **wrong)  # type: ignore[arg-type]


def _heard(rank: int, world: int) -> str:
    """Rank 1 falls silent after its first word."""
    beats = Heartbeat()
    beats.operations(dist.group.WORLD).note("dispatch", (rank + 5, 8))
    beats.start()
    time.sleep(0.5 * PERIOD_SECS)
    dist.barrier()
    if rank == 1:
        beats.stop()
    time.sleep(1.5 * PERIOD_SECS)
    dist.barrier()
    text = beats.report(dist.group.WORLD)
    dist.barrier()
    beats.stop()
    return text


def test_the_silent_rank_is_named(ranks2: RankPool) -> None:
    text, _ = ranks2.run(_heard)
    assert "rank 0: alive" in text
    assert "rank 1: SILENT" in text
    assert "operation 1: dispatch of [6, 8]" in text


def _begins_again(rank: int, world: int) -> bool:
    """A heartbeat that is started for another default store goes on."""
    beats = Heartbeat()
    beats.start()
    time.sleep(0.2)
    beats._posts_to = None  # as after destroy_process_group() and another init
    beats.start()
    thread = beats._thread
    alive = thread is not None and thread.is_alive()
    beats.stop()
    return alive


def test_the_heartbeat_begins_again_for_another_store(ranks1: RankPool) -> None:
    assert ranks1.run(_begins_again) == [True]


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _waits(rank: int, world: int) -> list[str]:
    """Ranks come to the second dispatch after 0, 4 and 13 seconds; what the watchdog of each said."""
    said, logger = _Texts(), logging.getLogger("megatron_moe_v2.watchdog")
    logger.addHandler(said)
    try:
        with buffers():
            x, idx, weights = torch.ones(3, 8), torch.zeros(3, 1).long(), torch.ones(3, 1)
            fused_dispatch(x, idx, weights, 4, None)
            with environment(AGREE_SECS=7):
                time.sleep([0, 4, 15, 0][rank])
                fused_dispatch(x, idx, weights, 4, None)
    finally:
        logger.removeHandler(said)
    return said.texts


def test_ranks_that_wait_name_the_late_one(ranks4: RankPool) -> None:
    first, second, late, _ = ranks4.run(_waits)
    assert late == []
    (text,) = first
    assert "rank 0 (" in text
    for text in (*first, *second):
        assert "dispatch of [3, 8]. Not waiting in it: rank 2." in text
    assert "test_prepare.py" in text
    assert "in _waits" in text
