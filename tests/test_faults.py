"""One rank is wrong: every rank raises the typed error in time, none hangs, and the next attempt works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_cases import HANG, Seen, attempt, bad_calls, check, dispatch, good_step, inputs
from launch import Launch, RankPool, RemoteError
from scene import buffers, environment, raised_by, replaced

from megatron_moe_v2 import FlexTokenDispatcher, close_buffers, fused_combine, fused_dispatch, prepare_buffer
from megatron_moe_v2.buffers import embedded, layout, rows
from megatron_moe_v2.fp8 import ScaleFormat
from megatron_moe_v2.settings import PREFIX

# Building.


def _failing_constructor() -> Any:
    def build(*_: Any, **__: Any) -> None:
        raise OSError("no such library")

    return replaced(embedded, "EmbeddedElasticBuffer", build)


# What is set on one rank alone, the error's type, and what its text must hold on every rank.
ENVIRONMENTS: dict[str, tuple[dict[str, object], str, list[str]]] = {
    "another ceiling": ({"MAX_TOKENS_PER_RANK": 16}, "RankMismatchError", ["12", "16", "rank 0: ", "rank 1: "]),
    "another hidden size": (
        {"HIDDEN": 32},
        "RankMismatchError",
        [f"spec.hidden ({PREFIX}HIDDEN)=8", f"{PREFIX}HIDDEN)=32", "rank 0: "],
    ),
    "another top-k": ({"NUM_TOPK": 8}, "RankMismatchError", [f"{PREFIX}NUM_TOPK)=2", f"{PREFIX}NUM_TOPK)=8"]),
    "another backend": ({"BACKEND": "embedded"}, "RankMismatchError", ["BACKEND=auto", "BACKEND=embedded"]),
    "a backend that is missing": ({"BACKEND": "deepep_v2"}, "BackendError", [f"{PREFIX}BACKEND=deepep_v2"]),
    "another topology": ({"MODE": "direct"}, "RankMismatchError", ["MODE=direct", "MODE=hybrid"]),
    "checks": ({"CHECK": 1}, "RankMismatchError", [f"settings.{PREFIX}CHECK=True", f"{PREFIX}CHECK=False"]),
    "a bad number": ({"HIDDEN": "wide"}, "SettingsError", [f"{PREFIX}HIDDEN", "'wide'", "an integer from 0"]),
    "a bad choice": ({"BACKEND": "nccl"}, "SettingsError", [f"{PREFIX}BACKEND", "'nccl'", "auto, deepep_v2"]),
    "a bad time-out": ({"AGREE_SECS": "soon"}, "SettingsError", [f"{PREFIX}AGREE_SECS", "'soon'"]),
    "a ceiling of 0": ({"MAX_TOKENS_PER_RANK": 0}, "SettingsError", [f"{PREFIX}MAX_TOKENS_PER_RANK", "'0'"]),
}


def built_with_another_environment(rank: int, world: int, bad_rank: int, prepared: bool) -> dict[str, Seen]:
    seen = {}
    for name, (variables, _, _) in ENVIRONMENTS.items():
        with buffers():
            with environment(**variables if rank == bad_rank else {}):
                seen[name] = attempt((lambda: prepare_buffer(hidden=8, num_topk=2)) if prepared else dispatch)
            good_step()
    return seen


@pytest.mark.parametrize("prepared", [True, False], ids=["prepare_buffer", "first dispatch"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_environments_differ(ranks2: RankPool, bad_rank: int, prepared: bool) -> None:
    outcomes = ranks2.run(built_with_another_environment, bad_rank, prepared)
    for name, (_, kind, parts) in ENVIRONMENTS.items():
        check([seen[name] for seen in outcomes], kind, *parts)


def built_with_other_arguments(rank: int, world: int, bad_rank: int) -> dict[str, Seen]:
    bad, seen = rank == bad_rank, {}
    actions: dict[str, Callable[[], Any]] = {
        "hidden": lambda: dispatch(inputs(hidden=16 if bad else 8)),
        "top-k": lambda: dispatch(inputs(topk=3 if bad else 2)),
        "ceiling": lambda: prepare_buffer(hidden=8, num_max_tokens_per_rank=16 if bad else None),
        "hidden 0": lambda: prepare_buffer(hidden=0 if bad else 8),
        "num_topk True": lambda: prepare_buffer(hidden=8, num_topk=True if bad else 1),
        "hidden list": lambda: prepare_buffer(hidden=[8] if bad else 8),
        "hidden None": lambda: prepare_buffer(hidden=None if bad else 8),
        "hidden text": lambda: prepare_buffer(hidden="8" if bad else 8, fp8=ScaleFormat()),
        "layouts None": lambda: prepare_buffer(hidden=8, layouts=None if bad else ("token",)),
        "expert_alignment text": lambda: prepare_buffer(hidden=8, expert_alignment="8" if bad else 8),
        "num_experts True": lambda: prepare_buffer(hidden=8, num_experts=True if bad else 2),
        "prepares another": lambda: prepare_buffer(hidden=32) if bad else dispatch(),
    }
    for name, action in actions.items():
        with buffers():
            seen[name] = attempt(action)
            good_step()
    with buffers():
        with _failing_constructor() if bad else environment():
            seen["constructor raises"] = attempt(dispatch)
        good_step()
    return seen


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_arguments_differ_or_a_constructor_raises(ranks2: RankPool, bad_rank: int) -> None:
    outcomes = ranks2.run(built_with_other_arguments, bad_rank)
    by_name = {name: [seen[name] for seen in outcomes] for name in outcomes[0]}
    check(by_name.pop("constructor raises"), "BackendError", "OSError", "no such library")
    for name in [name for name in by_name if name.endswith((" 0", " True", " list", " None", " text"))]:
        check(by_name.pop(name), "InputError", name.split()[0])
    for seen in by_name.values():
        check(seen, "RankMismatchError", "rank 0: ", "rank 1: ")


def second_spec_on_one_rank(rank: int, world: int, bad_rank: int) -> list[Any]:
    """After a first buffer one rank asks for another size, a miss, while the other's call is a hit."""
    with buffers():
        good_step()
        seen = attempt(lambda: dispatch(inputs(hidden=16 if rank == bad_rank else 8)))
        close_buffers(abort=True)
        for _ in range(3):  # until the ranks count their agreements alike again
            if raised_by(good_step) is None:
                break
        good_step()
    return [seen]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_rank_s_hit_against_another_s_miss(ranks2: RankPool, bad_rank: int) -> None:
    outcomes = ranks2.run(second_spec_on_one_rank, bad_rank, timeout=HANG)
    check([seen for (seen,) in outcomes], "RankMismatchError", "construction of a buffer", "dispatch of")


