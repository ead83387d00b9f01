"""Agreement between ranks: equal facts pass, anything else raises the same on every rank, and the next one works."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from launch import Failure, RankPool
from scene import raised_by, replaced

from megatron_moe_v2 import agreement
from megatron_moe_v2.agreement import agree, is_registered
from megatron_moe_v2.errors import CapacityError


def world_group() -> Any:
    return dist.group.WORLD


def agreed(rank: int, world: int) -> list[Any]:
    """What is decided where facts are equal; and what later agreements decide."""
    return [
        agree(world_group(), "the weather", {"sky": "blue", "list": [1, None]}, timeout=5.0),
        agree(world_group(), "a number", {}, timeout=5.0, decide={"number": rank + 7, "text": "ä"}),
        *(agree(world_group(), "turn", {"turn": n}, timeout=5.0, decide={"turn": n})["turn"] for n in range(20)),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
def test_equal_facts_pass_and_rank_0_decides(ranks: RankPool) -> None:
    for results in ranks.run(agreed):
        assert results == [{}, {"number": 7, "text": "ä"}, *range(20)]


Disagree = Callable[[int], Any]

DISAGREEMENTS: dict[str, tuple[str, list[str], Disagree]] = {
    "a fact": (
        "RankMismatchError",
        ["rank 0,2-3: hidden=8", "rank 1: hidden=9"],
        lambda rank: agree(world_group(), "a", {"hidden": 8 + (rank == 1), "same": 1}, timeout=5.0),
    ),
    "a fact that some lack": (
        "RankMismatchError",
        ["rank 0-2: extra=None", "rank 3: extra=1"],
        lambda rank: agree(world_group(), "a", {"extra": 1} if rank == 3 else {}, timeout=5.0),
    ),
    "the topic": (
        "RankMismatchError",
        ["rank 0: dispatch", "rank 1-3: combine"],
        lambda rank: agree(world_group(), "combine" if rank else "dispatch", {}, timeout=5.0),
    ),
    "an error of ours": (
        "CapacityError",
        ["too many rows: got 9, expected 8"],
        lambda rank: agree(
            world_group(),
            "a",
            {},
            timeout=5.0,
            failure=CapacityError("too many rows", got=9, expected=8) if rank == 2 else None,
        ),
    ),
    "another error": (
        "Exception",
        ["division by zero"],
        lambda rank: agree(
            world_group(), "a", {}, timeout=5.0, failure=ZeroDivisionError("division by zero") if rank == 0 else None
        ),
    ),
}


def disagreed(rank: int, world: int, name: str) -> tuple[Failure, float, Any]:
    start = time.monotonic()
    failure = raised_by(lambda: DISAGREEMENTS[name][2](rank))
    seconds = time.monotonic() - start
    return failure, seconds, agree(world_group(), "after it", {"name": name}, timeout=5.0, decide={"fine": 1})


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_any_difference_raises_on_every_rank(ranks4: RankPool, name: str) -> None:
    kind, lines, _ = DISAGREEMENTS[name]
    for failure, seconds, after in ranks4.run(disagreed, name):
        assert failure.isa(kind), failure
        for line in lines:
            assert line in failure.text
        assert seconds < 5
        assert after == {"fine": 1}


def test_other_ranks_hear_who_failed(ranks4: RankPool) -> None:
    texts = [failure.text for failure, _, _ in ranks4.run(disagreed, "an error of ours")]
    assert [text.startswith("on rank 2: ") for text in texts] == [True, True, False, True]
    kinds = [failure.type_name for failure, _, _ in ranks4.run(disagreed, "another error")]
    assert kinds == ["ZeroDivisionError", *["RankMismatchError"] * 3]


def alone(rank: int, world: int) -> list[Failure]:
    def action() -> None:
        agree(world_group(), "a", {}, timeout=1.0, failure=KeyError("mine"))

    return [raised_by(action)]


def test_a_single_rank_raises_its_own_error(ranks1: RankPool) -> None:
    assert ranks1.run(alone)[0][0].type_name == "KeyError"


# Threads.


def in_threads(rank: int, world: int) -> list[Failure | None]:
    """Two threads agree, each over a group of its own, one of them later; the ranks begin with different ones."""
    groups = [dist.new_group(), dist.new_group()]
    seen: list[Failure | None] = []

    def hold(group: dist.ProcessGroup, late: float) -> None:
        time.sleep(late)
        seen.append(raised_by(lambda: agree(group, "a thread's", {}, timeout=4.0)))

    begun = [threading.Thread(target=hold, args=(group, 0.5 * (index == rank))) for index, group in enumerate(groups)]
    for thread in begun:
        thread.start()
    for thread in begun:
        thread.join()
    return seen


def test_threads_do_not_keep_each_other_waiting(ranks2: RankPool) -> None:
    assert ranks2.run(in_threads, timeout=20) == [[None, None]] * 2


# A rank that does not come.


def absent(rank: int, world: int, missing: list[int], tag: str) -> tuple[Failure, float, int]:
    """Ranks in ``missing`` come after the others gave up; then all agree anew."""
    store = dist.distributed_c10d._get_default_store()
    if rank in missing:
        store.wait([f"{tag}/{other}" for other in range(world) if other not in missing])
    start = time.monotonic()
    failure = raised_by(lambda: agree(world_group(), "roll call", {}, timeout=1.0, decide={"late": 1}))
    seconds = time.monotonic() - start
    store.set(f"{tag}/{rank}", "gave up")
    dist.barrier()
    for attempt in range(3):
        if raised_by(lambda: agree(world_group(), "again", {}, timeout=5.0)) is None:
            return failure, seconds, attempt
    return failure, seconds, 99


@pytest.mark.parametrize("missing", [[2], [1, 3]], ids=str)
def test_a_missing_rank_is_named_and_may_come_later(ranks4: RankPool, missing: list[int]) -> None:
    for rank, (failure, seconds, attempts) in enumerate(ranks4.run(absent, missing, f"absent{os.getpid()}{missing}")):
        assert failure.type_name == "MissingRankError"
        assert f"rank {', '.join(map(str, missing))}" in failure.text
        assert "roll call" in failure.text
        assert ("This rank came after that" in failure.text) == (rank in missing)
        assert seconds < (0.9 if rank in missing else 4.5)
        assert attempts == 0


def test_missing_rank_0_is_named_by_the_others(ranks4: RankPool) -> None:
    outcomes = ranks4.run(absent, [0], f"absent{os.getpid()}zero")
    for failure, seconds, attempts in outcomes[1:]:
        assert failure.type_name == "MissingRankError"
        assert "from rank 0." in failure.text
        assert seconds < 6
        assert attempts <= 1
    assert outcomes[0][0] is None or outcomes[0][0].isa("RankMismatchError")


def judged_late(rank: int, world: int) -> dict[str, Any]:
    """The last report comes just as rank 0 stops waiting for it."""
    wait = agreement._Event.wait

    def too_short(self: Any, keys: list[str], timeout: float) -> bool:
        return wait(self, keys, timeout) and rank != 0

    with replaced(agreement._Event, "wait", too_short):
        return agree(world_group(), "late", {}, timeout=5.0, decide={"number": rank})


def test_who_comes_at_the_last_moment_is_there(ranks2: RankPool) -> None:
    assert ranks2.run(judged_late) == [{"number": 0}] * 2


def absent_in_subgroup(rank: int, world: int) -> list[Failure | None]:
    group = dist.new_group([1, 3])
    failure = None
    if rank == 1:
        failure = raised_by(lambda: agree(group, "pairs", {}, timeout=0.5))
    dist.barrier()
    return [failure, is_registered(group) if rank in (1, 3) else None, dist.destroy_process_group(group)]


def test_ranks_are_named_as_the_world_knows_them(ranks4: RankPool) -> None:
    failure = ranks4.run(absent_in_subgroup)[1][0]
    assert failure.type_name == "MissingRankError"
    assert "from rank 3." in failure.text


def registered(rank: int, world: int) -> list[bool]:
    group = dist.new_group(list(range(world)))
    before = is_registered(group)
    dist.destroy_process_group(group)
    return [before, is_registered(group), is_registered(world_group())]


def test_is_registered(ranks2: RankPool) -> None:
    assert ranks2.run(registered) == [[True, False, True]] * 2


class _Gone:
    """A store whose host has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer\nand a long stack")


def lost_store(rank: int, world: int) -> list[Failure]:
    with replaced(dist.distributed_c10d, "_get_default_store", _Gone):
        failure = raised_by(lambda: agree(world_group(), "a", {}, timeout=1.0))
    agree(world_group(), "after it", {}, timeout=5.0)
    return [failure]


def test_a_lost_store_is_a_communication_error(ranks2: RankPool) -> None:
    for (failure,) in ranks2.run(lost_store):
        assert failure.type_name == "CommunicationError"
        assert "Connection reset by peer" in failure.text
        assert "long stack" not in failure.text
