"""Closing: what uses a closed buffer raises, here and on ranks that wait for this one; nobody else is disturbed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_cases import HANG, Seen, attempt, good_step
from launch import Failure, Launch, RankPool
from scene import buffers, raised_by, replaced

from megatron_moe_v2 import close_buffers, fused_combine, fused_dispatch, prepare_buffer
from megatron_moe_v2.buffers import exchange
from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer
from megatron_moe_v2.pool import pool


def used_after(rank: int, world: int, destroy_group: bool, wait: bool) -> list[Failure | None]:
    """Every use of what two earlier dispatches left, after a close, or after the group is gone."""
    with buffers():
        group = dist.new_group()
        x = torch.ones(3, 8, requires_grad=True)

        def dispatch() -> Any:
            sent = fused_dispatch(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), 8, group, wait=wait)
            return sent if wait else sent.wait()

        (recv, *_), (other, *_, handle) = dispatch(), dispatch()
        combined = fused_combine(other.detach().requires_grad_(), group, handle, wait=wait)
        combined = (combined if wait else combined.wait())[0]
        if destroy_group:
            dist.destroy_process_group(group)
        else:
            close_buffers()
        uses = [lambda: recv.sum().backward(), lambda: combined.sum().backward()]
        uses.append(lambda: fused_combine(other, group, handle, wait=wait))
        if destroy_group:
            uses.append(dispatch)
        return [raised_by(use) for use in uses]


@pytest.mark.parametrize("destroy_group", [False, True], ids=["closed", "group-destroyed"])
@pytest.mark.parametrize("wait", [True, False])
def test_use_after_close_raises(ranks2: RankPool, destroy_group: bool, wait: bool) -> None:
    for failures in ranks2.run(used_after, destroy_group, wait):
        for failure in failures:
            assert failure is not None
            assert failure.isa("BufferClosedError"), failure
            assert "process group was destroyed" in failure.text or "closed" in failure.text


def kept_alive(rank: int, world: int, by_entry: bool) -> tuple[bool, bool]:
    """Whether the buffer lives before and after a close, beside the handle and the graph of a dispatch made again."""
    with buffers() as built:
        x = torch.ones(3, 8, requires_grad=True)
        for _ in range(2):
            kept = fused_dispatch(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), 8, None)
        (entry,) = pool.entries()
        built.clear()
        buffer = weakref.ref(entry.buffer)
        before = buffer() is not None
        if by_entry:
            entry.close()
        else:
            close_buffers()
        gc.collect()
        assert kept[0].requires_grad
        return before, buffer() is not None


@pytest.mark.parametrize("by_entry", [False, True], ids=["close_buffers", "entry.close"])
def test_a_closed_buffer_is_let_go(ranks1: RankPool, by_entry: bool) -> None:
    assert ranks1.run(kept_alive, by_entry) == [(True, False)]


def leaves_early(rank: int, world: int, what: str) -> Seen:
    """Rank 1 closes after two steps, where the others make a third, in forward or backward, or build a buffer."""
    with buffers():
        good_step()
        x = torch.ones(3, 8, requires_grad=True)
        recv, *_ = fused_dispatch(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), 12, None)
        if rank == 1:
            seen = attempt(close_buffers)
            time.sleep(4)  # it lives on, so that no lost connection tells the others
            return seen
        others = {
            "dispatch": good_step,
            "backward": lambda: recv.sum().backward(),
            "build": lambda: prepare_buffer(hidden=32),
        }
        return attempt(others[what])


@pytest.mark.parametrize(("world", "what"), [(3, "dispatch"), (3, "backward"), (2, "build")])
def test_who_waits_for_a_rank_that_closed_is_told(world: int, what: str) -> None:
    outcomes = Launch.fresh(world, leaves_early, what, timeout=HANG)
    for rank, outcome in enumerate(outcomes):
        failure, seconds = outcome.value
        if rank == 1:
            assert failure is None
            assert seconds < 1  # it waits for nobody
        else:
            assert failure.type_name == "CommunicationError"
            assert "rank 1 closed its buffer after call" in failure.text
            assert "and does not come to call" in failure.text
            assert seconds < 4


def interrupted(rank: int, world: int, then: str) -> list[Failure | None]:
    """Rank 1 is interrupted while it waits for rank 0, catches that, and goes on or closes."""
    with buffers():
        good_step()
        if rank == 0:
            time.sleep(2)
            return [raised_by(good_step), raised_by(good_step)]
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            good_step()
        except KeyboardInterrupt:
            seen = [raised_by(close_buffers if then == "close" else good_step), raised_by(good_step)]
        time.sleep(4)  # it lives on, so that no lost connection tells the other
        return seen


@pytest.mark.parametrize("then", ["close", "go on"])
def test_after_an_interrupt_a_rank_is_out_of_step(then: str) -> None:
    (waited, again), (after, later) = (one.value for one in Launch.fresh(2, interrupted, then, timeout=HANG))
    assert waited.type_name == "CommunicationError"
    assert "rank 1 closed its buffer after call" in waited.text
    assert again.type_name == "CommunicationError"
    assert later.type_name in ("CommunicationError", "MissingRankError")
    if then == "close":
        assert after is None
    else:
        assert "KeyboardInterrupt interrupted call" in after.text


def ends_badly(rank: int, world: int, how: str) -> Failure | None:
    """Rank 1 closes while an exception passes, by abort or not, or its group is gone; rank 0 waits for it."""
    with buffers():
        group = dist.new_group()
        x = torch.ones(3, 8, requires_grad=True)
        recv, *_ = fused_dispatch(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), 12, group)
        if rank == 0:
            failure = raised_by(lambda: recv.sum().backward())
            close_buffers(abort=True)
            return failure
        if how == "group destroyed":
            dist.destroy_process_group(group)
            failure = raised_by(lambda: recv.sum().backward())
        else:
            failure = raised_by(lambda: fails(abort=how == "aborted"))
        time.sleep(4)
        return failure


def fails(abort: bool) -> None:
    try:
        raise ValueError("expert 3 failed")
    finally:
        close_buffers(abort=abort)


@pytest.mark.parametrize("how", ["closed", "aborted", "group destroyed"])
def test_the_others_hear_why(how: str) -> None:
    waited, ended = (one.failure for one in Launch.fresh(2, ends_badly, how, timeout=HANG))
    assert waited is not None
    assert ended is not None
    assert waited.type_name == "CommunicationError"
    assert "rank 1 closed its buffer after call" in waited.text
    if how == "group destroyed":
        assert ended.type_name == "BufferClosedError"
    else:
        assert ended.type_name == "ValueError"
        assert "while it handled ValueError: expert 3 failed" in waited.text


def tried_again(rank: int, world: int) -> list[Failure | None]:
    """Who waited for rank 1 goes on with the same buffer, then all with new ones; rank 2 looks last."""
    with buffers(AGREE_SECS=2), replaced(exchange, "_LOOK_SECS", 0.3 + rank):
        good_step()
        first = raised_by(close_buffers if rank == 1 else good_step)
        again = None if rank == 1 else raised_by(good_step)
        close_buffers(abort=True)
        return [first, again, raised_by(good_step)]


def test_going_on_after_it_raises_everywhere() -> None:
    outcomes = Launch.fresh(3, tried_again, timeout=HANG)
    for rank, outcome in enumerate(outcomes):
        first, again, anew = outcome.value
        assert (first is None) == (rank == 1)
        assert rank == 1 or again.type_name == "CommunicationError"
        assert anew.type_name == "CommunicationError"
        assert ("closed its buffer" if rank == 1 else "out of step since rank 1 closed its buffer") in anew.text


def slow_but_right(rank: int, world: int) -> None:
    """Rank 0 comes seconds late to calls that follow a close: of another buffer, of all, in another group."""
    late = 2.5 if rank == 0 else 0.0
    with buffers():
        good_step()
        kept, other = prepare_buffer(hidden=8, num_topk=2), prepare_buffer(hidden=32)
        other.close()
        time.sleep(late)
        good_step()
        assert not kept.closed
        close_buffers()
        good_step()
        close_buffers()
        prepare_buffer(hidden=8, num_topk=2)
        time.sleep(late)
        good_step()
        group = dist.new_group()
        fused_dispatch(torch.ones(3, 8), torch.zeros(3, 1).long(), torch.ones(3, 1), 12, group)
        close_buffers(group)
        time.sleep(late)
        good_step()


def test_who_is_late_after_a_close_is_waited_for(ranks2: RankPool) -> None:
    ranks2.run(slow_but_right, timeout=HANG)


def one_refuses(rank: int, world: int) -> tuple[str, int]:
    """The first of two buffers cannot be destroyed."""
    with buffers():
        first, _ = prepare_buffer(hidden=8).buffer, prepare_buffer(hidden=32)
        destroy = EmbeddedElasticBuffer.destroy

        def refuse(self: Any) -> None:
            if self is first:
                raise OSError("busy")
            destroy(self)

        with replaced(EmbeddedElasticBuffer, "destroy", refuse):
            failure = raised_by(close_buffers)
        assert failure is not None
        return failure.text, len(pool.entries())


def test_all_are_closed_though_one_raises(ranks2: RankPool) -> None:
    assert ranks2.run(one_refuses) == [("busy", 0)] * 2
