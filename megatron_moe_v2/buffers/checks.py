"""What a call must satisfy, checked on the host before anything travels.

DeepEP reports most of these with a bare assertion or a device trap. Each check raises an error that says field, got,
expected and what to change. Legend as in ``contract``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CapacityError, HandleError, InputError, LimitError, SettingsError
from ..settings import name_of
from .contract import BUFFER_GRANULE, EPHandle, EventHandle, buffer_bytes

__all__ = [
    "CombineRequest",
    "DispatchRequest",
    "check_combine",
    "check_constructor",
    "check_dispatch",
    "check_num_experts",
    "check_rows",
]


class _Buffer(Protocol):
    num_ranks: int
    num_bytes: int
    num_allocated_qps: int
    num_max_tokens_per_rank: int
    allow_multiple_reduction: bool


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """The resolved arguments of a dispatch."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    weights: Tensor | None
    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    num_sms: int
    do_expand: bool
    do_cpu_sync: bool
    handle: EPHandle | None

    def describe(self, row_bytes: int) -> str:
        """What all ranks must agree on, in words."""
        scales = f"{self.scales.shape[1]} scales of {self.scales.dtype}, " if self.scales is not None else ""
        kind = "dispatch" if self.handle is None else f"cached dispatch of dispatch {self.handle.origin[1]}"
        return (
            f"{kind} of {str(self.x.dtype).removeprefix('torch.')} hidden {self.x.shape[1]}, "
            f"top-{self.topk_idx.shape[1]} of {self.num_experts} experts, ceiling {self.num_max_tokens_per_rank}, "
            f"{'expert' if self.do_expand else 'token'} layout, alignment {self.expert_alignment}, "
            f"{scales}{'with' if self.weights is not None else 'no'} weights, {row_bytes} bytes a row"
        )


@dataclass(frozen=True, kw_only=True)
class CombineRequest:
    """The resolved arguments of a combine."""

    x: Tensor
    weights: Tensor | None
    bias: tuple[Tensor, ...]
    num_recv_tokens: int
    reduce_first: bool

    def describe(self, handle: EPHandle) -> str:
        """What all ranks must agree on, in words."""
        return (
            f"combine of dispatch {handle.origin[1]}, {str(self.x.dtype).removeprefix('torch.')} "
            f"hidden {self.x.shape[1]}, {'with' if self.weights is not None else 'no'} weights"
        )


def check_constructor(num_bytes: int | None, num_max_tokens_per_rank: int, hidden: int) -> None:
    """A size, or what a size is computed from."""
    if num_bytes is not None:
        if num_bytes <= 0 or num_bytes % BUFFER_GRANULE:
            raise SettingsError("num_bytes", got=num_bytes, expected=f"a positive multiple of {BUFFER_GRANULE}")
        return
    for name, value in (("num_max_tokens_per_rank", num_max_tokens_per_rank), ("hidden", hidden)):
        if value <= 0:
            raise SettingsError(name, got=value, expected="a positive number where num_bytes is not given")


def check_num_experts(num_experts: int | None, num_ranks: int) -> int:
    """Experts divide evenly over the ranks."""
    if type(num_experts) is not int or num_experts <= 0 or num_experts % num_ranks:
        raise InputError("num_experts", got=repr(num_experts), expected=f"a positive multiple of the {num_ranks} ranks")
    return num_experts


def check_rows(num_tokens: int, ceiling: int) -> None:
    """Own rows against the ceiling that all ranks reserved."""
    if num_tokens > ceiling:
        raise CapacityError(
            "rows of x in one call",
            got=num_tokens,
            expected=f"at most {ceiling}, the ceiling that the buffer was built for",
            fix=f"Where num_max_tokens_per_rank is passed, pass {num_tokens}; else set "
            f"{name_of('max_tokens_per_rank')}={num_tokens} ({name_of('decode_max_tokens_per_rank')} for decoding) on "
            "every rank before the first buffer is built. Or shorten sequence or micro-batch.",
        )


def _check_matrix(name: str, tensor: Any, rows: int | None = None) -> None:
    if not isinstance(tensor, Tensor) or tensor.dim() != 2 or not tensor.is_contiguous():
        raise InputError(name, got=_shape(tensor), expected="a contiguous 2-D tensor")
    if rows is not None and tensor.shape[0] != rows:
        raise InputError(f"rows of {name}", got=tensor.shape[0], expected=rows)