# A bad call of one rank.


FIRST = list(bad_calls(bad=False))
LATER = list(bad_calls(False, Launch))


def bad_call(rank: int, world: int, bad_rank: int, name: str, first: bool, checked: bool) -> list[Seen]:
    """The call, then the same made right; unless it is the ``first``, that was made before too."""
    with buffers(CHECK=int(checked)):
        handle = None if first else dispatch()[-1]
        if not first:
            bad_calls(False, handle)[name][1]()
        seen = attempt(bad_calls(rank == bad_rank, handle)[name][1])
        good_step()
        bad_calls(False, handle)[name][1]()
    return [seen]


@pytest.mark.parametrize("checked", [False, True], ids=["", "CHECK=1"])
@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_bad_call_of_one_rank(ranks2: RankPool, bad_rank: int, first: bool, checked: bool) -> None:
    wrong = []
    for name in FIRST if first else LATER:
        kind, _ = bad_calls(False, Launch)[name]
        parts = [f"{PREFIX}MAX_TOKENS_PER_RANK"] if kind == "CapacityError" else []
        try:
            check(
                [seen for (seen,) in ranks2.run(bad_call, bad_rank, name, first, checked, timeout=HANG)], kind, *parts
            )
        except (AssertionError, RemoteError) as error:
            text = next(iter(str(error).splitlines()), "")
            wrong.append(f"{name}: {text}")
            if "Hung" in str(error) or "Died" in str(error):
                break
    assert wrong == []


