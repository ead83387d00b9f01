"""FP8 quantisation against an oracle that searches a table of all codes.

Both forms: the plain one on the CPU, and Triton in its interpreter, or on the device where there is a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import os
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from megatron_moe_v2 import fp8  # noqa: E402
from megatron_moe_v2.errors import InputError  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
FORMATS = [fp8.ScaleFormat(kind=kind, column_major=order) for kind in ("float32", "ue8m0") for order in (False, True)]
FORMAT_IDS = ["fp32-rows", "fp32-tma", "ue8m0-rows", "ue8m0-tma"]
FORMS = ["plain", "triton"]

every_form = pytest.mark.parametrize("form", FORMS)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=FORMAT_IDS)
every_kind = pytest.mark.parametrize("kind", ["float32", "ue8m0"])


def quantize(form: str, x: torch.Tensor, fmt: fp8.ScaleFormat) -> fp8.QuantizedRows:
    if form == "plain":
        return fp8.quantize(x.cpu(), fmt)
    kernels = pytest.importorskip("megatron_moe_v2.buffers.kernels_fp8")
    x = x.to(DEVICE)
    width = -(-x.shape[1] // 128) * 128
    data = torch.full((len(x), width), 0x55, dtype=torch.uint8, device=DEVICE)
    scales = fmt.empty(len(x), hidden=x.shape[1], device=x.device).fill_(77)
    kernels.quantize(x, data, scales)
    return fp8.QuantizedRows(
        data=data.cpu().view(torch.float8_e4m3fn), scales=fmt.arrange(scales.cpu()), format=fmt, hidden=x.shape[1]
    )


def dequantize(form: str, rows: fp8.QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
    if form == "plain":
        return fp8.dequantize(rows, dtype)
    kernels = pytest.importorskip("megatron_moe_v2.buffers.kernels_fp8")
    out = torch.full((*rows.data.shape[:-1], rows.hidden), 7.0, dtype=dtype, device=DEVICE)
    scales = rows.scales
    if ON_GPU:
        scales = rows.format.arrange(scales.to(DEVICE))
    kernels.dequantize(rows.data.view(torch.uint8).to(DEVICE), scales, out)
    return out.cpu()


# The oracle: numbers of codes from the definition of the format, nearest by search, scales by exact fractions.


def value_of(code: int) -> float:
    exponent, fraction = (code >> 3) & 15, code & 7
    magnitude = math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9)
    return math.nan if code & 127 == 127 else math.copysign(magnitude, -1 if code & 128 else 1)


TABLE = np.array([value_of(code) for code in range(256)])


def nearest(values: np.ndarray) -> np.ndarray:
    """Codes of float64 magnitudes: the nearest of 127, of two the even one, the last for all beyond it."""
    distance = np.abs(values[..., None] - TABLE[:127])
    best = distance.argmin(-1)
    above = np.minimum(best + 1, 126)
    tie = (np.take_along_axis(distance, above[..., None], -1)[..., 0] == distance.min(-1)) & (best % 2 == 1)
    return np.where(tie, above, best).astype(np.uint8)


def power_at_least(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - 2
    while Fraction(2) ** exponent < value:
        exponent += 1
    return exponent


def oracle(x: torch.Tensor, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """uint8 codes ``[T, W]``, and scales ``[T, S]``: float32 numbers, or biased exponents."""
    wide = x.float().cpu().numpy()
    groups = -(-wide.shape[1] // 128)
    wide = np.pad(wide, ((0, 0), (0, groups * 128 - wide.shape[1]))).reshape(len(wide), groups, 128)
    finite = np.isfinite(wide)
    magnitude = np.where(finite, np.abs(wide), np.float32(0))
    amax = np.maximum(magnitude.max(-1), np.float32(2.0**-100))
    if kind == "float32":
        scales = amax / np.float32(448)
        scaled = magnitude * (np.float32(448) / amax)[..., None]
    else:
        powers = np.vectorize(lambda one: power_at_least(Fraction(float(one)) / 448), otypes=[int])(amax)
        scales = (powers + 127).astype(np.uint8)
        scaled = magnitude.astype(np.float64) * 2.0 ** -powers[..., None].astype(np.float64)
    codes = np.where(finite, nearest(scaled.astype(np.float64)), 127) | np.where(np.signbit(wide), 128, 0)
    return codes.astype(np.uint8).reshape(len(wide), groups * 128), scales


def check(rows: fp8.QuantizedRows, x: torch.Tensor) -> None:
    codes, scales = oracle(x, rows.format.kind)
    np.testing.assert_array_equal(rows.data.view(torch.uint8).numpy(), codes)
    kept = rows.scales.numpy()
    if rows.format.kind == "ue8m0":
        padded = np.zeros((len(scales), 4 * kept.shape[1]), np.uint8)
        padded[:, : scales.shape[1]] = scales
        unpacked = [(kept >> (8 * place)) & 255 for place in range(4)]
        np.testing.assert_array_equal(np.stack(unpacked, -1).reshape(padded.shape), padded)
    else:
        np.testing.assert_array_equal(kept, scales)


def spread(rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    """Numbers of many magnitudes, so that a group meets subnormal codes and zeros too."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.randn(rows, hidden, generator=draw) * 6
    return torch.randn(rows, hidden, generator=draw) * size.exp2() * torch.randn(rows, 1, generator=draw).mul(9).exp2()