def _shape(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{list(tensor.shape)} {tensor.dtype}" + ("" if tensor.is_contiguous() else " (not contiguous)")


def _check_events(previous_event: Any, allocate_on_comm_stream: bool) -> None:
    if previous_event is None:
        return
    if not isinstance(previous_event, EventHandle):
        raise InputError(
            "previous_event", got=type(previous_event).__name__, expected="an EventHandle", fix="Pass overlap.event."
        )
    if not allocate_on_comm_stream:
        raise InputError("previous_event without allocate_on_comm_stream", fix="Set allocate_on_comm_stream=True.")


def _check_resources(buffer: _Buffer, num_sms: int, num_qps: int) -> None:
    if num_sms < 0:
        raise InputError("num_sms", got=num_sms, expected="0 (automatic) or a positive number")
    if not 0 <= num_qps <= buffer.num_allocated_qps:
        raise InputError("num_qps", got=num_qps, expected=f"0 to the {buffer.num_allocated_qps} allocated")


def _check_size(buffer: _Buffer, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> None:
    needed = buffer_bytes(
        num_ranks=buffer.num_ranks,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        hidden=hidden,
        num_topk=num_topk,
        allow_multiple_reduction=buffer.allow_multiple_reduction,
    )
    if needed > buffer.num_bytes:
        raise LimitError(
            f"bytes for ceiling {num_max_tokens_per_rank}, hidden {hidden}, top-{num_topk}",
            got=needed,
            expected=f"at most the {buffer.num_bytes} that the buffer was built with",
            fix="Build it for the largest of each.",
        )


def _check_owner(handle: Any, number: int) -> None:
    if not isinstance(handle, EPHandle):
        raise HandleError("handle", got=type(handle).__name__, expected="the EPHandle of a dispatch")
    if handle.origin[0] != number:
        raise HandleError("the handle is another buffer's", fix="Use the buffer that dispatched.")


def check_dispatch(
    buffer: _Buffer,
    number: int,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    *,
    stats: Tensor | None,
    num_experts: int | None,
    num_max_tokens_per_rank: int | None,
    expert_alignment: int | None,
    num_sms: int,
    num_qps: int,
    previous_event: Any,
    allocate_on_comm_stream: bool,
    handle: EPHandle | None,
    do_cpu_sync: bool | None,
    do_expand: bool,
    do_zero_padding: bool,
) -> DispatchRequest:
    """Resolve a dispatch's arguments for the embedded buffer with number ``number``, or raise."""
    if isinstance(x, tuple):
        if len(x) != 2 or not isinstance(x[1], Tensor):
            raise InputError("x", got=f"a tuple of {len(x)}", expected="a tensor, or a pair of tokens and scales")
        x, scales = x
    else:
        scales = None
    _check_matrix("x", x)
    _check_events(previous_event, allocate_on_comm_stream)
    _check_resources(buffer, num_sms, num_qps)
    if scales is not None and (scales.dim() != 2 or scales.shape[0] != x.shape[0] or scales.element_size() != 4):
        raise InputError("scales", got=_shape(scales), expected=f"[{x.shape[0]}, S] of a 4-byte dtype")
    if do_zero_padding and not do_expand:
        raise InputError("do_zero_padding without do_expand", fix="Only the expert layout has padding.")
    if handle is not None:
        _check_owner(handle, number)
        topk_idx = _check_cached(handle, x, topk_idx, stats, do_cpu_sync, do_expand)
        known = (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank)
        asked = (num_experts, expert_alignment, num_max_tokens_per_rank)
        if any(value is not None and value != have for value, have in zip(asked, known, strict=True)):
            raise HandleError(
                "num_experts, expert_alignment, num_max_tokens_per_rank", got=asked, expected=f"the handle's {known}"
            )
        num_experts, expert_alignment, num_max_tokens_per_rank = known
        do_cpu_sync = False
        num_sms = num_sms or handle.num_sms
    num_experts = check_num_experts(num_experts, buffer.num_ranks)
    ceiling = buffer.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
    alignment = 1 if expert_alignment is None else expert_alignment
    if alignment < 1:
        raise InputError("expert_alignment", got=alignment, expected="at least 1")
    _check_matrix("topk_idx", topk_idx, x.shape[0])
    if topk_idx.dtype != torch.int64:
        raise InputError("topk_idx", got=topk_idx.dtype, expected="torch.int64")
    if handle is None and topk_idx.numel() and int(topk_idx.max()) >= num_experts:
        raise InputError(
            "largest expert in topk_idx (token_indices)",
            got=int(topk_idx.max()),
            expected=f"less than {num_experts} experts",
        )
    if topk_weights is not None:
        _check_weights(topk_weights, x.dtype, tuple(topk_idx.shape))
    if stats is not None:
        num_local_experts = num_experts // buffer.num_ranks
        if stats.dtype != torch.int32 or stats.shape != (num_local_experts,) or not stats.is_contiguous():
            raise InputError(
                "cumulative_local_expert_recv_stats",
                got=_shape(stats),
                expected=f"contiguous [{num_local_experts}] torch.int32",
            )
    check_rows(x.shape[0], ceiling)
    _check_size(buffer, ceiling, x.shape[1], topk_idx.shape[1])
    return DispatchRequest(
        x=x.detach(),
        scales=scales,
        topk_idx=topk_idx,
        weights=None if topk_weights is None else topk_weights.detach(),
        num_experts=num_experts,
        num_max_tokens_per_rank=ceiling,
        expert_alignment=alignment,
        num_sms=num_sms,
        do_expand=do_expand,
        do_cpu_sync=do_cpu_sync is not False,
        handle=handle,
    )


def _check_cached(
    handle: EPHandle, x: Tensor, topk_idx: Any, stats: Tensor | None, do_cpu_sync: bool | None, do_expand: bool
) -> Tensor:
    if topk_idx is not None:
        raise HandleError("topk_idx beside a handle", fix="The handle holds the routing: leave topk_idx out.")
    if do_cpu_sync:
        raise HandleError("do_cpu_sync beside a handle", fix="The handle holds the counts: leave do_cpu_sync out.")
    if stats is not None:
        raise HandleError("cumulative_local_expert_recv_stats beside a handle", fix="Count in the first dispatch only.")
    if do_expand and not handle.do_expand:
        raise HandleError("do_expand with a handle of the token layout", fix="Dispatch with do_expand=True first.")
    if x.shape[0] != handle.topk_idx.shape[0]:
        raise HandleError("rows of x", got=x.shape[0], expected=f"the {handle.topk_idx.shape[0]} of the handle")
    return handle.topk_idx


def _check_weights(weights: Any, x_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    dtype = torch.float64 if x_dtype == torch.float64 else torch.float32
    if not isinstance(weights, Tensor) or tuple(weights.shape) != shape or not weights.is_contiguous():
        raise InputError("topk_weights", got=_shape(weights), expected=f"contiguous {list(shape)}")
    if weights.dtype != dtype:
        raise InputError("topk_weights", got=weights.dtype, expected=f"{dtype} for {x_dtype} tokens")


def check_combine(
    buffer: _Buffer,
    number: int,
    x: Any,
    handle: EPHandle,
    topk_weights: Any,
    bias: Tensor | tuple[Tensor | None, Tensor | None] | None,
    *,
    num_sms: int,
    num_qps: int,
    previous_event: Any,
    allocate_on_comm_stream: bool,
) -> CombineRequest:
    """Resolve a combine's arguments for the embedded buffer with number ``number``, or raise."""
    _check_owner(handle, number)
    _check_matrix("x", x)
    if x.device != handle.topk_idx.device:
        raise InputError("x of combine", got=f"on {x.device}", expected=f"on {handle.topk_idx.device}, as the dispatch")
    if not x.dtype.is_floating_point or x.element_size() < 2:
        raise InputError("x of combine", got=x.dtype, expected="bfloat16, float16, float32 or float64")
    _check_events(previous_event, allocate_on_comm_stream)
    _check_resources(buffer, num_sms, num_qps)
    num_recv_tokens = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    last_slot = int(handle.psum_num_recv_tokens_per_expert[-1]) if num_recv_tokens else 0
    check_combine_rows(x.shape[0], handle, last_slot)
    num_tokens, num_topk = handle.topk_idx.shape
    if topk_weights is not None:
        if handle.do_expand and not buffer.allow_multiple_reduction:
            raise LimitError("topk_weights in the expert layout", expected="a buffer with allow_multiple_reduction")
        _check_weights(topk_weights, x.dtype, (x.shape[0],) if handle.do_expand else (x.shape[0], num_topk))
    if isinstance(bias, Sequence) and len(bias) != 2:
        raise InputError("length of bias", got=len(bias), expected="2")
    biases = tuple(one for one in (bias if isinstance(bias, Sequence) else (bias,)) if one is not None)
    for one in biases:
        _check_matrix("bias", one, num_tokens)
        if one.shape[1] != x.shape[1] or one.dtype != x.dtype:
            raise InputError("bias", got=_shape(one), expected=f"{[num_tokens, x.shape[1]]} {x.dtype}")
    _check_size(buffer, handle.num_max_tokens_per_rank, x.shape[1], num_topk)
    return CombineRequest(
        x=x,
        weights=topk_weights,
        bias=biases,
        num_recv_tokens=num_recv_tokens,
        reduce_first=not handle.do_expand or buffer.allow_multiple_reduction,
    )


def check_combine_rows(rows: int, handle: Any, last_slot: int) -> None:
    """Rows handed to combine against what the dispatch delivered; in the expert layout up to ``last_slot``."""
    if not handle.do_expand:
        if rows != handle.recv_src_metadata.shape[0]:
            raise HandleError(
                "rows of x in combine", got=rows, expected=f"the {handle.recv_src_metadata.shape[0]} received"
            )
        return
    if rows < last_slot:
        raise HandleError("rows of x in combine", got=rows, expected=f"at least the {last_slot} slots of the dispatch")