def bad_call_among_two_buffers(rank: int, world: int, bad_rank: int) -> dict[str, Seen]:
    """With two buffers in turn, a failure before it is known which one is meant leaves both in step."""
    seen = {}
    with buffers():
        for turn, last in enumerate((8, 16)):
            small, large = dispatch(), dispatch(inputs(hidden=16))
            dispatch(inputs(hidden=last))
            for hidden, recv in ((8, small), (16, large)):
                rows = recv[0][1:] if rank == bad_rank else recv[0]
                name = f"turn {turn}, hidden {hidden}"
                seen[name] = attempt(lambda r=rows, h=recv[-1]: fused_combine(r, None, h))
                wrong = inputs(hidden=hidden) | ({"token_probs": torch.ones(1, 1)} if rank == bad_rank else {})
                seen[f"{name}, dispatch"] = attempt(lambda w=wrong: dispatch(w))
                good_step(arguments=inputs(hidden=8))
                good_step(arguments=inputs(hidden=16))
    return seen


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_bad_call_among_two_buffers(ranks2: RankPool, bad_rank: int) -> None:
    outcomes = ranks2.run(bad_call_among_two_buffers, bad_rank, timeout=HANG)
    for name in outcomes[0]:
        check([seen[name] for seen in outcomes], "InputError" if "dispatch" in name else "HandleError")


def out_of_memory(rank: int, world: int, operation: str) -> list[Seen]:
    """One rank fails by no mistake of the caller, before anything is exchanged."""

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    with buffers():
        recv, *_, handle = dispatch()
        owner, name = {"dispatch": (layout, "destinations"), "combine": (rows, "pack_partials")}[operation]
        with replaced(owner, name, full) if rank == 1 else environment():
            seen = attempt(dispatch if operation == "dispatch" else lambda: fused_combine(recv, None, handle))
        good_step()
    return [seen]


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_out_of_memory_on_one_rank(ranks2: RankPool, operation: str) -> None:
    outcomes = [seen for (seen,) in ranks2.run(out_of_memory, operation, timeout=HANG)]
    check(outcomes, "RuntimeError", "out of memory")


# What MCORE_DEEPEP_V2_CHECK=1 looks at.


def checked_indices(rank: int, world: int) -> dict[str, Seen]:
    seen = {}
    with buffers(CHECK=1):
        for name, rows in {
            "out of range": [[0, 1], [2, 12], [0, 3]],
            "twice": [[0, 1], [2, 3], [3, 3]],
            "none": [[-1, -1], [0, -1], [-2, 3]],
        }.items():
            idx = torch.tensor(rows if rank == 1 else [[0, 1], [1, 2], [2, 3]])
            seen[name] = attempt(lambda idx=idx: dispatch(inputs() | {"token_indices": idx}))
            good_step()
        kind = torch.uint16 if rank == 1 else torch.int64  # which cannot be sorted
        seen["uint16"] = attempt(lambda: dispatch(inputs() | {"token_indices": inputs()["token_indices"].to(kind)}))
        good_step()
    return seen


def test_indices_are_checked_when_asked(ranks2: RankPool) -> None:
    outcomes = ranks2.run(checked_indices)
    assert [seen["none"][0] for seen in outcomes] == [None, None]
    check([seen["out of range"] for seen in outcomes], "InputError", "token 1", "[2, 12]")
    check([seen["twice"] for seen in outcomes], "InputError", "token 2", "[3, 3]")
    check([seen["uint16"] for seen in outcomes], "InputError")


