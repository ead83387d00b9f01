"""Dispatch, combine and cached dispatch as the autograd functions launch them: the contract's arguments, once.

Each launch returns an event beside its results; they may be read only after ``finish(event)``. Legend: T own tokens,
H hidden, K top-k, L local experts, n received tokens, A rows of the expert layout.
"""

from __future__ import annotations

import copy
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .buffers.contract import HandleSkeleton
from .buffers.layout import align_counts
from .errors import CaptureError, InputError
from .fp8 import QuantizedRows, ScaleFormat, dequantize
from .fp8_wire import quantized_for_wire, received_rows
from .launch import Launch
from .pool import PooledBuffer
from .recompute import RoutingLayout
from .streams import launch_arguments

if TYPE_CHECKING:
    from .telemetry import ExpertLoadStats

__all__ = [
    "Call",
    "DispatchHandle",
    "Received",
    "check_flags",
    "complete",
    "eager",
    "first_order",
    "launch_cached_dispatch",
    "launch_combine",
    "launch_dispatch",
    "opened",
]


_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a dispatch and its combine are made with, beside tensors.

    Attributes:
        entry: the buffer.
        num_experts: E, over all ranks.
        expert_layout: rows grouped by expert instead of one per token.
        expert_alignment: rows of each expert are padded to a multiple of this.
        static_shapes: as many rows as the ceiling allows, whatever arrives; the host waits for nothing.
        async_finish: the kernels run beside the host's next work until their result is waited for.
        allocate_on_comm_stream: results belong to the communication stream.
        fp8: tokens travel in FP8, with scales that the receiver keeps so.
        dequantize: hand on the received FP8 rows in the dtype of the tokens.
        fp8_backward: the gradient of the combine travels in FP8 too.
        load_stats: counts what is received; set by :meth:`counted_by` alone, so that other calls pay nothing for it.
        repeat: what this dispatch is made with, beside tensors like those of one that succeeded; set by
            :meth:`made_before` alone.
    """

    entry: PooledBuffer
    num_experts: int
    expert_layout: bool
    expert_alignment: int
    static_shapes: bool = False
    async_finish: bool = False
    allocate_on_comm_stream: bool = False
    fp8: ScaleFormat | None = None
    dequantize: bool = True
    fp8_backward: bool = False
    load_stats: ExpertLoadStats | None = field(init=False, default=None, compare=False, repr=False)
    repeat: dict[str, Any] | None = field(init=False, default=None, compare=False, repr=False)

    @functools.cached_property
    def zero_padding(self) -> bool:
        return self.expert_layout and self.expert_alignment > 1

    @functools.cached_property
    def counts_on_device(self) -> bool:
        return self.zero_padding or self.static_shapes

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """What every dispatch of this call is made with."""
        return {
            "num_experts": self.num_experts,
            "num_max_tokens_per_rank": self.entry.spec.num_max_tokens_per_rank,
            "expert_alignment": self.expert_alignment,
            "do_expand": self.expert_layout,
            "do_zero_padding": self.zero_padding,
        }

    @functools.cached_property
    def _pack_counts(self) -> Callable[..., bytes]:
        return struct.Struct(f"{self.num_experts // self.entry.group.size()}q").pack

    def counts_on_cpu(self, counts: list[int]) -> Tensor:
        """int64 ``[L]``; through packed bytes, several times faster than ``torch.tensor``."""
        return torch.frombuffer(bytearray(self._pack_counts(*counts)), dtype=torch.int64)

    def on_streams(self, async_finish: bool, allocate_on_comm_stream: bool) -> Call:
        """The same call with these stream flags.

        Raises:
            InputError: one of them is no bool.
        """
        if self.async_finish is async_finish and self.allocate_on_comm_stream is allocate_on_comm_stream:
            return self
        check_flags(async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
        return replace(self, async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)

    def counted_by(self, load_stats: ExpertLoadStats) -> Call:
        """The same call, counted."""
        return self._with(load_stats=load_stats, repeat=None)

    def made_before(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Call:
        """The same call, which succeeded with such tensors: of others like them only the rows are looked at again."""
        as_they_are = topk_idx.dtype is torch.int64 and topk_weights.dtype is _weights_dtype(x)
        plain = as_they_are and self.fp8 is None and not (self.async_finish or self.allocate_on_comm_stream)
        if not (plain and self.entry.passes_on(x.shape[1])):
            return self
        return self._with(repeat=self.uncached_arguments(topk_idx.shape[1]))

    def uncached_arguments(self, num_topk: int) -> dict[str, Any]:
        """What a dispatch that repeats no routing is made with, beside tensors."""
        num_sms = self.entry.num_sms_for(self.num_experts, num_topk, self.expert_layout)
        synchronises = {"do_cpu_sync": False} if self.static_shapes else {}
        return {**self.arguments, "num_sms": num_sms, **synchronises}

    def _with(self, **fields: Any) -> Call:
        other = copy.copy(self)
        vars(other).update(fields)
        return other

    def streams(self) -> dict[str, Any]:
        """The stream arguments; none where neither flag is set."""
        if not (self.async_finish or self.allocate_on_comm_stream):
            return {}
        return launch_arguments(
            self.entry.buffer, async_finish=self.async_finish, allocate_on_comm_stream=self.allocate_on_comm_stream
        )


def check_flags(**flags: object) -> None:
    """Flags are bools: what merely counts as true was meant for something else."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise InputError(name, got=repr(flag), expected="True or False")


