"""Rows of the token layout, grouped by local expert and back, with gradients.

The expert layout needs none of this. Legend: n received tokens, K top-k, L local experts, H hidden, P grouped rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .buffers import layout

__all__ = ["group_by_expert", "sum_over_experts"]


def group_by_expert(
    x: Tensor, local_idx: Tensor, weights: Tensor, num_local_experts: int, alignment: int = 1
) -> tuple[Tensor, Tensor, layout.ExpertSlots]:
    """One row for each (token, local expert), grouped by expert, each group padded with zero rows.

    Args:
        x: ``[n, H]``.
        local_idx: int64 ``[n, K]``, local expert or -1.
        weights: ``[n, K]``.

    Returns:
        rows ``[P, H]``, their weights ``[P]`` (zero for padding), and the slots that :func:`sum_over_experts` takes.
    """
    slots = layout.expert_slots(local_idx, num_local_experts, alignment)
    position = layout.rows_of_slots(slots.slots, int(slots.aligned.sum()))
    row = torch.where(position < 0, -1, position // max(local_idx.shape[1], 1))
    grouped_weights = layout.pick(weights.reshape(-1), position)
    return _Group.apply(x, row, slots.slots), grouped_weights, slots  # type: ignore[no-untyped-call]


def sum_over_experts(rows: Tensor, slots: layout.ExpertSlots) -> Tensor:
    """Sum each token's rows ``[P, H]`` into ``[n, H]``, in float32 with one rounding."""
    return _Ungroup.apply(rows, slots.slots)  # type: ignore[no-untyped-call, no-any-return]


def _group(x: Tensor, row: Tensor) -> Tensor:
    if not len(x):
        return x.new_zeros(len(row), x.shape[1])
    grouped = layout.gather_rows(x, row.clamp_min(0))
    padding = (row < 0).nonzero().squeeze(1)
    return grouped.index_fill_(0, padding, 0) if len(padding) else grouped


class _Group(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return _group(x.contiguous(), row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return layout.sum_rows(grad.contiguous(), slots), None, None  # x, row, slots


class _Ungroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_rows = len(rows)
        return layout.sum_rows(rows.contiguous(), slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        position = layout.rows_of_slots(slots, ctx.num_rows)
        row = torch.where(position < 0, -1, position // max(slots.shape[1], 1))
        return _group(grad.contiguous(), row), None  # rows, slots
