"""Buffers are built once for each spec, looked up after that, and closed in order; settings are pinned meanwhile."""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Failure, RankPool, join_group
from scene import CEILING, Call, Recorder, buffers, environment, raised_by, replaced

from megatron_moe_v2 import close_buffers, fused_combine, fused_dispatch, pool, prepare_buffer, set_deepep_num_sms
from megatron_moe_v2.buffers import embedded
from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer
from megatron_moe_v2.buffers.exchange import Exchange
from megatron_moe_v2.pool import LOOK_SECS
from megatron_moe_v2.settings import PREFIX

Group = Any


def step(
    hidden: int = 8, topk: int = 2, group: Group = None, rows: int = 3, backward: bool = True, **options: Any
) -> Any:
    """A forward and backward of identity experts; the handle."""
    x = torch.ones(rows, hidden, requires_grad=True)
    idx = torch.arange(rows * topk).view(rows, topk) % 8
    recv, *_, handle = fused_dispatch(x, idx, torch.ones(rows, topk), 8, group, **options)
    y, _ = fused_combine(recv, group, handle)
    if backward:
        y.sum().backward()
        assert x.grad is not None
    assert (y[:, :1] == y).all()
    return handle


# How often a buffer is built.


def prepare_then_step() -> None:
    prepare_buffer(hidden=8, num_topk=2)
    prepare_buffer(hidden=8, num_topk=2)
    step()


def unknown_topk_then_2_then_8() -> None:
    prepare_buffer(hidden=8)
    step(topk=2)
    step(topk=8)


def two_hidden_sizes() -> None:
    for hidden in (1024, 2048, 1024):
        step(hidden=hidden)


def two_topk() -> None:
    for topk in (8, 2):
        step(topk=topk)


def two_specs_in_turn() -> None:
    for _ in range(5):
        step(hidden=8)
        step(hidden=16)


def two_layouts() -> None:
    for layout, alignment in (("token", 1), ("expert", 1), ("expert", 16)):
        step(layout=layout, expert_alignment=alignment)


def explicit_ceilings() -> None:
    prepare_buffer(hidden=8, num_topk=2, num_max_tokens_per_rank=5)
    prepare_buffer(hidden=8, num_topk=2, num_max_tokens_per_rank=40)
    step(rows=5)
    step(rows=40, num_max_tokens_per_rank=40)


def no_gradients() -> None:
    with torch.no_grad():
        step(backward=False)
    step()


COUNTED: dict[str, tuple[Callable[[], None], int, dict[str, object]]] = {
    "prepare, then a first dispatch": (prepare_then_step, 1, {}),
    "top-k unknown, then 2, then 8": (unknown_topk_then_2_then_8, 1, {}),
    "hidden 1024 and 2048 with HIDDEN=2048": (two_hidden_sizes, 1, {"HIDDEN": 2048}),
    "hidden 1024 and 2048": (two_hidden_sizes, 2, {}),
    "top-k 8 and 2 with NUM_TOPK=8": (two_topk, 1, {"NUM_TOPK": 8}),
    "two specs in turn": (two_specs_in_turn, 2, {}),
    "both layouts": (two_layouts, 1, {}),
    "two ceilings": (explicit_ceilings, 2, {}),
    "with and without gradients": (no_gradients, 1, {}),
}


