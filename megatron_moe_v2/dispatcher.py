"""``FlexTokenDispatcher``: router output in, expert-grouped rows out, and back, for scripts without Megatron.

    dispatched = dispatcher.dispatch(x, topk_idx, topk_weights)
    rows = experts(dispatched.tokens, dispatched.padded_tokens_per_expert)
    y = dispatcher.combine(rows, dispatched)

Legend: T own tokens, H hidden, K top-k, E experts, L local experts, P rows grouped by expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .buffers.contract import align
from .buffers.layout import ExpertSlots, align_counts
from .communication import DispatchHandle
from .errors import HandleError, InputError, MoEError
from .fp8 import QuantizedRows, ScaleFormat
from .fp8_wire import check_options
from .fused_a2a import Layout, fused_combine, fused_dispatch
from .permutation import group_by_expert, group_quantized, sum_over_experts
from .pool import Ceiling, Group, pool, resolve_group, typed
from .recompute import RoutingLayout
from .selection import select_experts
from .telemetry import ExpertLoadStats

__all__ = ["Dispatched", "FlexTokenDispatcher"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """Tokens at their experts, and what the combine needs. Several may be in flight.

    Attributes:
        tokens: ``[P, H]``, grouped by local expert; padding rows are zero. With ``dequantize=False`` a
            :class:`~megatron_moe_v2.fp8.QuantizedRows`.
        weights: float32 ``[P]``, routing weight of each row; zero for padding.
        tokens_per_expert: ``[L]``, exact counts; on the CPU unless the expert layout pads.
        padded_tokens_per_expert: int64 ``[L]`` on the CPU, sums to P: what a grouped GEMM walks by. With static shapes
            P is what the ceiling allows, both counts are int32 on the device, and rows beyond the padded counts' sum
            are undefined: nothing here reads them, and the experts must not.
        handle: of the dispatch.
        slots: the token layout's own permutation, None in the expert layout.
        shape: of the tokens before dispatch, ``[..., H]``.
    """

    tokens: Any
    weights: Tensor
    tokens_per_expert: Tensor
    padded_tokens_per_expert: Tensor
    handle: DispatchHandle
    slots: ExpertSlots | None
    shape: torch.Size


class FlexTokenDispatcher:
    """Dispatches tokens to the experts of all ranks and combines what they return.

    Args:
        num_experts: E over all ranks, a multiple of them; rank r owns ``[r * L, (r + 1) * L)``.
        group: process group, one-dimensional ``DeviceMesh``, or None for the default group.
        layout: ``"token"`` permutes on this side; ``"expert"`` lets the buffer deliver rows grouped by expert.
        expert_alignment: pad each expert's rows to a multiple of this.
        num_topk: K, needed by :meth:`dispatch_dense` alone.
        num_max_tokens_per_rank: the ceiling of the buffer to use, where there are several.
        static_shapes: as many rows as the ceiling allows, whatever arrives, and no host synchronisation; see
            :class:`Dispatched`.
        load_stats: counts what each local expert receives; see :mod:`megatron_moe_v2.telemetry`.
        fp8, dequantize, fp8_backward: FP8 on the wire, as :func:`fused_dispatch` takes them.
        name: label in errors, e.g. ``"layer 3"``.
        async_finish, allocate_on_comm_stream: DeepEP's stream flags.

    Raises:
        InputError: a number that cannot be, or no process group.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        group: Group = None,
        layout: Layout = "token",
        expert_alignment: int = 1,
        num_topk: int | None = None,
        num_max_tokens_per_rank: Ceiling = None,
        static_shapes: bool = False,
        load_stats: ExpertLoadStats | None = None,
        fp8: ScaleFormat | None = None,
        dequantize: bool = True,
        fp8_backward: bool = False,
        name: str | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> None:
        self.group = resolve_group(group)
        if not isinstance(num_experts, int) or num_experts < 1 or num_experts % self.group.size():
            wanted = f"a positive multiple of the {self.group.size()} ranks"
            raise InputError("num_experts", got=repr(num_experts), expected=wanted)
        if layout not in ("token", "expert"):
            raise InputError("layout", got=repr(layout), expected='"token" or "expert"')
        if not isinstance(expert_alignment, int) or expert_alignment < 1:
            raise InputError("expert_alignment", got=repr(expert_alignment), expected="an integer from 1")
        check_options(fp8, dequantize, fp8_backward)
        self.fp8, self.dequantize, self.fp8_backward = fp8, dequantize, fp8_backward
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.group.size()
        self.layout, self.expert_alignment = layout, expert_alignment
        self.num_topk, self.name, self.load_stats = num_topk, name, load_stats
        self.num_max_tokens_per_rank, self.static_shapes = num_max_tokens_per_rank, static_shapes
        self.async_finish, self.allocate_on_comm_stream = async_finish, allocate_on_comm_stream

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, layout_cache: RoutingLayout | None = None
    ) -> Dispatched:
        """Send tokens to their experts. Collective over the group.

        Args:
            x: ``[..., H]``, floating point.
            topk_idx: integer ``[..., K]``, global experts; negative entries select nothing.
            topk_weights: floating ``[..., K]``.
            layout_cache: as :func:`fused_dispatch` takes it.

        Raises:
            MoEError: as :func:`fused_dispatch`, with this dispatcher's name.
        """
        expert = self.layout == "expert"
        fp8 = self.fp8 if expert or self.fp8 is None else replace(self.fp8, column_major=False)
        try:
            try:
                flat = _flat(x), _flat(topk_idx), _flat(topk_weights)
            except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
                pool.fail(self.group, "dispatch", error)
            recv_x, recv_idx, recv_weights, counts, handle = fused_dispatch(
                *flat,
                self.num_experts,
                self.group,
                self.async_finish,
                self.allocate_on_comm_stream,
                layout=self.layout,
                expert_alignment=self.expert_alignment if expert else 1,
                num_max_tokens_per_rank=self.num_max_tokens_per_rank,
                static_shapes=self.static_shapes,
                layout_cache=layout_cache,
                load_stats=self.load_stats,
                fp8=fp8,
                dequantize=self.dequantize and (expert or fp8 is None),  # else together with the grouping
                fp8_backward=self.fp8_backward,
            )
        except MoEError as error:
            named = self._named(error)
            if named is error:
                raise
            raise named from error
        slots, padded = None, handle.padded_tokens_per_expert if handle.call.counts_on_device else counts.clone()
        if recv_idx is not None:
            padded = align_counts(padded, self.expert_alignment)
            num_slots = self._most_slots(handle) if self.static_shapes else int(padded.sum())
            grouping = recv_idx, recv_weights, self.num_local_experts, num_slots, self.expert_alignment
            if self.fp8 is None:
                recv_x, recv_weights, slots = group_by_expert(recv_x, *grouping)
            else:
                recv_x, recv_weights, slots = group_quantized(recv_x, *grouping, opened=self.dequantize)
            if isinstance(recv_x, QuantizedRows) and self.fp8 is not None:
                scales = self.fp8.arrange(recv_x.scales) if self.fp8.column_major else recv_x.scales
                recv_x = replace(recv_x, scales=scales, format=self.fp8)
        return Dispatched(
            tokens=recv_x,
            weights=recv_weights,
            tokens_per_expert=counts,
            padded_tokens_per_expert=padded,
            handle=handle,
            slots=slots,
            shape=x.shape,
        )

    def dispatch_dense(self, x: Tensor, probs: Tensor, mask: Tensor) -> Dispatched:
        """The same from a dense router: ``probs`` ``[..., E]`` and a bool ``mask`` ``[..., E]`` of what is selected.

        At most ``num_topk`` experts of a token are kept, the most probable; the same on every rank. Collective over the
        group.

        Raises:
            InputError: on every rank, if shapes do not fit or ``num_topk`` was not given on any.
            MoEError: as :meth:`dispatch`.
        """
        try:
            if self.num_topk is None:
                raise InputError("num_topk", got=None, expected="a number", fix="Pass num_topk= to the dispatcher.")
            if not isinstance(self.num_topk, int) or not 1 <= self.num_topk <= self.num_experts:
                raise InputError(
                    "num_topk", got=repr(self.num_topk), expected=f"an integer from 1 to {self.num_experts}"
                )
            if not isinstance(probs, Tensor) or not isinstance(mask, Tensor):
                raise InputError("probs and mask", got=[type(probs).__name__, type(mask).__name__], expected="tensors")
            if probs.shape != mask.shape or probs.shape[-1] != self.num_experts:
                shapes = [list(probs.shape), list(mask.shape)]
                raise InputError("probs and mask", got=shapes, expected=f"both [..., {self.num_experts}]")
            if not probs.dtype.is_floating_point:
                raise InputError("probs", got=probs.dtype, expected="a floating dtype")
            topk_weights, topk_idx = select_experts(_flat(probs), _flat(mask), self.num_topk)
            shape = *probs.shape[:-1], self.num_topk
            topk_weights, topk_idx = topk_weights.view(shape), topk_idx.view(shape)
        except Exception as error:  # as above
            pool.fail(self.group, "dispatch", self._named(typed(error, "dispatch")))
        return self.dispatch(x, topk_idx, topk_weights)

    def _most_slots(self, handle: DispatchHandle) -> int:
        """P for whatever arrives: every received row at as many experts as it can select here."""
        num_topk, experts = handle.ep_handle.topk_idx.shape[1], self.num_local_experts
        most = handle.num_rows * min(num_topk, experts) + (self.expert_alignment - 1) * experts
        return align(most, self.expert_alignment)

    def combine(self, expert_output: Tensor, dispatched: Dispatched, *, apply_weights: bool = True) -> Tensor:
        """Sum the experts' rows of each token. Collective over the group.

        The result is complete over the group: no all-reduce may follow.

        Args:
            expert_output: ``[P, H]``, rows as ``dispatched.tokens``.
            dispatched: of the dispatch.
            apply_weights: multiply each row by its routing weight first; False where the experts did.

        Returns:
            ``[..., H]``, the shape of the dispatched ``x``.

        Raises:
            InputError: on every rank, if ``expert_output`` has other rows on any.
            MoEError: as :func:`fused_combine`, with this dispatcher's name.
        """
        try:
            try:
                _check_output(expert_output, dispatched)
                if apply_weights:
                    expert_output = expert_output * dispatched.weights[:, None].to(expert_output.dtype)
                if dispatched.slots is not None:
                    expert_output = sum_over_experts(expert_output, dispatched.slots)
            except Exception as error:  # as above
                pool.fail(self.group, "combine", error)
            combined, _ = fused_combine(
                expert_output, self.group, dispatched.handle, self.async_finish, self.allocate_on_comm_stream
            )
        except MoEError as error:
            named = self._named(error)
            if named is error:
                raise
            raise named from error
        return combined if len(dispatched.shape) == 2 else combined.view(*dispatched.shape[:-1], combined.shape[-1])

    def _named(self, error: MoEError) -> MoEError:
        if self.name is None or str(error).startswith(f"{self.name}: "):
            return error
        return type(error)(f"{self.name}: {error}")