@dataclass(kw_only=True, eq=False)
class DispatchHandle:
    """What a dispatch leaves for its combine. Self-contained: it outlives later dispatches.

    Attributes:
        call: how the dispatch was made.
        ep_handle: the backend's own ``EPHandle``.
        num_rows: rows that the combine takes: n, or A in the expert layout.
        flat: ``ep_handle`` taken apart, for ``save_for_backward``; from the wait on, which may complete it.
    """

    call: Call
    ep_handle: Any
    num_rows: int
    flat: tuple[tuple[Tensor | None, ...], HandleSkeleton] | None = None

    @functools.cached_property
    def padded_tokens_per_expert(self) -> Tensor:
        """``[L]``, rows of each expert with padding, for a grouped GEMM; int64 on the CPU.

        With static shapes int32 on the device.
        """
        if not self.call.static_shapes:
            return self.call.counts_on_cpu(self.ep_handle.num_recv_tokens_per_expert_list)
        return align_counts(self.ep_handle.num_unaligned_recv_tokens_per_expert, self.call.expert_alignment)


class Received(NamedTuple):
    """What a dispatch delivers; as ``fused_dispatch`` returns it."""

    x: Any  # a tensor, or QuantizedRows
    topk_idx: Tensor | None
    topk_weights: Tensor
    tokens_per_expert: Tensor
    handle: DispatchHandle


def launch_dispatch(
    call: Call, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, layout_cache: RoutingLayout | None = None
) -> tuple[Received, Any]:
    """Tokens to the ranks of their experts; what is received goes through :func:`complete` after the wait.

    Collective over the group.

    Args:
        x: ``[T, H]``, any strides.
        topk_idx: integer ``[T, K]``, global expert, negative for none.
        topk_weights: floating ``[T, K]``, any dtype; travels as float32 (float64 with float64 tokens).
        layout_cache: filled if it is empty; else rows come to lie as they lay in the dispatch that filled it, and no
            counts are exchanged.
    """
    entry, known, operation = call.entry, None, "dispatch"
    if layout_cache is not None:
        known = layout_cache.handle
        _refuse_layout_of_elsewhere(layout_cache, x)
        operation = "dispatch" if known is None else "repeated dispatch"
    with Launch(call, operation, x, operation) as launch:
        tokens: Any = x.contiguous()
        if call.repeat is not None and known is None and x.shape[0] <= entry.spec.num_max_tokens_per_rank:
            topk_idx, topk_weights = topk_idx.contiguous(), topk_weights.contiguous()
            launch.reached = True
            results = entry.beneath.dispatch(tokens, topk_idx=topk_idx, topk_weights=topk_weights, **call.repeat)
        else:
            weights_dtype = _weights_dtype(x)
            weights = topk_weights if topk_weights.dtype is weights_dtype else topk_weights.to(weights_dtype)
            if known is None:
                more = call.uncached_arguments(topk_idx.shape[1])
                more["topk_idx"] = (topk_idx if topk_idx.dtype is torch.int64 else topk_idx.long()).contiguous()
                if call.load_stats is not None:
                    most = entry.group.size() * entry.spec.num_max_tokens_per_rank
                    more["cumulative_local_expert_recv_stats"] = call.load_stats.counters(most)
            else:
                more = {**call.arguments, "handle": known.ep_handle, "num_sms": known.ep_handle.num_sms}
            if call.fp8 is not None:
                tokens = quantized_for_wire(tokens, call.fp8)
                more["use_tma_aligned_col_major_sf"] = call.fp8.column_major
            more["topk_weights"] = weights.contiguous()
            more.update(call.streams())
            launch.reached = True
            results = entry.buffer.dispatch(tokens, **more)
    recv_x, recv_idx, recv_weights, ep_handle, event = results
    if call.counts_on_device:
        counts = ep_handle.num_unaligned_recv_tokens_per_expert
    else:
        counts = call.counts_on_cpu(ep_handle.num_recv_tokens_per_expert_list)
    if call.fp8 is not None:
        recv_x = received_rows(recv_x, call.fp8, x, handed_on=not call.dequantize)
    handle = DispatchHandle(call=call, ep_handle=ep_handle, num_rows=recv_weights.shape[0])
    if layout_cache is not None and known is None:
        layout_cache.fill(handle, captured=x.is_cuda and torch.cuda.is_current_stream_capturing())
    return Received(recv_x, recv_idx, recv_weights, counts, handle), event


