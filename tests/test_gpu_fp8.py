"""FP8 kernels and masked slabs on a GPU: bits equal to the plain forms, nothing waits for the host, bandwidth."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_moe_v2 import fp8, slabs
from megatron_moe_v2.errors import CapacityError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FORMATS = [fp8.ScaleFormat(kind=kind, column_major=order) for kind in ("float32", "ue8m0") for order in (False, True)]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=["fp32-rows", "fp32-tma", "ue8m0-rows", "ue8m0-tma"])


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def every_bfloat16(seed: int) -> torch.Tensor:
    """All 65536 bit patterns, mixed, 128 to a group, so that groups hold NaN; and groups without any."""
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randperm(65536, generator=draw).to(torch.int32)
    finite = bits[(bits & 0x7F80) != 0x7F80][: 507 * 128]
    return torch.cat([bits, finite]).to(torch.int16).view(torch.bfloat16).view(-1, 128)


def numbers_to_448(seed: int, rows: int = 4096) -> torch.Tensor:
    """float32 of all magnitudes that meet a code, in groups of scale 1: the codes are plain roundings."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1024, generator=draw).mul(20).sub(11).exp2_() * (
        1 - 2 * torch.rand(rows, 1024, generator=draw)
    )
    middles = (x.view(torch.int32) & ~0xFFFFF | 0x80000).view(torch.float32)  # exactly between two normal codes
    x[: rows // 4] = middles[: rows // 4]
    x = x.clamp_(-448, 448)
    x[:, ::128] = 448
    return x


def assert_same(got: fp8.QuantizedRows, wanted: fp8.QuantizedRows) -> None:
    assert torch.equal(got.data.view(torch.uint8).cpu(), wanted.data.view(torch.uint8).cpu())
    assert torch.equal(got.scales.cpu().contiguous().view(torch.int32), wanted.scales.contiguous().view(torch.int32))
    assert got.scales.stride() == wanted.scales.stride()


@every_format
@pytest.mark.parametrize(
    "make",
    [
        lambda: every_bfloat16(0).view(-1, 128),
        lambda: every_bfloat16(1)[:1016].reshape(-1, 1016)[:, :1000],
        lambda: numbers_to_448(0),
        lambda: torch.randn(1000, 7168).bfloat16(),
        lambda: torch.randn(77, 7168).mul(9).exp2(),
        lambda: torch.randn(513, 200).half(),
    ],
    ids=["every-bf16", "every-bf16-short-group", "roundings", "bf16", "fp32", "fp16-short-group"],
)
def test_bits_equal_the_plain_form(
    fmt: fp8.ScaleFormat, make: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make()
    wanted, by_kernel = fp8.quantize(x, fmt), fp8.quantize(x.cuda(), fmt)
    assert_same(by_kernel, wanted)
    values = {dtype: fp8.dequantize(by_kernel, dtype).cpu() for dtype in (torch.bfloat16, torch.float32)}
    for dtype, value in values.items():
        torch.testing.assert_close(value, fp8.dequantize(wanted, dtype), rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(fp8, "_kernels", lambda tensor: None)  # the plain form on the device
    plain = fp8.quantize(x.cuda(), fmt)
    assert_same(plain, wanted)
    for dtype, value in values.items():
        torch.testing.assert_close(fp8.dequantize(plain, dtype).cpu(), value, rtol=0, atol=0, equal_nan=True)


def segments_of(counts: list[int], alignment: int, num_rows: int, device: str = "cuda") -> slabs.ExpertSegments:
    psum, start = [], 0
    for count in counts:
        psum.append(start + count)
        start += math.ceil(count / alignment) * alignment
    return slabs.ExpertSegments(
        psum=torch.tensor(psum, dtype=torch.int32, device=device),
        counts=torch.tensor(counts, dtype=torch.int32, device=device),
        num_rows=num_rows,
        alignment=alignment,
    )


@pytest.mark.parametrize("alignment", [1, 128])
def test_slabs_equal_the_plain_form(alignment: int) -> None:
    """Also products of bfloat16 rows, which Triton's interpreter cannot round."""
    counts = [100, 0, 300, 257, 1, 64]
    there, here = (segments_of(counts, alignment, 2000, device) for device in ("cuda", "cpu"))
    rows, weights = torch.randn(2000, 1056).bfloat16(), torch.rand(2000)
    flags = slabs.OverflowFlag("cuda"), slabs.OverflowFlag("cpu")
    results = []
    for segments, flag, device in ((there, flags[0], "cuda"), (here, flags[1], "cpu")):
        leaves = rows.to(device).requires_grad_(), weights.to(device).requires_grad_()
        slab, masked_m = slabs.repack(leaves[0], segments, max_rows=256, overflow=flag)
        index = slabs.row_experts(segments)
        back = slabs.unrepack(slab, segments, leaves[1])
        real = torch.where(index[:, None] >= 0, back, 0)
        grads = torch.autograd.grad(real, leaves, rows.flip(0).to(device))
        kept = torch.where(index[:, None] >= 0, grads[0], 0)
        results.append([one.detach().cpu() for one in (slab, masked_m, index, real, kept, flag.value, grads[1])])
    for got, wanted in zip(results[0][:-1], results[1][:-1], strict=True):
        assert torch.equal(got, wanted)
    torch.testing.assert_close(results[0][-1], results[1][-1], rtol=1e-5, atol=1e-4)


@every_format
def test_captured_and_replayed(fmt: fp8.ScaleFormat) -> None:
    """Quantise, both slabs, experts, weights, backward, row experts: one graph, replayed with other counts."""
    alignment, num_rows, hidden, max_rows = 16, 512, 384, 64
    routings = [[40, 0, 64, 3], [64, 64, 64, 64], [0, 0, 0, 0], [10, 200, 5, 64]]
    live = segments_of(routings[0], alignment, num_rows)
    flag = slabs.OverflowFlag("cuda")
    x = torch.zeros(num_rows, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weights = torch.rand(num_rows, device="cuda", requires_grad=True)
    upstream = torch.randn(num_rows, hidden, device="cuda").bfloat16()

    def step() -> list[torch.Tensor]:
        pair, _ = slabs.repack(fp8.quantize(x, fmt), live, max_rows=max_rows, overflow=flag)
        slab, masked_m = slabs.repack(x, live, max_rows=max_rows, overflow=flag)
        back = slabs.unrepack(slab * 2, live, weights)
        grads = torch.autograd.grad(back, (x, weights), upstream)
        index = slabs.row_experts(live)
        real = (index >= 0)[:, None]
        return [
            fp8.dequantize(pair), slab.detach(), masked_m, index, torch.where(real, back.detach(), 0),
            torch.where(real, grads[0], 0), grads[1],
        ]  # fmt: skip

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for counts in routings:
        new = segments_of(counts, alignment, num_rows)
        live.psum.copy_(new.psum)
        live.counts.copy_(new.counts)
        with torch.no_grad():
            x.normal_()
        graph.replay()
        for got, wanted in zip(captured, step(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    with pytest.raises(CapacityError, match="200 rows"):
        flag.check()


@every_format
@pytest.mark.usefixtures("_no_waiting")
def test_nothing_waits_for_the_device(fmt: fp8.ScaleFormat) -> None:
    torch.cuda.set_sync_debug_mode("default")
    segments, flag = segments_of([30, 0, 90, 7], 16, 300), slabs.OverflowFlag("cuda")
    x = torch.randn(300, 256, device="cuda").bfloat16().requires_grad_()
    weights = torch.rand(300, device="cuda", requires_grad=True)
    for mode in ("default", "error"):  # the first round compiles
        torch.cuda.set_sync_debug_mode(mode)
        pair, _ = slabs.repack(fp8.quantize(x, fmt), segments, max_rows=64, overflow=flag)
        slabs.unrepack(pair, segments, column_major=not fmt.column_major)
        fp8.dequantize(pair)
        slab, _ = slabs.repack(x, segments, max_rows=64, overflow=flag)
        back = slabs.unrepack(slab, segments, weights)
        torch.autograd.grad(back, (x, weights), torch.ones_like(back))
        slabs.row_experts(segments)


@pytest.mark.slow
def test_bandwidth() -> None:
    """Quantising 8192 x 7168, and 64 slabs of 512 rows there and back, reach 70 % of what a plain copy moves.

    By the time of the kernels alone: a quantisation is launched in more time than it takes.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
    from gpu_fp8_slabs import kernel_ms

    x = torch.randn(8192, 7168, device="cuda").bfloat16()
    segments, flag = segments_of([512] * 64, 128, 64 * 512), slabs.OverflowFlag("cuda")
    rows = torch.randn(64 * 512, 7168, device="cuda").bfloat16()
    slab, _ = slabs.repack(rows, segments, max_rows=512, overflow=flag)
    target, weights = torch.empty_like(rows), torch.rand(len(rows), device="cuda")

    def gbs(moved: float, function: Callable[[], object]) -> float:
        return moved / kernel_ms(function) / 1e6

    both = 2 * rows.numel() * 2
    copy = gbs(both, lambda: target.copy_(rows))
    reached = {f"quantize {fmt}": gbs(x.numel() * 3, lambda fmt=fmt: fp8.quantize(x, fmt)) for fmt in FORMATS}
    reached["repack"] = gbs(both, lambda: slabs.repack(rows, segments, max_rows=512, overflow=flag))
    reached["unrepack"] = gbs(both, lambda: slabs.unrepack(slab, segments))
    reached["unrepack, weighted"] = gbs(both, lambda: slabs.unrepack(slab, segments, weights))
    for name, value in reached.items():
        print(f"{name}: {value:.0f} GB/s, {value / copy:.2f} of a copy ({copy:.0f} GB/s)")
    assert min(reached.values()) > 0.7 * copy
