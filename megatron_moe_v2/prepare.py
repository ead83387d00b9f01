"""``prepare_buffer``: build, and on request compile and tune, before step 0.

DeepEP compiles each kernel at its first call with a new set of sizes, for seconds. Warmed up, all ranks do that
together, so that none times out on another's compilation, and step 0 constructs and compiles nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .agreement import agree
from .buffers.checks import check_num_experts
from .communication import Call, check_flags, complete, launch_cached_dispatch, launch_combine, launch_dispatch, opened
from .errors import InputError
from .fp8 import ScaleFormat
from .fp8_wire import buffer_hidden, check_options
from .pool import Ceiling, Group, PooledBuffer, check_sizes, on_cuda, pool, resolve_group
from .settings import TUNE, name_of
from .streams import finish

__all__ = ["prepare_buffer"]

logger = logging.getLogger(__name__)

TUNED_NUM_SMS = (16, 24, 32, 64, 96, 128)
"""SM counts that tuning tries beside DeepEP's estimate. On two H200 its expert dispatch was best at 128, its expert
combine at 64 or 96, and the token layout's two anywhere from 16 to 128."""

_WARM_TOKENS = 16
_REPEATS = 5


def prepare_buffer(
    group: Group = None,
    *,
    hidden: int,
    num_topk: int | None = None,
    num_max_tokens_per_rank: Ceiling = None,
    num_sms: int = 0,
    warmup: bool = False,
    num_experts: int | None = None,
    layouts: Sequence[Literal["token", "expert"]] = ("token", "expert"),
    expert_alignment: int = 1,
    static_shapes: bool = False,
    fp8: ScaleFormat | None = None,
    fp8_backward: bool = False,
) -> PooledBuffer:
    """Build the buffer before step 0, or return the one there is. Collective over the group.

    Args:
        group: process group, one-dimensional ``DeviceMesh``, or None for the default group.
        hidden: H, elements of a token row.
        num_topk: K; None sizes for DeepEP's largest, 32, and serves every later top-k.
        num_max_tokens_per_rank: M, rows that a rank may dispatch in one call; default from the environment, where
            ``"decode"`` is the ceiling for decoding.
        num_sms: streaming multiprocessors for communication; 0 is automatic.
        warmup: run forward and backward of each layout once, so that step 0 compiles nothing. With the environment's SM
            count set to ``tune``, also time a few counts and keep the best of each direction and layout.
        num_experts: E, needed by ``warmup``, as is ``num_topk``.
        layouts: what ``warmup`` runs.
        expert_alignment: of the expert layout in ``warmup``.
        static_shapes: warm up what ``static_shapes=True`` needs instead; an explicit ceiling is then this buffer's
            alone, and not the usual one.
        fp8, fp8_backward: size for, and warm up, dispatches with these arguments too.

    Raises:
        SettingsError, BackendError, InputError: on every rank, if anything is wrong on any.
        RankMismatchError: ranks ask for different buffers; the message is a table.
        MissingRankError: a rank did not come in time.
        CaptureError: inside a CUDA graph capture.
    """
    group = resolve_group(group)
    if not isinstance(layouts, (tuple, list, set, frozenset)) or any(one not in ("token", "expert") for one in layouts):
        pool.fail(group, "warm-up", InputError("layouts", got=repr(layouts), expected='some of "token" and "expert"'))
    if type(num_sms) is not int or num_sms < 0:
        pool.fail(group, "warm-up", InputError("num_sms", got=repr(num_sms), expected="an integer from 0"))
    if warmup and (num_experts is None or num_topk is None):
        error = InputError("warmup", got=f"num_experts={num_experts}, num_topk={num_topk}", expected="both")
        pool.fail(group, "warm-up", error)
    try:
        check_sizes(hidden, num_topk, num_max_tokens_per_rank)
        check_flags(warmup=warmup, static_shapes=static_shapes)
        if type(expert_alignment) is not int or expert_alignment < 1:
            raise InputError("expert_alignment", got=repr(expert_alignment), expected="an integer from 1")
        if num_experts is not None:
            check_num_experts(num_experts, group.size())
        check_options(fp8, True, fp8_backward)
    except InputError as error:
        pool.fail(group, "warm-up", error)
    entry = pool.obtain(
        group,
        hidden=hidden if fp8 is None else buffer_hidden(hidden),
        num_topk=num_topk,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        num_sms=num_sms,
        pins_ceiling=not static_shapes,
    )
    if warmup:
        assert num_experts is not None
        assert num_topk is not None
        for layout in layouts:
            call = Call(
                entry=entry,
                num_experts=num_experts,
                expert_layout=layout == "expert",
                expert_alignment=expert_alignment if layout == "expert" else 1,
                static_shapes=static_shapes,
                fp8=fp8,
                fp8_backward=fp8_backward,
            )
            _warm_up(call, hidden, num_topk, layout)
    elif entry.wished_num_sms == TUNE:
        logger.warning("%s=tune takes effect in prepare_buffer(warmup=True)", name_of("num_sms"))
    return entry


