"""Triton forms of ``slabs``: rows of the expert layout into masked slabs and back; imported only where they are used.

No host synchronisation: grids depend on shapes alone, counts are read on the device. A program moves some rows of one
expert, so that it reads the expert's bounds once. Legend as in ``slabs``; C columns of whatever is moved.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["from_slabs", "row_experts", "to_slabs", "weighted_backward"]

_ELEMENTS = 1024
"""Elements that one program moves."""


@triton.jit
def _to_slabs(
    rows, slabs, psum, counts, masked_m, flag, num_rows, max_rows, tile, width,
    row_stride, column_stride, slab_stride, place_stride, slab_column_stride,
    FLAG: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(max_rows, ROWS)
    expert, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
    count = tl.load(counts + expert)
    start = tl.load(psum + expert) - count
    fits = tl.minimum(count, max_rows)
    if (first == 0) & (tl.program_id(1) == 0):
        tl.store(masked_m + expert, fits)
        if FLAG:  # noqa: SIM102 (one is known when the kernel is compiled)
            if count > max_rows:
                tl.atomic_max(flag, count)
    end = tl.minimum(tl.cdiv(fits, tile) * tile, max_rows)
    if WHOLE:
        end = max_rows
    if first < end:
        place = first + tl.arange(0, ROWS)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = (column < width)[None, :]
        row = (start + place).to(tl.int64)
        read = ((place < fits) & (row < num_rows))[:, None] & inside
        value = tl.load(rows + (row * row_stride)[:, None] + (column * column_stride)[None, :], mask=read, other=0)
        target = slabs + expert.to(tl.int64) * slab_stride
        target += (place.to(tl.int64) * place_stride)[:, None] + (column.to(tl.int64) * slab_column_stride)[None, :]
        tl.store(target, value, mask=(place < end)[:, None] & inside)


def to_slabs(
    rows: Tensor, psum: Tensor, counts: Tensor, slabs: Tensor, flag: Tensor | None, tile: int | None
) -> Tensor:
    """Fill ``slabs`` ``[L, M, C]`` from ``rows`` ``[A, C]``, of any strides, and zero rows up to the ``tile``.

    ``flag`` int32 ``[1]`` is raised to the largest count above M. Returns ``masked_m``, int32 ``[L]``.
    """
    masked_m = torch.empty_like(counts)
    num_rows, max_rows = len(rows), slabs.shape[1]
    rows, slabs = _words(rows, slabs)
    height, block, grid = _split(len(counts), max_rows, slabs.shape[2])
    _to_slabs[grid](
        rows, slabs, psum, counts, masked_m, flag, num_rows, max_rows, tile or 1, slabs.shape[2],
        *rows.stride(), *slabs.stride(),
        FLAG=flag is not None, WHOLE=tile is None, ROWS=height, BLOCK=block,
    )  # fmt: skip
    return masked_m


@triton.jit
def _from_slabs(
    slabs, rows, psum, counts, weights, num_rows, max_rows, alignment, width,
    slab_stride, place_stride, slab_column_stride, row_stride, column_stride,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(max_rows, ROWS)
    expert, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
    count = tl.load(counts + expert)
    start = tl.load(psum + expert) - count
    fits, end = tl.minimum(count, max_rows), tl.cdiv(count, alignment) * alignment
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width)[None, :]
    target = rows + (column.to(tl.int64) * column_stride)[None, :]
    if first < end:
        place = first + tl.arange(0, ROWS)
        row = (start + place).to(tl.int64)
        read = place < fits
        source = slabs + expert.to(tl.int64) * slab_stride
        source += (place.to(tl.int64) * place_stride)[:, None] + (column.to(tl.int64) * slab_column_stride)[None, :]
        value = tl.load(source, mask=read[:, None] & inside, other=0)
        if WEIGHTED:
            weight = tl.load(weights + row, mask=read & (row < num_rows), other=0.0)
            value = (value.to(weight.dtype) * weight[:, None]).to(value.dtype)
        tl.store(target + (row * row_stride)[:, None], value, mask=((place < end) & (row < num_rows))[:, None] & inside)
    # Rows that did not fit, and the gap after them.
    if first + ROWS >= max_rows:
        zero = tl.zeros((ROWS, BLOCK), rows.dtype.element_ty)
        for beyond in range(first + ROWS, end, ROWS):
            place = beyond + tl.arange(0, ROWS)
            row = (start + place).to(tl.int64)
            missing = (place < end) & (row < num_rows)
            tl.store(target + (row * row_stride)[:, None], zero, mask=missing[:, None] & inside)


def from_slabs(
    slabs: Tensor, psum: Tensor, counts: Tensor, rows: Tensor, weights: Tensor | None, alignment: int
) -> None:
    """Fill the experts' rows of ``rows`` ``[A, C]``, gaps with zeros, from ``slabs`` ``[L, M, C]`` of any strides.

    ``weights`` ``[A]``, contiguous, multiply the rows in their own precision.
    """
    num_rows, max_rows = len(rows), slabs.shape[1]
    if weights is None:
        rows, slabs = _words(rows, slabs)
    height, block, grid = _split(len(counts), max_rows, slabs.shape[2])
    _from_slabs[grid](
        slabs, rows, psum, counts, weights, num_rows, max_rows, alignment, slabs.shape[2],
        *slabs.stride(), *rows.stride(),
        WEIGHTED=weights is not None, ROWS=height, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _weighted_backward(
    grad, slabs, weights, grad_slabs, grad_weights, psum, counts, num_rows, max_rows, width,
    DOT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(max_rows, ROWS)
    expert, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
    count = tl.load(counts + expert)
    start = tl.load(psum + expert) - count
    place = first + tl.arange(0, ROWS)
    row = (start + place).to(tl.int64)
    read = (place < tl.minimum(count, max_rows)) & (row < num_rows)
    weight = tl.load(weights + row, mask=read, other=0.0)
    source = (row * width)[:, None]
    target = ((expert.to(tl.int64) * max_rows + place) * width)[:, None]
    total = tl.zeros((ROWS, BLOCK), weights.dtype.element_ty)
    for left in range(0, width, BLOCK):
        column = left + tl.arange(0, BLOCK)[None, :]
        inside = column < width
        upstream = tl.load(grad + source + column, mask=read[:, None] & inside, other=0.0).to(total.dtype)
        product = (upstream * weight[:, None]).to(grad_slabs.dtype.element_ty)
        tl.store(grad_slabs + target + column, product, mask=(place < max_rows)[:, None] & inside)
        if DOT:
            value = tl.load(slabs + target + column, mask=read[:, None] & inside, other=0.0)
            total += upstream * value.to(total.dtype)
    if DOT:
        tl.store(grad_weights + row, tl.sum(total, axis=1), mask=read)


def weighted_backward(
    grad: Tensor,
    psum: Tensor,
    counts: Tensor,
    weights: Tensor,
    slabs: Tensor | None,
    grad_slabs: Tensor,
    grad_weights: Tensor | None,
) -> None:
    """Fill ``grad_slabs`` ``[L, M, H]``, and where rows are ``grad_weights`` ``[A]`` if there; all contiguous."""
    num_slabs, max_rows, hidden = grad_slabs.shape
    if hidden:
        block = min(triton.next_power_of_2(hidden), 512)
        height = _ELEMENTS // block if block < 512 else 2
        _weighted_backward[(num_slabs * triton.cdiv(max_rows, height),)](
            grad, slabs, weights, grad_slabs, grad_weights, psum, counts, len(grad), max_rows, hidden,
            DOT=slabs is not None, ROWS=height, BLOCK=block,
        )  # fmt: skip


@triton.jit
def _row_experts(psum, counts, out, num_rows, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(psum + expert, mask=expert < num_experts, other=2147483647)
    found = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    last = found < num_experts
    start = tl.load(psum + found, mask=last, other=0) - tl.load(counts + found, mask=last, other=0)
    tl.store(out + row, tl.where(last & (row >= start), found, -1), mask=row < num_rows)


def row_experts(psum: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """int32 ``[A]``: the expert of each row, -1 where there is none."""
    out = torch.empty(num_rows, dtype=torch.int32, device=psum.device)
    if num_rows:
        experts = triton.next_power_of_2(len(psum))
        block = 128
        _row_experts[(triton.cdiv(num_rows, block),)](
            psum, counts, out, num_rows, len(psum), EXPERTS=experts, BLOCK=block
        )
    return out


def _split(num_slabs: int, max_rows: int, width: int) -> tuple[int, int, tuple[int, int]]:
    """Rows and columns of a program, and the grid; columns that divide the width where such exist."""
    fitting = [block for block in (256, 128) if width % block == 0]
    block = fitting[0] if fitting else min(triton.next_power_of_2(max(width, 1)), 256)
    height = _ELEMENTS // block
    return height, block, (num_slabs * triton.cdiv(max_rows, height), max(triton.cdiv(width, block), 1))


def _words(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as the widest integers that all of them can be cut into: moved bit for bit, whatever the dtype."""
    size = tensors[0].element_size()
    if all(tensor.stride(-1) == 1 for tensor in tensors):
        for dtype in (torch.int64, torch.int32, torch.int16):
            spans = [
                span * size for one in tensors for span in (one.shape[-1], *one.stride()[:-1], one.storage_offset())
            ]
            if dtype.itemsize >= size and not any(span % dtype.itemsize for span in spans):
                return tuple(tensor.view(dtype) for tensor in tensors)
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tuple(tensor.view(same) for tensor in tensors)
