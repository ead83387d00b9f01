"""Triton forms of ``fp8``'s quantisation and de-quantisation; imported only where they are used.

Bit for bit what the plain forms compute. A GPU with FP8 casts rounds codes by its own instruction, which is what the
arithmetic here computes too; elsewhere, in Triton's interpreter above all, nothing depends on what a cast makes of a
number. Products must not be fused with the additions that follow: every launch says so. Legend as in ``fp8``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["dequantize", "quantize", "shape_of_program"]

_GROUPS = 16
"""Groups of 128 channels that one program de-quantises."""

_WARPS = 4


def shape_of_program(by_column: bool) -> tuple[int, int, int]:
    """Groups of a program that quantises, the rows that they are of, and its warps.

    ``by_column``: scales of one group of adjacent rows lie side by side, and are written eight at once.
    """
    return 8, 8 if by_column else 1, 2


@triton.jit
def _larger(one, other):
    """The larger number; NaN if one is."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quantize(
    x, data, scales, num_rows, hidden, groups, stored, x_stride, row_stride, column_stride,
    CAST: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """``stored`` groups a row, of which ``groups`` hold channels: packed scales fill up an int32.

    A program takes groups whose scales lie side by side: of one row and the next, or a few groups of ``ROWS`` rows.
    """
    lane = tl.arange(0, GROUPS)
    if ROWS == 1:
        number = tl.program_id(0) * GROUPS + lane
        row, group = (number // stored).to(tl.int64), number % stored
        inside = row < num_rows
    else:
        across = tl.cdiv(stored, GROUPS // ROWS)
        row = (tl.program_id(0) // across).to(tl.int64) * ROWS + lane % ROWS
        group = tl.program_id(0) % across * (GROUPS // ROWS) + lane // ROWS
        inside = (row < num_rows) & (group < stored)
    real = inside & (group < groups)
    channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(x + (row * x_stride)[:, None] + channel, mask=real[:, None] & (channel < hidden), other=0.0)
    value = value.to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    largest = tl.reduce(tl.abs(value), 1, _larger).to(tl.int32, bitcast=True)
    unbounded = tl.max(largest, axis=0) >= 0x7F800000
    if unbounded:
        magnitude = bits & 0x7FFFFFFF
        largest = tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), axis=1)
    largest = tl.maximum(largest, 27 << 23)
    place = row * row_stride
    if PACKED:
        exponent = ((largest + 0x1FFFFF) >> 23) - 8
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        byte = (place + (group // 4) * column_stride) * 4 + group % 4
        tl.store(scales + byte, tl.where(real, exponent, 0).to(tl.uint8), mask=inside)
    else:
        amax = largest.to(tl.float32, bitcast=True)
        limit = tl.full((GROUPS,), 448.0, tl.float32)
        inverse = tl.div_rn(limit, amax)
        tl.store(scales + place + group * column_stride, tl.div_rn(amax, limit), mask=real)
    scaled = value * inverse[:, None]
    sign, target = (bits >> 24) & 0x80, data + (row * groups * 128)[:, None] + channel
    if CAST:
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:  # as the plain form, but only the lowest byte: 56 is -8 * 121 there, and even, so that ties stay
        exponent = tl.maximum(scaled.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
        shifted = (exponent + ((20 << 23) + 56)).to(tl.float32, bitcast=True)
        code = (((tl.abs(scaled) + shifted).to(tl.int32, bitcast=True) + (exponent >> 20)) | sign).to(tl.uint8)
    if unbounded:
        code = tl.where(tl.abs(scaled) < float("inf"), code, (sign | 0x7F).to(tl.uint8))
        tl.store(target, code, mask=real[:, None])
    else:  # a store of its own keeps the selection above out of the common case
        tl.store(target, code, mask=real[:, None])


def quantize(x: Tensor, data: Tensor, scales: Tensor) -> None:
    """Fill uint8 ``data`` ``[T, W]`` and ``scales`` ``[T, width]``, float32 or packed int32, of any strides."""
    num_rows, hidden = x.shape
    groups, packed = data.shape[1] // 128, scales.dtype == torch.int32
    stored = 4 * scales.shape[1] if packed else groups
    size, rows, warps = shape_of_program(scales.stride(0) == 1 and scales.stride(1) != 1)
    if num_rows:
        programs = triton.cdiv(num_rows, rows) * triton.cdiv(stored, size // rows)
        _quantize[(triton.cdiv(num_rows * stored, size) if rows == 1 else programs,)](
            x,
            data,
            _bytes(scales) if packed else scales,
            num_rows,
            hidden,
            groups,
            stored,
            x.stride(0),
            *scales.stride(),
            CAST=_casts(x.device),
            PACKED=packed,
            ROWS=rows,
            GROUPS=size,
            num_warps=warps,
            enable_fp_fusion=False,
        )


@triton.jit
def _dequantize(
    data, scales, out, num_groups, hidden, groups, slab_rows, slab_stride, row_stride, column_stride,
    CAST: tl.constexpr, PACKED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    inside = number < num_groups
    row, group = (number // groups).to(tl.int64), number % groups
    place = (row // slab_rows) * slab_stride + (row % slab_rows) * row_stride
    if PACKED:
        byte = (place + (group // 4) * column_stride) * 4 + group % 4
        exponent = tl.load(scales + byte, mask=inside, other=0).to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        scale = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + place + group * column_stride, mask=inside, other=0.0)
    channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    code = tl.load(data + (row * groups * 128)[:, None] + channel, mask=inside[:, None], other=0).to(tl.int32)
    # Sign, exponent and fraction moved to float32's places: 2**-120 of the number, exactly, subnormals too. 480 is NaN.
    number = ((code << 20) & -0x78100000).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    value = tl.where(tl.abs(number) == 480.0, float("nan"), number) * scale[:, None]
    target = (row * hidden)[:, None] + channel
    wanted = inside[:, None] & (channel < hidden)
    if CAST:
        tl.store(out + target, value.to(out.dtype.element_ty), mask=wanted)
    else:  # bits of bfloat16, to nearest even
        result = value.to(tl.int32, bitcast=True)
        result = tl.where(value == value, result + 0x7FFF + ((result >> 16) & 1), 0x7FC00000)
        tl.store(out + target, (result >> 16).to(tl.int16), mask=wanted)


def dequantize(data: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fill contiguous ``out`` ``[..., T, H]``, bfloat16 or float32, from uint8 ``data`` ``[..., T, W]`` and scales.

    A GPU rounds to bfloat16 as IEEE 754 says; Triton's interpreter cuts, so that there the bits are rounded here.
    """
    cast = out.is_cuda or out.dtype == torch.float32
    *_, slab_rows, hidden = out.shape
    groups, packed = data.shape[-1] // 128, scales.dtype == torch.int32
    num_groups = data.numel() // 128
    if num_groups:
        _dequantize[(triton.cdiv(num_groups, _GROUPS),)](
            data.view(torch.int8),
            _bytes(scales) if packed else scales,
            out if cast else out.view(torch.int16),
            num_groups,
            hidden,
            groups,
            slab_rows,
            scales.stride(0) if scales.dim() == 3 else 0,
            *scales.stride()[-2:],
            CAST=cast,
            PACKED=packed,
            GROUPS=_GROUPS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


@functools.cache
def _casts(device: torch.device) -> bool:
    """The device casts to FP8 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _bytes(scales: Tensor) -> Tensor:
    """The bytes from the first scale on; the kernels bring the strides."""
    return torch.as_strided(scales, (min(scales.numel(), 1),), (1,)).view(torch.uint8)
