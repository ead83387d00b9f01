"""Triton forms of the hot loops in ``layout``, for CUDA tensors; imported only where they are used.

``slots`` numbers the (row, local expert) pairs, ``group`` copies each row to its slots, ``ungroup`` sums them back. No
host synchronisation, no atomics: slots ascend with the row, as in the plain forms, and sums are taken in ascending
lane. ``select`` and ``unselect`` turn a dense router's output into selections, and their gradient back. Legend as in
``contract``; P rows grouped by expert, padding included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MOST_EXPERTS", "group", "select", "slots", "ungroup", "unselect"]

_ELEMENTS = 128
"""Selections that one program numbers."""

MOST_EXPERTS = 2048
"""E of a selection: a row of experts is one program's."""

_SCORES = 1024
"""Probabilities that one program selects from."""


@triton.jit
def _count(idx, counts, num_elements, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    element = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(idx + element, mask=element < num_elements, other=-1).to(tl.int32)
    column = tl.arange(0, EXPERTS)
    hits = (expert[:, None] == column[None, :]).to(tl.int32)
    tl.store(counts + block * num_experts + column, tl.sum(hits, axis=0), mask=column < num_experts)


@triton.jit
def _total(counts, totals, num_blocks, num_experts, BLOCKS: tl.constexpr):
    """One program an expert: each block's count becomes the sum of those before it."""
    place = tl.program_id(0) + tl.arange(0, BLOCKS) * num_experts
    inside = tl.arange(0, BLOCKS) < num_blocks
    count = tl.load(counts + place, mask=inside, other=0)
    tl.store(counts + place, tl.cumsum(count, axis=0) - count, mask=inside)
    tl.store(totals + tl.program_id(0), tl.sum(count, axis=0))


@triton.jit
def _number(
    idx,
    weights,
    before,
    totals,
    slots,
    aligned_totals,
    grouped_weights,
    num_elements,
    num_experts,
    alignment,
    WEIGHTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    column = tl.arange(0, EXPERTS)
    existing = column < num_experts
    total = tl.load(totals + column, mask=existing, other=0)
    aligned = (total + alignment - 1) // alignment * alignment
    if block == 0:
        tl.store(aligned_totals + column, aligned, mask=existing)
    start = tl.cumsum(aligned, axis=0) - aligned
    start += tl.load(before + block * num_experts + column, mask=existing, other=0)
    place = tl.arange(0, BLOCK)
    element = block * BLOCK + place
    inside = element < num_elements
    expert = tl.load(idx + element, mask=inside, other=-1).to(tl.int32)
    other = tl.load(idx + block * BLOCK + place, mask=inside, other=-1).to(tl.int32)
    earlier = (expert[:, None] == other[None, :]) & (place[None, :] < place[:, None])
    first = tl.sum(tl.where(expert[:, None] == column[None, :], start[None, :], 0), axis=1)
    valid = inside & (expert >= 0)
    slot = tl.where(valid, first + tl.sum(earlier.to(tl.int32), axis=1), -1)
    tl.store(slots + element, slot, mask=inside)
    if WEIGHTS:
        value = tl.load(weights + element, mask=valid, other=0.0)
        tl.store(grouped_weights + slot, value, mask=valid)


def slots(
    local_idx: Tensor, num_local_experts: int, alignment: int, weights: Tensor | None, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Number the selections by expert: counts of each block, their running sums, then slots.

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
    experts = triton.next_power_of_2(num_local_experts)
    numbered = torch.empty_like(local_idx, dtype=torch.int32)
    per_block = numbered.new_empty(blocks, num_local_experts)
    totals, aligned = numbered.new_empty(num_local_experts), numbered.new_empty(num_local_experts)
    grouped = None
    if weights is not None:  # without padding every slot is written
        grouped = (weights.new_zeros if alignment > 1 else weights.new_empty)(num_slots)
    _count[(blocks,)](local_idx, per_block, num_elements, num_local_experts, EXPERTS=experts, BLOCK=_ELEMENTS)
    _total[(num_local_experts,)](per_block, totals, blocks, num_local_experts, BLOCKS=triton.next_power_of_2(blocks))
    _number[(blocks,)](
        local_idx,
        weights,
        per_block,
        totals,
        numbered,
        aligned,
        grouped,
        num_elements,
        num_local_experts,
        alignment,
        WEIGHTS=weights is not None,
        EXPERTS=experts,
        BLOCK=_ELEMENTS,
    )
    return numbered, totals, aligned, grouped


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
    rows,
    slots,
    out,
    weights,
    picked,
    hidden,
    rows_stride,
    slots_stride,
    out_stride,
    WEIGHTS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32)
    for lane in tl.static_range(NUM_TOPK):
        slot = tl.load(slots + row * slots_stride + lane).to(tl.int64)
        if slot >= 0:
            total += tl.load(rows + slot * rows_stride + column, mask=inside, other=0.0).to(total.dtype)
        if WEIGHTS and tl.program_id(1) == 0:
            weight = tl.load(weights + slot, mask=slot >= 0, other=0.0)
            tl.store(picked + row * NUM_TOPK + lane, weight)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


def ungroup(rows: Tensor, numbered: Tensor, out: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Sum each line's rows of ``[P, H]`` into ``out`` ``[n, H]``, in ascending lane, in float32, rounded once.

    Args:
        numbered: integer ``[n, K]`` of any row stride, -1 for none.
        weights: ``[P]``, a number a slot, contiguous, or None.

    Returns:
        ``out``, and the ``weights`` of each line's slots ``[n, K]``, zero where there is none.
    """
    num_rows, hidden = out.shape
    num_topk = numbered.shape[1]
    picked = None if weights is None else weights.new_empty(num_rows, num_topk)
    if num_rows and hidden:
        block = min(triton.next_power_of_2(hidden), 2048)
        _ungroup[(num_rows, triton.cdiv(hidden, block))](
            rows,
            numbered,
            out,
            weights,
            picked,
            hidden,
            rows.stride(0),
            numbered.stride(0),
            out.stride(0),
            WEIGHTS=weights is not None,
            NUM_TOPK=num_topk,
            BLOCK=block,
        )
    return out, picked


@triton.jit
def _select(
    probs,
    mask,
    weights,
    idx,
    num_tokens,
    num_experts,
    NUM_TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The largest of a row K times, each then struck out.

    A key is the probability as an integer of the same order, then the expert, the lower the larger: no two are equal.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    place = row[:, None] * num_experts + expert[None, :]
    inside = (row < num_tokens)[:, None] & (expert < num_experts)[None, :]
    score = tl.load(probs + place, mask=inside, other=0.0).to(tl.float32)
    selected = (tl.load(mask + place, mask=inside, other=0) != 0) & (score != float("-inf"))
    score = tl.where(score == 0.0, 0.0, score)  # not -0.0
    bits = tl.where(score != score, 0x7FC00000, score.to(tl.int32, bitcast=True)).to(tl.int64)  # any NaN is the largest
    ordered = tl.where(bits < 0, -1 - bits, bits + 0x80000000)
    key = tl.where(selected, ordered * EXPERTS + (EXPERTS - 1 - expert)[None, :], -1)
    for lane in tl.static_range(NUM_TOPK):
        largest = tl.max(key, axis=1)
        key = tl.where(key == largest[:, None], -1, key)
        found = largest >= 0
        value = largest // EXPERTS
        value = tl.where(value < 0x80000000, -1 - value, value - 0x80000000).to(tl.int32).to(tl.float32, bitcast=True)
        target = row * NUM_TOPK + lane
        tl.store(idx + target, tl.where(found, EXPERTS - 1 - largest % EXPERTS, -1), mask=row < num_tokens)
        value = tl.where(found, value, 0.0).to(weights.dtype.element_ty)
        tl.store(weights + target, value, mask=row < num_tokens)


def select(probs: Tensor, mask: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """The K most probable of what ``mask`` selects, in descending probability, NaN first, then ascending expert.

    Minus infinity is not selected.

    Args:
        probs: ``[T, E]``, of up to four bytes; contiguous.
        mask: bool ``[T, E]``; contiguous.

    Returns:
        ``[T, K]`` probabilities, and int64 ``[T, K]`` experts; zero and -1 where fewer are selected.
    """
    num_tokens, num_experts = probs.shape
    weights = probs.new_empty(num_tokens, num_topk)
    idx = torch.empty_like(weights, dtype=torch.int64)
    experts, rows = _rows_of(num_experts)
    _select[(triton.cdiv(num_tokens, rows),)](
        probs, mask, weights, idx, num_tokens, num_experts, NUM_TOPK=num_topk, EXPERTS=experts, ROWS=rows
    )
    return weights, idx


@triton.jit
def _unselect(
    grad, idx, out, num_tokens, num_experts, NUM_TOPK: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    dense = tl.zeros((ROWS, EXPERTS), dtype=out.dtype.element_ty)
    for lane in tl.static_range(NUM_TOPK):
        source = row * NUM_TOPK + lane
        chosen = tl.load(idx + source, mask=row < num_tokens, other=-1)
        value = tl.load(grad + source, mask=row < num_tokens, other=0.0)
        dense = tl.where(expert[None, :] == chosen[:, None], value[:, None], dense)
    inside = (row < num_tokens)[:, None] & (expert < num_experts)[None, :]
    tl.store(out + row[:, None] * num_experts + expert[None, :], dense, mask=inside)


def unselect(grad: Tensor, idx: Tensor, num_experts: int) -> Tensor:
    """Gradient of :func:`select`: ``[T, K]`` back to ``[T, E]``, zero elsewhere; both contiguous."""
    num_tokens, num_topk = idx.shape
    out = grad.new_empty(num_tokens, num_experts)
    experts, rows = _rows_of(num_experts)
    _unselect[(triton.cdiv(num_tokens, rows),)](
        grad, idx, out, num_tokens, num_experts, NUM_TOPK=num_topk, EXPERTS=experts, ROWS=rows
    )
    return out


def _rows_of(num_experts: int) -> tuple[int, int]:
    """Experts as a power of two, and the tokens of a program."""
    experts = triton.next_power_of_2(num_experts)
    return experts, max(_SCORES // experts, 1)
