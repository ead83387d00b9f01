"""The launcher itself: results, failures, hangs, deaths."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from launch import Launch, RankPool, RemoteError, join_anew, join_group


def total(rank: int, world: int, amount: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([rank + amount])
    dist.all_reduce(value)
    return os.getpid(), value


def raise_on(rank: int, world: int, bad: int) -> str:
    if rank == bad:
        raise ValueError("not this one")
    return "fine"


def hang_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        time.sleep(600)
    dist.barrier()


def die_on(rank: int, world: int, bad: int) -> str:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def leave_and_join(rank: int, world: int) -> int:
    join_group("again")
    value = torch.ones(())
    dist.all_reduce(value)
    return int(value)


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return RankPool(2)


def test_results_in_rank_order_from_lasting_processes(pool: RankPool) -> None:
    first, second = pool.run(total, 5), pool.run(total, 6)
    assert [int(value) for _, value in first + second] == [11, 11, 13, 13]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first}) == 2


def test_a_raise_carries_type_and_text_and_keeps_the_processes(pool: RankPool) -> None:
    before = [pid for pid, _ in pool.run(total, 1)]
    with pytest.raises(RemoteError, match="rank 1: ValueError: not this one") as caught:
        pool.run(raise_on, 1)
    assert caught.value.failures[1].isa(ValueError)
    assert caught.value.outcomes[0] == "fine"
    assert [pid for pid, _ in pool.run(total, 1)] == before


def test_a_hang_ends_at_the_time_out_and_the_pool_recovers(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RemoteError, match="Hung") as caught:
        pool.run(hang_on, 0, timeout=1.5)
    assert time.monotonic() - start < 10
    assert "hang_on" in caught.value.failures[0].trace
    assert int(pool.run(total, 0)[0][1]) == 1
    pool.close()


def test_fresh_reports_a_killed_rank() -> None:
    survivor, killed = Launch.fresh(2, die_on, 1)
    assert (survivor.value, survivor.exit_code) == ("alive", 0)
    assert killed.failure is not None
    assert (killed.failure.type_name, killed.exit_code) == ("Died", -signal.SIGKILL)
    assert killed.seconds < 10


def test_fresh_ranks_can_make_their_own_group() -> None:
    assert [outcome.value for outcome in Launch.fresh(2, leave_and_join, init=False)] == [2, 2]


def joined_sum(rank: int, world: int, fails: bool = False) -> tuple[int, int, str, str | None]:
    if fails and rank:
        raise ValueError("not this one")
    left = os.environ.get("LEFT_BEHIND")
    join_anew("gloo", rank, world)
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    os.environ["LEFT_BEHIND"] = "1"
    return os.getpid(), int(value), os.environ["WANTED"], left


def test_kept_processes_make_a_group_for_each_call() -> None:
    first, second = ([one.value for one in Launch.kept(2, joined_sum, env={"WANTED": name})] for name in "ab")
    assert [one[0] for one in first] == [one[0] for one in second]
    assert [one[1:] for one in (*first, *second)] == [(3, "a", None)] * 2 + [(3, "b", None)] * 2
    failed = Launch.kept(2, joined_sum, True, env={"WANTED": "c"}, timeout=5)
    assert failed[1].failure is not None
    assert failed[1].failure.isa(ValueError)
    third = [one.value for one in Launch.kept(2, joined_sum, env={"WANTED": "d"})]
    assert {one[0] for one in third}.isdisjoint(one[0] for one in first)
    assert [one[1:] for one in third] == [(3, "d", None)] * 2