def _check_output(expert_output: Tensor, dispatched: Dispatched) -> None:
    if not isinstance(dispatched, Dispatched):
        raise InputError("dispatched", got=type(dispatched).__name__, expected="what dispatch returned")
    rows, device = dispatched.weights.shape[0], dispatched.weights.device
    if not isinstance(expert_output, Tensor) or expert_output.dim() != 2 or expert_output.shape[0] != rows:
        got = list(expert_output.shape) if isinstance(expert_output, Tensor) else type(expert_output).__name__
        raise InputError("expert_output", got=got, expected=f"[{rows}, H], a row for each of dispatched.tokens")
    dtype = expert_output.dtype
    if dtype not in _ROW_DTYPES or expert_output.device != device or expert_output.layout is not torch.strided:
        kind = dtype, expert_output.device, expert_output.layout
        raise InputError("expert_output", got=kind, expected=f"dense rows of two bytes or more on {device}")
    if torch.is_grad_enabled() and expert_output.requires_grad and dispatched.weights.is_inference():
        text = "tokens dispatched in inference_mode cannot be trained with"
        raise HandleError(text, fix="Dispatch outside torch.inference_mode().")


_ROW_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))


def _flat(tensor: Tensor) -> Tensor:
    """``[..., H]`` as ``[T, H]``; anything else is left for the checks of the call."""
    if not isinstance(tensor, Tensor) or tensor.dim() in (0, 2):
        return tensor
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
