"""Rows of the token layout, grouped by local expert and back, with gradients.

The expert layout needs none of this. On CUDA tensors the work is done by the Triton kernels where Triton is installed.
Legend: n received tokens, K top-k, L local experts, H hidden, P grouped rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .buffers import layout
from .communication import first_order
from .fp8 import QuantizedRows, dequantize
from .ranges import ranged

__all__ = ["group_by_expert", "group_quantized", "sum_over_experts"]


def group_by_expert(
    x: Tensor, local_idx: Tensor, weights: Tensor, num_local_experts: int, num_slots: int, alignment: int = 1
) -> tuple[Tensor, Tensor, layout.ExpertSlots]:
    """One row for each (token, local expert), grouped by expert, each group padded with zero rows.

    Args:
        x: ``[n, H]``, floating point.
        local_idx: int64 ``[n, K]``, local expert or -1.
        weights: float32 ``[n, K]`` (float64 with float64 rows).
        num_slots: P, the sum of the counts rounded up to ``alignment``, or more; rows beyond that sum are undefined.

    Returns:
        rows ``[P, H]``, their weights ``[P]`` (zero for padding), and the slots that :func:`sum_over_experts` takes.
    """
    rows, grouped, *slots = _Group.apply(  # type: ignore[no-untyped-call]
        x, weights, local_idx, num_local_experts, alignment, num_slots
    )
    return rows, grouped, layout.ExpertSlots(*slots)


def group_quantized(
    rows: QuantizedRows,
    local_idx: Tensor,
    weights: Tensor,
    num_local_experts: int,
    num_slots: int,
    alignment: int = 1,
    *,
    opened: bool,
) -> tuple[Any, Tensor, layout.ExpertSlots]:
    """:func:`group_by_expert` of FP8 rows, which stay in FP8, or are de-quantised on the way.

    Args:
        rows: ``[n, W]`` with row-major scales and an anchor.
        opened: return rows ``[P, H]`` in the dtype of the anchor; else :class:`QuantizedRows` with an anchor, the
            scales row-major.

    Returns:
        As :func:`group_by_expert`.
    """
    out, grouped, numbered, counts, aligned, *kept = _Group.apply(  # type: ignore[no-untyped-call]
        rows.anchor, weights, local_idx, num_local_experts, alignment, num_slots, replace(rows, anchor=None), opened
    )
    slots = layout.ExpertSlots(numbered, counts, aligned)
    return (replace(kept[0], anchor=out) if kept else out), grouped, slots


def sum_over_experts(rows: Tensor, slots: layout.ExpertSlots) -> Tensor:
    """Sum each token's rows ``[P, H]`` into ``[n, H]``, in float32 with one rounding."""
    return _Ungroup.apply(rows, *slots)  # type: ignore[no-untyped-call, no-any-return]


def _spread(x: Tensor, slots: layout.ExpertSlots, num_slots: int) -> Tensor:
    """Copy each row of ``x`` to its slots ``[num_slots, H]``; the gaps are zero."""
    if kernels := layout.kernels_for(x):
        return kernels.group(x, slots.slots, slots.counts, slots.aligned, num_slots)  # type: ignore[no-any-return]
    position = layout.rows_of_slots(slots.slots, num_slots)
    if not len(x):
        return x.new_zeros(num_slots, x.shape[1])
    spread = layout.gather_rows(x, position.clamp_min(0) // slots.slots.shape[1])
    gaps = (position < 0).nonzero().squeeze(1)
    return spread.index_fill_(0, gaps, 0) if len(gaps) else spread


def _spread_quantized(rows: QuantizedRows, slots: layout.ExpertSlots, num_slots: int) -> QuantizedRows:
    data = _spread(layout.lanes(rows.data.view(torch.uint8)), slots, num_slots).view(torch.float8_e4m3fn)
    scales = _spread(rows.scales, slots, num_slots)
    return QuantizedRows(data=data, scales=scales, format=rows.format, hidden=rows.hidden)


class _Group(torch.autograd.Function):
    @staticmethod
    @ranged("permute")
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        local_idx: Tensor,
        num_local_experts: int,
        alignment: int,
        num_slots: int,
        quantized: QuantizedRows | None = None,
        opened: bool = True,
    ) -> tuple[Any, ...]:
        weights = weights.contiguous()
        if kernels := layout.kernels_for(x):
            *numbered, grouped = kernels.slots(local_idx, num_local_experts, alignment, weights, num_slots)
            slots = layout.ExpertSlots(*numbered)
        else:
            slots = layout.expert_slots(local_idx, num_local_experts, alignment)
            grouped = layout.pick(weights.reshape(-1), layout.rows_of_slots(slots.slots, num_slots))
        ctx.save_for_backward(slots.slots)
        ctx.mark_non_differentiable(*slots)
        if quantized is None:
            return _spread(x.contiguous(), slots, num_slots), grouped, *slots
        if opened:
            return _spread(dequantize(quantized, x.dtype), slots, num_slots), grouped, *slots
        anchor = x.new_zeros(()).expand(num_slots, x.shape[1])
        return anchor, grouped, *slots, _spread_quantized(quantized, slots, num_slots)

    @staticmethod
    @first_order
    @ranged("permute backward")
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        grad, grad_weights = grad.contiguous(), grad_weights.contiguous()
        if kernels := layout.kernels_for(grad):
            target = grad.new_empty(len(slots), grad.shape[1])
            grad_x, grad_topk = kernels.ungroup(grad, slots, target, grad_weights)
        else:
            grad_x, grad_topk = layout.sum_rows(grad, slots), layout.pick(grad_weights, slots)
        return grad_x, grad_topk, *[None] * 6  # x, weights, idx, experts, alignment, slots, quantized, opened


class _Ungroup(torch.autograd.Function):
    @staticmethod
    @ranged("unpermute")
    def forward(ctx: Any, rows: Tensor, slots: Tensor, counts: Tensor, aligned: Tensor) -> Tensor:
        ctx.save_for_backward(slots, counts, aligned)
        ctx.num_slots = len(rows)
        return layout.sum_rows(rows.contiguous(), slots)

    @staticmethod
    @first_order
    @ranged("unpermute backward")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slots = layout.ExpertSlots(*ctx.saved_tensors)
        return _spread(grad.contiguous(), slots, ctx.num_slots), None, None, None  # rows, slots, counts, aligned