@every_form
@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 128), (1, 1), (3, 200), (6, 128), (5, 640)])
def test_equals_the_oracle(form: str, fmt: fp8.ScaleFormat, dtype: torch.dtype, rows: int, hidden: int) -> None:
    x = spread(rows, hidden).to(dtype)
    check(quantize(form, x, fmt), x)


@every_form
@every_kind
def test_rounds_to_nearest_even(form: str, kind: Any) -> None:
    """Every code, every middle between two, and the float32 numbers beside both, in groups whose scale is 1."""
    middles = (TABLE[:126] + TABLE[1:127]) / 2
    points = np.concatenate([TABLE[:127], middles]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    points = np.concatenate([points, -points])
    points = np.clip(points, -448, 448)
    points = np.pad(points, (0, -len(points) % 127)).reshape(-1, 127)
    x = torch.from_numpy(np.concatenate([np.full((len(points), 1), 448, np.float32), points], 1))
    rows = quantize(form, x, fp8.ScaleFormat(kind=kind))
    check(rows, x)
    assert rows.scales.flatten().tolist() == [1.0 if kind == "float32" else 127] * len(points)
    assert len(rows.data.view(torch.uint8).unique()) == 254


@every_form
def test_largest_value_saturates(form: str) -> None:
    """``amax * (448 / amax)`` exceeds 448 by rounding for some of these, and never becomes NaN."""
    amax = torch.linspace(1, 2, 4001)[:4000].reshape(-1, 1)
    assert (amax * (torch.full_like(amax, 448) / amax) > 448).any()
    codes = quantize(form, amax.expand(-1, 2).contiguous(), fp8.ScaleFormat()).data.view(torch.uint8)[:, :2]
    assert (codes == 0x7E).all()


@every_form
def test_powers_of_two_at_their_bounds(form: str) -> None:
    bounds = np.float32(448) * np.float32(2) ** np.arange(-100, 119, 3, dtype=np.float32)
    around = np.stack([np.nextafter(bounds, np.float32(0)), bounds, np.nextafter(bounds, np.float32(np.inf))], 1)
    x = torch.from_numpy(around.reshape(-1, 1))
    check(quantize(form, x, fp8.ScaleFormat(kind="ue8m0")), x)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in the interpreter
@every_form
@every_format
def test_zeros_infinities_and_nan(form: str, fmt: fp8.ScaleFormat) -> None:
    x = torch.zeros(7, 384)
    x[0] = -0.0
    x[1, :5] = torch.tensor([math.nan, math.inf, -math.inf, 3.0, -1.5])
    x[2, 128:256] = math.inf
    x[3] = math.nan
    x[4, 0], x[4, 1] = 2.0**-120, -(2.0**-149)
    x[5, :2] = torch.tensor([3.0e38, -1.0])
    x[6, 300] = torch.tensor([-1], dtype=torch.int32).view(torch.float32)  # a negative NaN with every bit set
    rows = quantize(form, x, fmt)
    check(rows, x)
    codes = rows.data.view(torch.uint8)
    assert (codes[0] == 0x80).all()
    assert codes[1, :3].tolist() == [0x7F, 0x7F, 0xFF]
    assert codes[2, 127:257].tolist() == [0, *[0x7F] * 128, 0]
    assert codes[6, 300] == 0xFF
    back = dequantize(form, rows, torch.float32)
    assert torch.isfinite(back).equal(torch.isfinite(x))
    assert (back[0] == 0).all()
    assert back[1, 3:5].tolist() == pytest.approx([3.0, -1.5], rel=2**-4)
    assert (back[1, 5:] == 0).all()


@every_form
@every_format
def test_rows_of_any_stride(form: str, fmt: fp8.ScaleFormat) -> None:
    wide = spread(9, 400).bfloat16()
    x = wide[1::2, 7:263]
    check(quantize(form, x, fmt), x)


@every_form
@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [130, 256, 700])
def test_dequantised_values(form: str, fmt: fp8.ScaleFormat, dtype: torch.dtype, hidden: int) -> None:
    """Every code in every row, also of slabs; products are exact in float64 and rounded once."""
    slabs, rows, groups = 3, 5, -(-hidden // 128)
    codes = (torch.arange(slabs * rows * groups * 128) * 37 % 256).to(torch.uint8).view(slabs, rows, -1)
    draw = torch.Generator().manual_seed(1)
    if fmt.kind == "float32":
        scales = torch.randn(slabs, rows, groups, generator=draw).mul(20).exp2()
        factors = scales.double()
    else:
        exponents = torch.randint(30, 200, (slabs, rows, groups), generator=draw)
        exponents[0, 0, 0], exponents[1, 2, 1] = 0, 255
        factors = (exponents - 127).double().exp2().masked_fill(exponents == 255, math.nan)
        packed = torch.nn.functional.pad(exponents, (0, -groups % 4)).unflatten(-1, (-1, 4))
        scales = (packed * torch.tensor([1, 2**8, 2**16, 2**24])).sum(-1).to(torch.int64)
        scales = torch.where(scales >= 2**31, scales - 2**32, scales).int()
    exact = torch.from_numpy(TABLE)[codes.long()].unflatten(-1, (groups, 128)) * factors[..., None]
    exact = exact.flatten(-2)[..., :hidden]
    wanted = exact.float() if dtype == torch.float32 else _to_bfloat16(exact)
    rows_of = fp8.QuantizedRows(
        data=codes.view(torch.float8_e4m3fn), scales=fmt.arrange(scales), format=fmt, hidden=hidden
    )
    got = dequantize(form, rows_of, dtype)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    one = fp8.QuantizedRows(
        data=rows_of.data[1], scales=fmt.arrange(rows_of.scales[1]), format=fmt, hidden=hidden
    )  # a matrix, with strides of its own
    torch.testing.assert_close(dequantize(form, one, dtype), wanted[1], rtol=0, atol=0, equal_nan=True)


def _to_bfloat16(exact: torch.Tensor) -> torch.Tensor:
    """Nearest of the two bfloat16 numbers around float64 ``exact``, of two the even one, by way of float32."""
    single = exact.numpy().astype(np.float32)
    bits = single.view(np.uint32)
    below = (bits & 0xFFFF0000).view(np.float32)
    above = ((bits & 0xFFFF0000) + 0x10000).view(np.float32)
    down, up = np.abs(single - below), np.abs(above.astype(np.float64) - single)
    even = (bits >> 16) % 2 == 0
    chosen = np.where((down < up) | ((down == up) & even), below, above)
    chosen = np.where(np.isnan(single), np.float32(np.nan), chosen)
    return torch.from_numpy(chosen).bfloat16()  # exact: the lower half is zero


@every_form
@every_kind
def test_error_is_at_most_half_a_step(form: str, kind: Any) -> None:
    x = torch.randn(16, 512).bfloat16()
    rows = quantize(form, x, fp8.ScaleFormat(kind=kind))
    back = dequantize(form, rows, torch.float32)
    amax = x.float().view(16, 4, 128).abs().amax(-1, keepdim=True).expand(-1, -1, 128).reshape(16, 512)
    least = amax * (2.0**-9 if kind == "ue8m0" else 2.0**-10) / 448
    assert ((back - x.float()).abs() <= x.float().abs() * 2.0**-4 * 1.001 + least * 1.001).all()


@every_format
def test_strides_of_scales(fmt: fp8.ScaleFormat) -> None:
    rows = fp8.quantize(torch.randn(6, 1100), fmt)
    width = 9 if fmt.kind == "float32" else 3
    assert rows.scales.shape == (6, width)
    assert rows.scales.dtype == fmt.dtype
    assert rows.scales.stride() == ((1, 8) if fmt.column_major else (width, 1))
    assert rows.data.shape == (6, 1152)
    assert (rows.data.view(torch.uint8)[:, 1100:] == 0).all()
    slabs = fmt.empty(2, 6, hidden=1100, device=rows.data.device)
    assert slabs.stride() == ((width * 8, 1, 8) if fmt.column_major else (6 * width, width, 1))


@every_kind
@pytest.mark.parametrize("shape", [(130, 200), (2, 128, 256), (3, 5, 300)], ids=str)
def test_weight_blocks(kind: Any, shape: tuple[int, ...]) -> None:
    weight = spread(math.prod(shape[:-1]), shape[-1]).view(shape).bfloat16()
    data, scales = fp8.quantize_blocks(weight, kind)
    rows, columns = shape[-2], -(-shape[-1] // 128) * 128
    assert data.shape == (*shape[:-1], columns)
    assert data.is_contiguous()
    assert scales.shape == (*shape[:-2], -(-rows // 128), columns // 128)
    wide = torch.nn.functional.pad(weight.float(), (0, columns - shape[-1])).view(-1, rows, columns)
    codes, factors = data.view(torch.uint8).view(-1, rows, columns), scales.view(-1, *scales.shape[-2:])
    for number in range(len(wide)):
        for i in range(scales.shape[-2]):
            for j in range(scales.shape[-1]):
                place = np.s_[number, 128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                amax = wide[place].abs().max().numpy()
                if kind == "float32":
                    scale, inverse = amax / np.float32(448), np.float32(448) / amax
                else:
                    scale = np.float32(2.0) ** power_at_least(Fraction(float(amax)) / 448)
                    inverse = 1 / scale
                assert factors[number, i, j] == scale
                block = wide[place].numpy()
                wanted = nearest((np.abs(block) * inverse).astype(np.float64)) | np.where(np.signbit(block), 128, 0)
                np.testing.assert_array_equal(codes[place].numpy(), wanted)


GOOD = fp8.quantize(torch.randn(6, 600))
PACKED = fp8.ScaleFormat(kind="ue8m0")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scales": GOOD.scales[:, :4]}, r"shape of FP8 scales: got \(6, 4\), expected \(6, 5\) for hidden 600"),
        ({"scales": GOOD.scales[:5]}, r"got \(5, 5\), expected \(6, 5\)"),
        ({"format": PACKED}, "dtype of FP8 scales: got torch.float32, expected torch.int32 for ue8m0"),
        ({"scales": GOOD.scales.int()}, "got torch.int32, expected torch.float32 for float32"),
        ({"format": fp8.ScaleFormat(column_major=True)}, r"strides of column-major.*got \(5, 1\), expected \(1, 8\)"),
        ({"scales": GOOD.scales.t().contiguous().t()}, r"strides of row-major .*expected \(5, 1\)"),
        ({"data": GOOD.data.view(torch.uint8)}, "dtype of FP8 rows: got torch.uint8"),
        ({"data": GOOD.data.view(torch.uint8)[:, :600].view(torch.float8_e4m3fn)}, "shape of FP8 rows"),
        ({"data": GOOD.data.expand(1, 1, 6, 640)}, "shape of FP8 rows"),
        ({"data": GOOD.data.view(torch.uint8).t().contiguous().t().view(torch.uint8)}, "dtype of FP8 rows"),
        ({"data": torch.empty(640, 6, dtype=torch.float8_e4m3fn).t()}, "strides of FP8 rows"),
        ({"hidden": 513}, None),
        ({"hidden": 512}, "shape of FP8 rows"),
        ({"scales": GOOD.scales.to("meta")}, "device of FP8 scales"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value) if value else "accepted",
)
def test_what_the_pair_refuses(change: dict[str, Any], text: str | None) -> None:
    if text is None:
        assert dataclasses.replace(GOOD, **change).hidden == change["hidden"]
        return
    with pytest.raises(InputError, match=text):
        dataclasses.replace(GOOD, **change)


def test_other_bad_input() -> None:
    with pytest.raises(InputError, match="format of FP8 scales"):
        GOOD.require(PACKED)
    assert GOOD.require(fp8.ScaleFormat()) is GOOD
    assert GOOD.pair == (GOOD.data, GOOD.scales)
    with pytest.raises(InputError, match="kind of FP8 scales: got 'fp16'"):
        fp8.ScaleFormat(kind="fp16")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="dtype of rows"):
        fp8.quantize(torch.zeros(2, 128, dtype=torch.float64))
    with pytest.raises(InputError, match="shape of rows"):
        fp8.quantize(torch.zeros(2, 0))
    with pytest.raises(InputError, match="adjacent channels"):
        fp8.quantize(torch.zeros(128, 2).t())
    with pytest.raises(InputError, match="dtype to de-quantise to"):
        fp8.dequantize(GOOD, torch.float16)
    with pytest.raises(InputError, match="dtype of FP8 scales"):
        PACKED.arrange(GOOD.scales)
    with pytest.raises(InputError, match="weights to quantise"):
        fp8.quantize_blocks(torch.zeros(3))