def _warm_up(call: Call, hidden: int, num_topk: int, layout: str) -> None:
    entry = call.entry
    started = time.monotonic()
    if entry.wished_num_sms == TUNE and entry.backend.name == "deepep_v2":
        _tune(call, hidden, num_topk, layout)
    x, idx, weights = _tokens(call, min(_WARM_TOKENS, entry.spec.num_max_tokens_per_rank), hidden, num_topk)
    received, event = launch_dispatch(call, x, idx, weights)
    finish(event)
    received = complete(received)
    ep_handle = received.handle.ep_handle
    for carried in (None, received.topk_weights):
        _, _, event = launch_combine(call, received.x, ep_handle, carried)
        finish(event)
    gradient, event = launch_cached_dispatch(call, x, ep_handle)
    finish(event)
    opened(gradient)
    if x.is_cuda:
        torch.cuda.synchronize()
    _together(call, f"warm-up of the {layout} layout")
    if entry.group.rank() == 0:
        logger.info("warmed up the %s layout in %.1f s", layout, time.monotonic() - started)


def _together(call: Call, topic: str, decide: dict[str, int] | None = None) -> dict[str, int]:
    timeout = float(call.entry.spec.num_cpu_timeout_secs)
    return agree(call.entry.group, topic, {"num_experts": call.num_experts}, timeout=timeout, decide=decide)


def _tokens(call: Call, num_tokens: int, hidden: int, num_topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Balanced: every token selects experts spread over all ranks."""
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda(call.entry.group) else torch.device("cpu")
    first = torch.arange(num_tokens, device=device)[:, None]
    step = max(call.num_experts // num_topk, 1)
    idx = (first + step * torch.arange(num_topk, device=device)) % call.num_experts
    x = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    return x, idx, torch.ones(num_tokens, num_topk, device=device)


def _tune(call: Call, hidden: int, num_topk: int, layout: str) -> None:
    """Time SM counts on a full batch; rank 0's times decide, for dispatch and combine each."""
    entry = call.entry
    estimate = entry.num_sms_for(call.num_experts, num_topk, call.expert_layout)
    limit = torch.cuda.get_device_properties("cuda").multi_processor_count
    counts = sorted({estimate, *(count for count in TUNED_NUM_SMS if count <= limit)})
    x, idx, weights = _tokens(call, entry.spec.num_max_tokens_per_rank, hidden, num_topk)
    best: dict[str, tuple[float, int]] = {}
    for count in counts:
        entry.tuned[call.expert_layout] = (count, count)
        received, event = launch_dispatch(call, x, idx, weights)
        finish(event)
        received = complete(received)
        phases: dict[str, Callable[[], object]] = {
            "dispatch": lambda: launch_dispatch(call, x, idx, weights),
            "combine": lambda: launch_combine(call, received.x, received.handle.ep_handle),  # noqa: B023
        }
        for phase, run in phases.items():
            best[phase] = min(best.get(phase, (float("inf"), 0)), (_milliseconds(run), count))
    decided = _together(call, f"tuning of the {layout} layout", {phase: count for phase, (_, count) in best.items()})
    entry.tuned[call.expert_layout] = (decided["dispatch"], decided["combine"])
    pool.calls.clear()  # they are made with the counts of before
    if entry.group.rank() == 0:
        logger.info("tuned the %s layout over SM counts %s: %s", layout, counts, decided)


def _milliseconds(run: Callable[[], object]) -> float:
    """Median of a few runs after one."""
    run()
    times: list[float] = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[_REPEATS // 2]
