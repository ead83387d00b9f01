"""Triton forms of the hot loops in ``layout``, for CUDA tensors; imported only where they are used.

``slots`` numbers the (row, local expert) pairs, ``group`` copies each row to its slots, ``ungroup`` sums them back. No
host synchronisation, no atomics: slots ascend with the row, as in the plain forms, and sums are taken in ascending
lane. Legend as in ``contract``; P rows grouped by expert, padding included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["group", "slots", "ungroup"]

_ELEMENTS = 256
"""Selections that one program numbers."""


@triton.jit
def _count(idx, counts, num_elements, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    element = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(idx + element, mask=element < num_elements, other=-1).to(tl.int32)
    column = tl.arange(0, EXPERTS)
    hits = (expert[:, None] == column[None, :]).to(tl.int32)
    tl.store(counts + block * num_experts + column, tl.sum(hits, axis=0), mask=column < num_experts)


@triton.jit
def _number(
    idx, weights, base, slots, grouped_weights, num_elements, num_experts, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    element = block * BLOCK + place
    inside = element < num_elements
    expert = tl.load(idx + element, mask=inside, other=-1).to(tl.int32)
    other = tl.load(idx + block * BLOCK + place, mask=inside, other=-1).to(tl.int32)
    before = (expert[:, None] == other[None, :]) & (place[None, :] < place[:, None])
    rank = tl.sum(before.to(tl.int32), axis=1)
    valid = inside & (expert >= 0)
    first = tl.load(base + block * num_experts + expert, mask=valid, other=0).to(tl.int32)
    slot = tl.where(valid, first + rank, -1)
    tl.store(slots + element, slot, mask=inside)
    if WEIGHTS:
        value = tl.load(weights + element, mask=valid, other=0.0)
        tl.store(grouped_weights + slot, value, mask=valid)


def slots(
    local_idx: Tensor, num_local_experts: int, alignment: int, weights: Tensor | None, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Number the selections by expert.

    Args:
        local_idx: int64 ``[n, K]``, local expert or -1; contiguous.
        weights: float32 ``[n, K]`` to be brought along, or None.
        num_slots: P, known from the counts that the host has.

    Returns:
        int32 ``[n, K]`` slots (-1 elsewhere), int32 ``[L]`` counts, int32 ``[L]`` aligned counts, and the weights
        ``[P]``, zero in padding.
    """
    num_elements = local_idx.numel()
    blocks = max(triton.cdiv(num_elements, _ELEMENTS), 1)
    device = local_idx.device
    numbered = torch.empty(local_idx.shape, dtype=torch.int32, device=device)
    per_block = torch.empty(blocks, num_local_experts, dtype=torch.int32, device=device)
    grouped = None if weights is None else torch.zeros(num_slots, dtype=weights.dtype, device=device)
    experts = triton.next_power_of_2(num_local_experts)
    _count[(blocks,)](local_idx, per_block, num_elements, num_local_experts, EXPERTS=experts, BLOCK=_ELEMENTS)
    running = per_block.cumsum(0, dtype=torch.int32)
    counts = running[-1]
    aligned = (counts + (alignment - 1)) // alignment * alignment
    base = running - per_block + (aligned.cumsum(0, dtype=torch.int32) - aligned)
    _number[(blocks,)](
        local_idx,
        weights,
        base,
        numbered,
        grouped,
        num_elements,
        num_local_experts,
        WEIGHTS=weights is not None,
        BLOCK=_ELEMENTS,
    )
    return numbered, counts, aligned, grouped


@triton.jit
def _group(x, slots, counts, aligned, out, num_rows, hidden, x_stride, NUM_TOPK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    if row < num_rows:
        value = tl.load(x + row * x_stride + column, mask=inside)
        for lane in tl.static_range(NUM_TOPK):
            slot = tl.load(slots + row * NUM_TOPK + lane).to(tl.int64)
            if slot >= 0:
                tl.store(out + slot * hidden + column, value, mask=inside)
    else:
        expert = row - num_rows
        start = tl.zeros((), tl.int64)
        for earlier in range(expert):
            start += tl.load(aligned + earlier)
        zero = tl.zeros((BLOCK,), out.dtype.element_ty)
        for slot in range(start + tl.load(counts + expert), start + tl.load(aligned + expert)):
            tl.store(out + slot * hidden + column, zero, mask=inside)


def group(x: Tensor, numbered: Tensor, counts: Tensor, aligned: Tensor, num_slots: int) -> Tensor:
    """Copy each row ``[n, H]`` to its slots, and zeros to the gaps. Each row is read once. Returns ``[P, H]``."""
    num_rows, hidden = x.shape
    out = x.new_empty(num_slots, hidden)
    programs = num_rows + len(counts)
    if hidden:
        block = min(triton.next_power_of_2(hidden), 2048)
        _group[(programs, triton.cdiv(hidden, block))](
            x, numbered, counts, aligned, out, num_rows, hidden, x.stride(0), NUM_TOPK=numbered.shape[1], BLOCK=block
        )
    return out


@triton.jit
def _ungroup(
    rows, slots, out, hidden, rows_stride, slots_stride, out_stride, NUM_TOPK: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32)
    for lane in tl.static_range(NUM_TOPK):
        slot = tl.load(slots + row * slots_stride + lane).to(tl.int64)
        if slot >= 0:
            total += tl.load(rows + slot * rows_stride + column, mask=inside, other=0.0).to(total.dtype)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


def ungroup(rows: Tensor, numbered: Tensor, out: Tensor) -> Tensor:
    """Sum each line's rows of ``[P, H]`` into ``out`` ``[n, H]``, in ascending lane, in float32, rounded once.

    ``numbered`` is an integer ``[n, K]`` of any row stride, -1 for none.
    """
    num_rows, hidden = out.shape
    if num_rows and hidden:
        block = min(triton.next_power_of_2(hidden), 2048)
        _ungroup[(num_rows, triton.cdiv(hidden, block))](
            rows,
            numbered,
            out,
            hidden,
            rows.stride(0),
            numbered.stride(0),
            out.stride(0),
            NUM_TOPK=numbered.shape[1],
            BLOCK=block,
        )
    return out