# Before the call reaches the buffer, and after its group is gone.


def _no_memory(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 runs out of memory while the arguments are made ready, forward and backward."""
    seen: dict[str, Any] = {}

    def exhausted(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room for a copy")

    with buffers():
        good_step()
        arguments = inputs()
        arguments["x"].requires_grad_()
        recv_x, *_, handle = dispatch(arguments)
        y, _ = fused_combine(recv_x, None, handle)
        for what, action in {
            "dispatch": lambda: dispatch(arguments),
            "combine": lambda: fused_combine(recv_x, None, handle),
            "backward": lambda: y.sum().backward(),
        }.items():
            with replaced(torch.Tensor, "contiguous", exhausted if rank == 1 else torch.Tensor.contiguous):
                seen[what] = raised_by(action)
        good_step()
    return seen


def test_a_rank_without_memory_for_its_arguments_is_heard_of(ranks2: RankPool) -> None:
    for seen in ranks2.run(_no_memory):
        for what, failure in seen.items():
            assert failure is not None, what
            assert "no room for a copy" in failure.text, (what, failure.text)


def _group_gone(rank: int, world: int) -> dict[str, Any]:
    group = dist.new_group(list(range(world)))
    with buffers():
        x = torch.ones(3, 8, requires_grad=True)
        idx = torch.zeros(3, 1).long()
        recv_x, *_, handle = fused_dispatch(x, idx, torch.ones(3, 1), 2, group)
        y, _ = fused_combine(recv_x, group, handle)
        dist.barrier()
        dist.destroy_process_group(group)
        return {
            "combine": raised_by(lambda: fused_combine(recv_x, group, handle)),
            "backward": raised_by(lambda: y.sum().backward()),
        }


def test_nothing_is_called_for_a_group_that_is_gone(ranks2: RankPool) -> None:
    for seen in ranks2.run(_group_gone):
        assert {what: failure.type_name for what, failure in seen.items()} == {
            "combine": "BufferClosedError",
            "backward": "BufferClosedError",
        }


def late_after_a_failure(rank: int, world: int) -> Seen:
    """Rank 1's call is wrong, and rank 0 comes to it when rank 1 no longer waits; both go on."""
    with buffers(AGREE_SECS=1):
        good_step()
        if rank == 0:
            time.sleep(2.5)
        arguments = inputs()
        if rank == 1:
            arguments["token_indices"] = torch.full_like(arguments["token_indices"], 99)
        seen = attempt(lambda: dispatch(arguments))
        for _ in range(3):
            good_step()
    return seen


def test_a_late_rank_hears_of_a_failure_and_stays_in_step(ranks2: RankPool) -> None:
    (_, at_once), (_, waited) = seen = ranks2.run(late_after_a_failure)
    check(seen, "InputError", "got 99")
    assert at_once < 1 < waited < 2.5


def unequal_calls(rank: int, world: int, what: str) -> Seen:
    """Under CHECK=1, which compares forward calls alone, rank 1 makes no second layer, or only rank 0 a backward."""
    with buffers(CHECK=1):
        x = torch.ones(3, 8, requires_grad=True)
        dispatcher = FlexTokenDispatcher(num_experts=2)

        def layer(x: Any) -> Any:
            sent = dispatcher.dispatch(x, torch.zeros(3, 1).long(), torch.ones(3, 1))
            return dispatcher.combine(sent.tokens, sent)

        def step() -> None:
            y = layer(x)
            if rank == 0 and what == "layer":
                y = layer(y)
            if rank == 0 or what == "layer":
                y.sum().backward()
            layer(x)

        return attempt(step)


@pytest.mark.parametrize("what", ["layer", "backward"])
def test_unequal_calls_are_told_apart_by_what_they_are(ranks2: RankPool, what: str) -> None:
    check(ranks2.run(unequal_calls, what, timeout=HANG), "RankMismatchError", "ranks make different calls", "dispatch")