def constructions(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Per case how many buffers the pool counted, and how many were built."""
    counts = {}
    for name, (action, _, variables) in COUNTED.items():
        with buffers(**variables) as built:
            before = pool.pool.constructions
            action()
            counts[name] = (pool.pool.constructions - before, len(built))
    return counts


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_constructions_are_counted(ranks: RankPool) -> None:
    for counts in ranks.run(constructions):
        assert counts == {name: (number, number) for name, (_, number, _) in COUNTED.items()}


def regrouped(rank: int, world: int, tag: str) -> dict[str, Any]:
    """Groups made and destroyed in turn, the default group among them."""
    old_groups, old_buffers, most = [], [], 0
    with buffers() as built:
        before = pool.pool.constructions
        for turn in range(6):
            if turn % 3 == 2:
                join_group(f"{tag}{turn}")
                group: Group = dist.group.WORLD
            else:
                group = dist.new_group(list(range(world)))
            step(group=group)
            step(group=group)
            assert any(key[0] is group for key in pool.pool._entries)
            old_groups.append(weakref.ref(group))
            old_buffers.append(weakref.ref(built.pop()))
            assert not built
            gc.collect()
            most = max(most, sum(ref() is not None for ref in old_buffers))
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
                del group
                gc.collect()
                assert old_groups[-1]() is not None, "the key keeps its group, so that no other can take its id"
        count = pool.pool.constructions - before
        del group
        close_buffers()
        gc.collect()
    left = [sum(ref() is not None for ref in old) for old in (old_groups[:2] + old_groups[3:5], old_buffers)]
    return {"constructions": count, "most buffers alive": most, "groups left": left[0], "buffers left": left[1]}


def test_a_group_made_again_is_a_new_key(ranks2: RankPool) -> None:
    for seen in ranks2.run(regrouped, f"regrouped{os.getpid()}"):
        assert seen == {"constructions": 6, "most buffers alive": 2, "groups left": 0, "buffers left": 0}


# Handles that cannot serve.


@contextmanager
def payloads_counted() -> Iterator[list[int]]:
    counts = [0]
    original = Exchange.payload

    def payload(self: Exchange, *args: Any) -> torch.Tensor:
        counts[0] += 1
        return original(self, *args)

    with replaced(Exchange, "payload", payload):
        yield counts


def unfit_handles(rank: int, world: int) -> dict[str, tuple[Failure | None, int]]:
    """What each handle raises in combine, and the payloads that travelled."""
    other = dist.new_group(list(range(world)))
    results = {}
    with buffers():
        kept = step()
        expert = step(layout="expert", expert_alignment=16)
        elsewhere = step(group=other)
        x = torch.ones(kept.num_rows, 8)
        calls: dict[str, Callable[[], Any]] = {
            "of another group": lambda: fused_combine(torch.ones(elsewhere.num_rows, 8), None, elsewhere),
            "of another layout": lambda: fused_combine(x, None, expert),
            "one row more": lambda: fused_combine(torch.ones(kept.num_rows + 1, 8), None, kept),
            "one row less": lambda: fused_combine(x[1:], None, kept),
            "the backend's own": lambda: fused_combine(x, None, kept.ep_handle),
            "none": lambda: fused_combine(x, None, None),
        }
        for name, call in calls.items():
            with payloads_counted() as count:
                results[name] = (raised_by(call), count[0])
        fused_combine(x, None, kept)
        close_buffers()
        prepare_buffer(hidden=8, num_topk=2)
        with payloads_counted() as count:
            results["of a closed buffer"] = (raised_by(lambda: fused_combine(x, None, kept)), count[0])
    dist.destroy_process_group(other)
    return results


def test_unfit_handles_raise_before_anything_travels(ranks2: RankPool) -> None:
    for results in ranks2.run(unfit_handles):
        closed = results.pop("of a closed buffer")
        assert closed[0] is not None
        assert (closed[0].type_name, closed[1]) == ("BufferClosedError", 0)
        for name, (failure, payloads) in results.items():
            assert failure is not None, name
            assert (failure.type_name, payloads) == ("HandleError", 0), (name, failure)


# Settings are pinned.


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def warnings_of_the_package() -> Iterator[list[str]]:
    handler, logger = _Warnings(), logging.getLogger("megatron_moe_v2")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def environment_changed(rank: int, world: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with buffers() as built, warnings_of_the_package() as warnings:
        step()
        seen["before"] = list(warnings)
        with environment(MAX_TOKENS_PER_RANK=2, NUM_SMS="many", CHECK=1):
            time.sleep(LOOK_SECS)
            handle = step(rows=CEILING)
            step(rows=CEILING)
            seen["after"], seen["ceiling"] = list(warnings), handle.ep_handle.num_max_tokens_per_rank
            seen["built"] = len(built)
            step(hidden=16, rows=CEILING)
        warnings.clear()
        with environment(MAX_TOKENS_PER_RANK=2):
            close_buffers()
            seen["new ceiling"] = step(rows=2).ep_handle.num_max_tokens_per_rank
            seen["anew"] = list(warnings)
    return seen


def test_a_later_environment_changes_nothing_and_warns_once(ranks2: RankPool) -> None:
    for seen in ranks2.run(environment_changed):
        assert (seen["before"], seen["built"], seen["ceiling"]) == ([], 1, CEILING)
        assert len(seen["after"]) == 3
        for name, text in zip(("MAX_TOKENS_PER_RANK", "NUM_SMS", "CHECK"), seen["after"], strict=True):
            assert PREFIX + name in text
            assert "changes nothing" in text
        assert seen["new ceiling"] == 2
        assert seen["anew"] == []


# Close.


class Destroyed(Recorder):
    """Counts its own destruction."""

    destroyed = 0

    def destroy(self) -> None:
        Destroyed.destroyed += 1
        super().destroy()


def closing(rank: int, world: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def count() -> int:
        number, Destroyed.destroyed = Destroyed.destroyed, 0
        return number

    other = dist.new_group(list(range(world)))
    with buffers(kind=Destroyed):
        entry = prepare_buffer(hidden=8)
        theirs = prepare_buffer(other, hidden=8)
        close_buffers(other)
        seen["one group's"] = (entry.closed, theirs.closed, count())
        close_buffers()
        close_buffers()
        entry.close()
        seen["all, three times"] = (entry.closed, count())
        seen["described"] = entry.describe()
        step()
        close_buffers(abort=True)
        seen["by abort"] = count()
        theirs = prepare_buffer(hidden=8)
        theirs.backend = replace(theirs.backend, name="deepep_v1")  # whose close is collective
        close_buffers(abort=True)
        seen["DeepEP's by abort"] = (theirs.closed, count())
        with prepare_buffer(hidden=8) as entry:
            step()
        seen["left"] = (entry.closed, count())
        seen["used after"] = raised_by(lambda: entry.buffer)
        try:
            with prepare_buffer(hidden=8) as entry:
                raise KeyError("on its way")
        except KeyError:
            seen["left on an exception"] = (entry.closed, count())
        step()
        step(group=other)
        dist.destroy_process_group(other)
        close_buffers()
        seen["one group gone"] = count()
    return seen


def test_close(ranks2: RankPool) -> None:
    for seen in ranks2.run(closing):
        assert seen.pop("used after").type_name == "BufferClosedError"
        assert "closed" in seen.pop("described")
        assert seen == {
            "one group's": (False, True, 1),
            "all, three times": (True, 1),
            "by abort": 1,
            "DeepEP's by abort": (True, 0),
            "left": (True, 1),
            "left on an exception": (True, 1),
            "one group gone": 2,
        }


# Groups, SM counts, capture, description.


def groups(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    plane = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    seen: dict[str, Any] = {}
    with buffers():
        for name, group in {"none": None, "line": line, "of a plane": plane["ep"]}.items():
            prepare_buffer(group, hidden=8)
            step(group=group)
            seen[name] = prepare_buffer(group, hidden=8).group.size()
        seen["plane"] = raised_by(lambda: prepare_buffer(plane, hidden=8))
    return seen


def test_groups_and_meshes(ranks4: RankPool) -> None:
    for seen in ranks4.run(groups):
        failure = seen.pop("plane")
        assert failure.type_name == "InputError"
        assert "2" in failure.text
        assert seen == {"none": 4, "line": 4, "of a plane": 2}


SMS: dict[str, tuple[dict[str, Any], int]] = {
    "nothing": ({}, 0),
    "set": ({"wished": 12}, 12),
    "Megatron's default": ({"wished": 20}, 0),
    "argument before what is set": ({"wished": 12, "argument": 14}, 14),
    "exactly 20 as argument": ({"argument": 20}, 20),
    "exactly 20 by the environment": ({"wished": 20, "variable": 20}, 20),
    "environment first": ({"wished": 12, "argument": 14, "variable": 16}, 16),
    "0 is automatic": ({"wished": 12, "argument": 0, "variable": 0}, 12),
}


def sm_counts(rank: int, world: int) -> dict[str, Any]:
    """The count that dispatch asks for; each rank wishes for another, rank 0's holds."""
    seen: dict[str, Any] = {}
    for name, (given, _) in SMS.items():
        try:
            with buffers(kind=Recorder, NUM_SMS=given.get("variable")) as built:
                wished = given.get("wished", 0)
                set_deepep_num_sms(wished if rank == 0 or wished in (0, 20) else wished + 2)
                prepare_buffer(hidden=8, num_sms=given.get("argument", 0))
                step()
                (recorder,) = built
                assert isinstance(recorder, Recorder)
                calls: list[Call] = recorder.calls
                seen[name] = calls[0].arguments["num_sms"]
        finally:
            set_deepep_num_sms(0)
    seen["bad"] = [raised_by(lambda v=value: set_deepep_num_sms(v)) for value in (-1, 1.5, "8")]
    return seen


def test_sm_counts(ranks2: RankPool) -> None:
    for seen in ranks2.run(sm_counts):
        assert [failure.type_name for failure in seen.pop("bad")] == ["InputError"] * 3
        assert seen == {name: count for name, (_, count) in SMS.items()}


def in_capture(rank: int, world: int) -> list[Failure | None]:
    with (
        buffers(),
        replaced(torch.cuda, "is_initialized", lambda: True),
        replaced(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        return [raised_by(lambda: prepare_buffer(hidden=8))]


def test_no_construction_inside_a_graph_capture(ranks1: RankPool) -> None:
    ((failure,),) = ranks1.run(in_capture)
    assert failure is not None
    assert failure.type_name == "CaptureError"
    assert "prepare_buffer()" in failure.text


def described(rank: int, world: int) -> str:
    with buffers(), replaced(embedded, "EmbeddedElasticBuffer", EmbeddedElasticBuffer):
        return prepare_buffer(hidden=8, num_topk=2).describe()


def test_a_buffer_says_what_it_is_and_why(ranks2: RankPool) -> None:
    for text in ranks2.run(described):
        assert "\n" not in text
        for word in ("EmbeddedElasticBuffer", "embedded.py", "no CUDA device", f"{CEILING} tokens"):
            assert word in text, word


def test_without_a_group_the_error_says_what_to_call() -> None:
    failure = raised_by(lambda: prepare_buffer(hidden=8))
    assert failure.type_name == "InputError"
    assert "init_process_group" in failure.text