def _weights_dtype(x: Tensor) -> torch.dtype:
    """In which the weights of such tokens travel."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _refuse_layout_of_elsewhere(layout_cache: RoutingLayout, x: Tensor) -> None:
    """A graph must not keep the routing of its warm-up, nor eager code that of a graph."""
    if layout_cache.handle is None:
        return
    if layout_cache.captured != (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise CaptureError(
            "layout_cache was filled on the other side of a CUDA graph capture",
            fix="Make the RoutingLayout inside the captured function.",
        )


def complete(received: Received) -> Received:
    """What can be done only after the wait.

    FP8 rows are de-quantised unless they are handed on, counts become the caller's own, and rows that nobody sent get
    no expert.
    """
    call, idx = received.handle.call, received.topk_idx
    if call.fp8 is not None and call.dequantize:
        received = received._replace(x=opened(received.x))
    if not call.counts_on_device:
        return received
    if idx is not None:
        num_received = received.handle.ep_handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        idx.masked_fill_((torch.arange(len(idx), device=idx.device) >= num_received)[:, None], -1)
    return received._replace(tokens_per_expert=received.tokens_per_expert.clone())


def launch_combine(
    call: Call, x: Tensor, ep_handle: Any, topk_weights: Tensor | None = None, phase: str = "combine"
) -> tuple[Tensor, Tensor | None, Any]:
    """Rows back to their tokens, summed, and with them the weights, unsummed. Collective over the group.

    ``phase`` is what a profiler calls it.
    """
    with Launch(call, "combine", x, phase) as launch:
        rows, num_sms = x.contiguous(), call.entry.combine_num_sms(ep_handle)
        streams = call.streams()
        launch.reached = True
        return call.entry.buffer.combine(rows, ep_handle, topk_weights=topk_weights, num_sms=num_sms, **streams)


def launch_cached_dispatch(call: Call, x: Tensor, ep_handle: Any) -> tuple[Tensor | QuantizedRows, Any]:
    """``x`` ``[T, H]`` to where the handle's tokens went, padding rows zero. Collective over the group.

    After the wait the rows go through :func:`opened`.
    """
    in_fp8 = replace(call.fp8, column_major=False) if call.fp8 is not None and call.fp8_backward else None
    with Launch(call, "cached dispatch", x, "combine backward") as launch:
        tokens: Any = x.contiguous()
        if in_fp8 is not None:
            tokens = quantized_for_wire(tokens, in_fp8)
        more = {
            "handle": ep_handle,
            "num_experts": ep_handle.num_experts,
            "num_max_tokens_per_rank": ep_handle.num_max_tokens_per_rank,
            "expert_alignment": ep_handle.expert_alignment,
            "num_sms": ep_handle.num_sms,
            "do_expand": ep_handle.do_expand,
            "do_zero_padding": call.zero_padding,
            **call.streams(),
        }
        launch.reached = True
        recv_x, _, _, _, event = call.entry.buffer.dispatch(tokens, **more)
    return recv_x if in_fp8 is None else received_rows(recv_x, in_fp8, x), event


def opened(rows: Tensor | QuantizedRows) -> Tensor:
    """Received rows in the dtype that their tokens have on the sender; only after the wait."""
    if isinstance(rows, Tensor):
        return rows
    assert rows.anchor is not None
    return dequantize(rows, rows.anchor.dtype)


def eager(function: _F) -> _F:
    """A graph break around ``function`` under ``torch.compile``, which is imported at the first call, not before."""

    disabled: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return cast(_F, call)


def first_order(backward: _F) -> _F:
    """A backward without a second derivative: refused under ``create_graph=True``, where one could be asked for.

    PyTorch's own guard sees only incoming gradients that need a gradient themselves, and is dispensable beside this.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            error = InputError("create_graph=True", fix="Dispatch and combine have no second derivative.")
            if hasattr(ctx, "call"):  # others may be in this backward without it
                ctx.call.entry.fail("backward", error)
            raise error
        return backward(ctx, *grads)

    return cast(_F, guarded)
