"""Rows in FP8 with one scale for every 128 channels of a token.

The method is the fine-grained quantisation of the DeepSeek-V3 technical report (section 3.3.2): each token's channels
are cut into groups of 128, and each group is scaled by its own largest magnitude, so that an outlier spoils 128 values
and not the row. Weights are scaled in blocks of 128 x 128. The format is e4m3 without infinities
(``torch.float8_e4m3fn``, largest value 448).

What every form here computes, bit for bit alike on the CPU, in Triton and on the GPU, in float32:

- ``amax`` of a group is its largest *finite* magnitude, at least ``2**-100``: an all-zero group gets that floor's
  scale and codes that are zero, and no scale is ever zero, subnormal or infinite.
- ``"float32"`` scales are ``amax / 448`` and a value's code is that of ``value * (448 / amax)``. ``"ue8m0"`` scales are
  the least power of two that is not below ``amax / 448``, kept as its biased exponent, four groups to an int32, the
  first in the lowest byte; bytes past the last group are zero.
- Codes are rounded to nearest, ties to even, and saturate at 448; a zero keeps its sign.
- NaN and both infinities become NaN (the sign is kept): an overflow stays visible and spoils no other value.
- De-quantised values are ``code * scale``, rounded once to the wanted dtype; the bits of a NaN are not defined.
  Values within one rounding step of the largest bfloat16 or float32 can come back infinite.

Nothing here waits for the device. Legend: T rows, H hidden, S = ceil(H / 128) groups, W = 128 * S stored width (the
padding codes are zero), L slabs (local experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .buffers.contract import align
from .buffers.layout import kernels_for
from .errors import InputError

__all__ = ["GROUP", "QuantizedRows", "ScaleFormat", "ScaleKind", "dequantize", "quantize", "quantize_blocks"]

GROUP = 128
"""Channels that share a scale."""

E4M3_MAX = 448.0

ScaleKind = Literal["float32", "ue8m0"]

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000
_FLOOR = (127 - 100) << 23  # bits of 2**-100


@dataclass(frozen=True, kw_only=True)
class ScaleFormat:
    """How the scales of rows are kept.

    Attributes:
        kind: ``"float32"``, or ``"ue8m0"``: powers of two, four packed to an int32 (Blackwell's GEMMs).
        column_major: strides ``(1, T rounded up to 4)``, which TMA can load, instead of ``(width, 1)``. In slabs each
            slab is laid out so.

    Raises:
        InputError: unknown kind.
    """

    kind: ScaleKind = "float32"
    column_major: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScaleKind):
            raise InputError("kind of FP8 scales", got=repr(self.kind), expected=" or ".join(get_args(ScaleKind)))

    @property
    def dtype(self) -> torch.dtype:
        """float32, or int32 for packed scales."""
        return torch.float32 if self.kind == "float32" else torch.int32

    def width(self, hidden: int) -> int:
        """Columns of the scales of rows of ``hidden`` channels."""
        groups = -(-hidden // GROUP)
        return groups if self.kind == "float32" else -(-groups // 4)

    def empty(self, *rows: int, hidden: int, device: torch.device) -> Tensor:
        """Uninitialised scales ``[*rows, width]`` with this format's strides; ``rows`` is ``T`` or ``L, T``."""
        width = self.width(hidden)
        if not self.column_major:
            return torch.empty(*rows, width, dtype=self.dtype, device=device)
        *slabs, num_rows = rows
        columns = torch.empty(*slabs, width, align(num_rows, 4), dtype=self.dtype, device=device)
        return columns[..., :num_rows].transpose(-1, -2)

    def arrange(self, scales: Tensor) -> Tensor:
        """A copy of ``[T, width]`` or ``[L, T, width]`` scales of this kind, of any strides, with this format's."""
        if scales.dtype != self.dtype:
            raise InputError("dtype of FP8 scales", got=scales.dtype, expected=f"{self.dtype} for {self.kind}")
        per_column = GROUP if self.kind == "float32" else 4 * GROUP
        hidden = scales.shape[-1] * per_column
        return self.empty(*scales.shape[:-1], hidden=hidden, device=scales.device).copy_(scales)

    def _check(self, scales: Tensor, rows: torch.Size, hidden: int) -> None:
        shape = (*rows, self.width(hidden))
        if scales.dtype != self.dtype:
            raise InputError(
                "dtype of FP8 scales",
                got=scales.dtype,
                expected=f"{self.dtype} for {self.kind}",
                fix="Quantise with the ScaleFormat that the reader asks for; scales are never converted silently.",
            )
        if scales.shape != shape:
            raise InputError("shape of FP8 scales", got=tuple(scales.shape), expected=f"{shape} for hidden {hidden}")
        num_rows, width = shape[-2:]
        wanted: tuple[int, ...] = (1, align(num_rows, 4)) if self.column_major else (width, 1)
        if len(shape) == 3:
            wanted = (width * align(num_rows, 4) if self.column_major else num_rows * width, *wanted)
        # A stride over fewer than two places is never used.
        if scales.numel() and any(
            size > 1 and got != want for size, got, want in zip(shape, scales.stride(), wanted, strict=True)
        ):
            raise InputError(
                f"strides of {'column' if self.column_major else 'row'}-major FP8 scales",
                got=scales.stride(),
                expected=wanted,
                fix="ScaleFormat.arrange copies scales of any strides.",
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedRows:
    """FP8 rows with their scales, from dispatch to grouped GEMM.

    Attributes:
        data: float8_e4m3fn, contiguous ``[T, W]``, or ``[L, T, W]`` for slabs.
        scales: ``[T, format.width(hidden)]``, or ``[L, T, ...]``, of the format's dtype and strides.
        format: how the scales are kept.
        hidden: H, channels without padding.
        anchor: zeros ``[T, H]`` without storage of their own, in the dtype of the tokens before quantisation; what a
            function of the rows takes as their differentiable stand-in, and returns their gradient for. Set where the
            rows come out of a dispatch.

    Raises:
        InputError: a dtype, shape, stride or device is not what the format says.
    """

    data: Tensor
    scales: Tensor
    format: ScaleFormat
    hidden: int
    anchor: Tensor | None = None

    def __post_init__(self) -> None:
        data, width = self.data, align(self.hidden, GROUP)
        if data.dtype != torch.float8_e4m3fn:
            raise InputError("dtype of FP8 rows", got=data.dtype, expected=torch.float8_e4m3fn)
        if data.dim() not in (2, 3) or data.shape[-1] != width:
            raise InputError(
                "shape of FP8 rows",
                got=tuple(data.shape),
                expected=f"[T, {width}] or [L, T, {width}] for hidden {self.hidden}",
            )
        if not data.is_contiguous():
            raise InputError("strides of FP8 rows", got=data.stride(), expected="contiguous rows")
        if self.scales.device != data.device:
            raise InputError("device of FP8 scales", got=self.scales.device, expected=data.device)
        self.format._check(self.scales, data.shape[:-1], self.hidden)
        if self.anchor is not None and self.anchor.shape != (*data.shape[:-1], self.hidden):
            wanted = f"{[*data.shape[:-1], self.hidden]}"
            raise InputError("anchor of FP8 rows", got=list(self.anchor.shape), expected=wanted)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """``(data, scales)``, as buffers and grouped GEMMs take it."""
        return self.data, self.scales

    def require(self, format: ScaleFormat) -> QuantizedRows:
        """These rows, if their scales are kept as ``format`` says.

        Raises:
            InputError: they are not.
        """
        if self.format != format:
            raise InputError(
                "format of FP8 scales",
                got=self.format,
                expected=format,
                fix="Quantise with the ScaleFormat that the reader asks for.",
            )
        return self


def quantize(x: Tensor, format: ScaleFormat | None = None) -> QuantizedRows:
    """Quantise each row in groups of 128 channels; see the module for what is computed.

    Args:
        x: bfloat16, float16 or float32 ``[T, H]``, H at least 1; rows of any stride, channels adjacent. Where H is no
            multiple of 128 the last group is short and the stored row is padded with zeros.
        format: float32 row-major scales unless given.

    Raises:
        InputError: wrong shape, stride or dtype.
    """
    format = format or ScaleFormat()
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InputError("dtype of rows to quantise", got=x.dtype, expected="bfloat16, float16 or float32")
    if x.dim() != 2 or not x.shape[1]:
        raise InputError("shape of rows to quantise", got=tuple(x.shape), expected="[T, H] with H >= 1")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise InputError("strides of rows to quantise", got=x.stride(), expected="adjacent channels")
    data, scales = quantized_pair(x, format)
    return QuantizedRows(data=data, scales=scales, format=format, hidden=x.shape[1])


def quantized_pair(x: Tensor, format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """Data and scales of :func:`quantize`, without its checks."""
    num_rows, hidden = x.shape
    x = x.detach()
    data = torch.empty(num_rows, align(hidden, GROUP), dtype=torch.float8_e4m3fn, device=x.device)
    scales = format.empty(num_rows, hidden=hidden, device=x.device)
    if kernels := _kernels(x):
        kernels.quantize(x, data.view(torch.uint8), scales)
    else:
        codes, amax = _codes(_grouped(x), format.kind)
        data.view(torch.uint8).copy_(codes.view(data.shape))
        scales.copy_(_stored_scales(amax, format.kind))
    return data, scales


def dequantize(rows: QuantizedRows, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``code * scale`` of each value, rounded once: ``[T, H]`` (or ``[L, T, H]``), bfloat16 or float32.

    Raises:
        InputError: another dtype.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise InputError("dtype to de-quantise to", got=dtype, expected="bfloat16 or float32")
    shape = (*rows.data.shape[:-1], rows.hidden)
    if kernels := _kernels(rows.data):
        out = torch.empty(shape, dtype=dtype, device=rows.data.device)
        kernels.dequantize(rows.data.view(torch.uint8), rows.scales, out)
        return out
    scales = _scale_values(rows)
    wide = rows.data.float().view(*scales.shape, GROUP) * scales[..., None]
    return wide.view(rows.data.shape)[..., : rows.hidden].to(dtype).contiguous()


def quantize_blocks(weight: Tensor, kind: ScaleKind = "float32") -> tuple[Tensor, Tensor]:
    """Quantise weights in blocks of 128 x 128, the second operand of FP8 grouped GEMMs. Plain torch on any device.

    Args:
        weight: bfloat16, float16 or float32 ``[..., N, K]``.
        kind: with ``"ue8m0"`` the scales are powers of two, still kept as float32.

    Returns:
        float8_e4m3fn ``[..., N, ceil(K / 128) * 128]``, padding zero, and float32
        ``[..., ceil(N / 128), ceil(K / 128)]``.

    Raises:
        InputError: wrong shape or dtype.
    """
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32) or weight.dim() < 2 or not weight.numel():
        raise InputError(
            "weights to quantise",
            got=f"{weight.dtype} {tuple(weight.shape)}",
            expected="[..., N, K] in bfloat16, float16 or float32, not empty",
        )
    ScaleFormat(kind=kind)  # refuses an unknown kind
    *lead, height, width = weight.shape
    rows, columns = align(height, GROUP), align(width, GROUP)
    padded = torch.nn.functional.pad(weight.detach().float(), (0, columns - width, 0, rows - height))
    blocks = padded.view(*lead, rows // GROUP, GROUP, columns // GROUP, GROUP).transpose(-2, -3)
    codes, amax = _codes(blocks.flatten(-2), kind)
    data = codes.unflatten(-1, (GROUP, GROUP)).transpose(-2, -3).reshape(*lead, rows, columns)[..., :height, :]
    scales = _stored_exponents(amax).bitwise_left_shift(23).view(torch.float32) if kind == "ue8m0" else _over_448(amax)
    return data.contiguous().view(torch.float8_e4m3fn), scales


def _kernels(tensor: Tensor) -> Any:
    """The module of Triton kernels if they can run on ``tensor``, else None."""
    if kernels_for(tensor) is None:
        return None
    from .buffers import kernels_fp8

    return kernels_fp8


# The plain form. Quotients are of tensors on one device: PyTorch multiplies by a reciprocal where one operand is a
# Python number.


def _grouped(x: Tensor) -> Tensor:
    """float32 ``[T, S, 128]``, the last group padded with zeros."""
    width = align(x.shape[1], GROUP)
    return torch.nn.functional.pad(x.float(), (0, width - x.shape[1])).reshape(len(x), width // GROUP, GROUP)


def _codes(groups: Tensor, kind: ScaleKind) -> tuple[Tensor, Tensor]:
    """uint8 codes of float32 ``[..., G]`` groups, and the float32 ``[...]`` amax of each."""
    bits = groups.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    finite = magnitude < _INFINITY
    # Bits of magnitudes are ordered as the magnitudes are.
    amax = magnitude.masked_fill(~finite, 0).amax(-1).clamp_min_(_FLOOR).view(torch.float32)
    if kind == "float32":
        inverse = torch.full_like(amax, E4M3_MAX) / amax
    else:
        inverse = ((254 - _stored_exponents(amax)) << 23).view(torch.float32)
    scaled = magnitude.view(torch.float32) * inverse[..., None]
    codes = _round(scaled).masked_fill_(~finite, 0x7F)
    return (codes | ((bits >> 24) & 0x80)).to(torch.uint8), amax


def _round(magnitude: Tensor) -> Tensor:
    """int32 codes of float32 magnitudes below 464, which is what rounds to 448: no group exceeds that.

    Adding ``2**20`` times the power of two at or below a magnitude (at least the least normal one, ``2**-6``) leaves
    its last three fraction bits at the end of the sum, rounded to nearest even by the addition itself; a carry goes
    into the exponent by itself.
    """
    exponent = (magnitude.view(torch.int32) & _INFINITY).clamp_min_((127 - 6) << 23)
    shifted = exponent + (20 << 23)
    eighths = (magnitude + shifted.view(torch.float32)).view(torch.int32) - shifted
    return eighths + ((exponent >> 20) - ((127 - 6) << 3))


def _over_448(amax: Tensor) -> Tensor:
    return amax / torch.full_like(amax, E4M3_MAX)


def _stored_exponents(amax: Tensor) -> Tensor:
    """Biased exponents, int32, of the least powers of two that are not below ``amax / 448``; 448 is 1.75 * 2**8."""
    return ((amax.view(torch.int32) + ((1 << 23) - 1 - (3 << 21))) >> 23) - 8


def _stored_scales(amax: Tensor, kind: ScaleKind) -> Tensor:
    """Scales ``[T, width]`` as they are kept, row-major."""
    if kind == "float32":
        return _over_448(amax)
    exponents = _stored_exponents(amax)
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4)).to(torch.uint8)
    return padded.view(torch.int32)


def _scale_values(rows: QuantizedRows) -> Tensor:
    """float32 ``[..., T, S]``: the scales as numbers. An exponent of 255 is NaN."""
    if rows.format.kind == "float32":
        return rows.scales
    places = torch.arange(0, 32, 8, dtype=torch.int32, device=rows.scales.device)
    exponents = ((rows.scales[..., None] >> places) & 0xFF).flatten(-2)[..., : rows.data.shape[-1] // GROUP]
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23).masked_fill_(exponents == 255, 0x7FC00000)
    return bits.view(torch.float32)
