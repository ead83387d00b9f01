"""Masked slabs and row experts against plain Python loops.

Both forms: the plain one on the CPU, and Triton in its interpreter, or on the device where there is a GPU. Fresh memory
is NaN, and so is every row that must not be read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from launch import RankPool

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from megatron_moe_v2 import fp8, slabs  # noqa: E402
from megatron_moe_v2.errors import CapacityError, InputError  # noqa: E402
from megatron_moe_v2.slabs import ExpertSegments, OverflowFlag, repack, row_experts, unrepack  # noqa: E402

COUNTS = {
    "ragged": [5, 0, 17, 8, 1],
    "empty": [0, 0, 0],
    "full": [20, 20],
    "overflow": [3, 30, 0, 21, 20],
    "one": [9],
}
MAX_ROWS = 20

every_routing = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
every_alignment = pytest.mark.parametrize("alignment", [1, 128])
FORMATS = [fp8.ScaleFormat(kind=kind, column_major=order) for kind in ("float32", "ue8m0") for order in (False, True)]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=["fp32-rows", "fp32-tma", "ue8m0-rows", "ue8m0-tma"])


@pytest.fixture(params=["plain", "triton"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the form under test runs; the public functions take it."""
    if request.param == "plain":
        return "cpu"
    kernels = pytest.importorskip("megatron_moe_v2.buffers.kernels_slabs")
    monkeypatch.setattr(slabs, "_kernels", lambda tensor: kernels)
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def place(counts: list[int], alignment: int) -> list[tuple[int, int, int]]:
    """``(start, count, aligned end)`` of each expert."""
    placed, start = [], 0
    for count in counts:
        end = start + math.ceil(count / alignment) * alignment
        placed.append((start, count, end))
        start = end
    return placed


def segments_of(counts: list[int], alignment: int, device: str, tail: int = 7) -> ExpertSegments:
    placed = place(counts, alignment)
    return ExpertSegments(
        psum=torch.tensor([start + count for start, count, _ in placed], dtype=torch.int32, device=device),
        counts=torch.tensor(counts, dtype=torch.int32, device=device),
        num_rows=placed[-1][2] + tail,
        alignment=alignment,
    )


def rows_of(counts: list[int], alignment: int, hidden: int, dtype: torch.dtype, tail: int = 7) -> torch.Tensor:
    """Random rows, NaN where no expert has one."""
    placed = place(counts, alignment)
    rows = torch.full((placed[-1][2] + tail, hidden), math.nan, dtype=dtype)
    for start, count, _ in placed:
        rows[start : start + count] = torch.randn(count, hidden).to(dtype)
    return rows


def loop_repack(rows: torch.Tensor, counts: list[int], alignment: int, max_rows: int) -> torch.Tensor:
    slab = torch.zeros(len(counts), max_rows, rows.shape[1], dtype=rows.dtype)
    for expert, (start, count, _) in enumerate(place(counts, alignment)):
        for i in range(min(count, max_rows)):
            slab[expert, i] = rows[start + i]
    return slab


def loop_unrepack(
    slab: torch.Tensor, counts: list[int], alignment: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows up to the last expert's end."""
    placed = place(counts, alignment)
    rows = torch.zeros(placed[-1][2], slab.shape[2], dtype=slab.dtype)
    for expert, (start, count, _) in enumerate(placed):
        for i in range(min(count, slab.shape[1])):
            row = slab[expert, i]
            rows[start + i] = row if weights is None else (row * weights[start + i]).to(slab.dtype)
    return rows


def poisoned(slab: torch.Tensor, counts: list[int]) -> torch.Tensor:
    slab = slab.clone()
    for expert, count in enumerate(counts):
        slab[expert, count:] = math.nan
    return slab


def assert_near(got: torch.Tensor, wanted: torch.Tensor, form_cuts: bool) -> None:
    """Equal, but for bfloat16 that Triton's interpreter cuts instead of rounding."""
    rtol = 2**-7 if form_cuts and got.dtype == torch.bfloat16 and not ON_GPU else 0
    torch.testing.assert_close(got.cpu(), wanted, rtol=rtol, atol=0)


@every_routing
@every_alignment
@pytest.mark.parametrize(
    ("hidden", "dtype"), [(96, torch.bfloat16), (3, torch.bfloat16), (130, torch.float32)], ids=str
)
def test_repack(device: str, counts: list[int], alignment: int, hidden: int, dtype: torch.dtype) -> None:
    segments, flag = segments_of(counts, alignment, device), OverflowFlag(device)
    rows = rows_of(counts, alignment, hidden, dtype)
    slab, masked_m = repack(rows.to(device), segments, max_rows=MAX_ROWS, overflow=flag)
    assert torch.equal(slab.cpu(), loop_repack(rows, counts, alignment, MAX_ROWS))
    assert masked_m.dtype == torch.int32
    assert masked_m.tolist() == [min(count, MAX_ROWS) for count in counts]
    assert flag.value.tolist() == [max(counts) if max(counts) > MAX_ROWS else 0]


@every_routing
def test_rows_past_the_tile_are_left(device: str, counts: list[int]) -> None:
    segments, rows = segments_of(counts, 4, device), rows_of(counts, 4, 40, torch.float32)
    slab, _ = repack(rows.to(device), segments, max_rows=MAX_ROWS, overflow=OverflowFlag(device), tile=8)
    wanted = loop_repack(rows, counts, 4, MAX_ROWS)
    for expert, count in enumerate(counts):
        end = min(math.ceil(count / 8) * 8, MAX_ROWS)
        assert torch.equal(slab[expert, :end].cpu(), wanted[expert, :end])


@every_routing
@every_alignment
@pytest.mark.parametrize("weighted", [False, True], ids=["copied", "weighted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unrepack(device: str, counts: list[int], alignment: int, weighted: bool, dtype: torch.dtype) -> None:
    segments = segments_of(counts, alignment, device)
    slab = poisoned(torch.randn(len(counts), MAX_ROWS, 72).to(dtype), counts)
    weights = rows_of(counts, alignment, 1, torch.float32).squeeze(1) if weighted else None
    rows = unrepack(slab.to(device), segments, None if weights is None else weights.to(device))
    assert rows.dtype == dtype
    assert len(rows) == segments.num_rows
    wanted = loop_unrepack(slab, counts, alignment, weights)
    assert_near(rows[: len(wanted)], wanted, weighted)


@every_routing
@every_alignment
@every_format
def test_fp8_pairs(device: str, counts: list[int], alignment: int, fmt: fp8.ScaleFormat) -> None:
    """Codes and scales move bit for bit, in either layout and from one to the other."""
    segments = segments_of(counts, alignment, device)
    quantised = fp8.quantize(rows_of(counts, alignment, 600, torch.float32), fmt)
    codes = quantised.data.view(torch.uint8)
    scales = fmt.arrange(quantised.scales.to(device))
    rows = fp8.QuantizedRows(data=quantised.data.to(device), scales=scales, format=fmt, hidden=600)
    for order in (None, not fmt.column_major):
        slab, masked_m = repack(rows, segments, max_rows=MAX_ROWS, overflow=OverflowFlag(device), column_major=order)
        assert slab.hidden == 600
        assert slab.format == fp8.ScaleFormat(kind=fmt.kind, column_major=fmt.column_major if order is None else order)
        assert masked_m.tolist() == [min(count, MAX_ROWS) for count in counts]
        assert torch.equal(slab.data.view(torch.uint8).cpu(), loop_repack(codes, counts, alignment, MAX_ROWS))
        kept = torch.nan_to_num(quantised.scales) if fmt.kind == "float32" else quantised.scales
        assert torch.equal(slab.scales.cpu(), loop_repack(kept, counts, alignment, MAX_ROWS))
        back = unrepack(slab, segments, column_major=fmt.column_major)
        assert back.format == fmt
        end = place(counts, alignment)[-1][2]
        wanted = loop_unrepack(loop_repack(codes, counts, alignment, MAX_ROWS), counts, alignment)
        assert torch.equal(back.data[:end].view(torch.uint8).cpu(), wanted)
        wanted = loop_unrepack(loop_repack(kept, counts, alignment, MAX_ROWS), counts, alignment)
        assert torch.equal(back.scales[:end].cpu(), wanted)


@every_routing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_copies(device: str, counts: list[int], dtype: torch.dtype) -> None:
    segments, alignment = segments_of(counts, 8, device), 8
    rows = rows_of(counts, alignment, 24, dtype).to(device).requires_grad_()
    slab, _ = repack(rows, segments, max_rows=MAX_ROWS, overflow=OverflowFlag(device))
    upstream = poisoned(torch.randn(slab.shape).to(dtype), counts)
    (grad,) = torch.autograd.grad(slab, rows, upstream.to(device))
    wanted = loop_unrepack(upstream, counts, alignment)
    assert torch.equal(grad[: len(wanted)].cpu(), wanted)

    slab = torch.randn(slab.shape).to(dtype).to(device).requires_grad_()
    back = unrepack(slab, segments)
    upstream = rows_of(counts, alignment, 24, dtype)
    (grad,) = torch.autograd.grad(back, slab, upstream.to(device))
    assert torch.equal(grad.cpu(), loop_repack(upstream, counts, alignment, MAX_ROWS))


@every_routing
@every_alignment
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [40, 1100])
def test_gradients_of_weighted_rows(
    device: str, counts: list[int], alignment: int, dtype: torch.dtype, hidden: int
) -> None:
    segments = segments_of(counts, alignment, device)
    slab = poisoned(torch.randn(len(counts), MAX_ROWS, hidden).to(dtype), counts)
    weights = rows_of(counts, alignment, 1, torch.float32).squeeze(1)
    upstream = rows_of(counts, alignment, hidden, dtype)
    given = slab.to(device).requires_grad_(), weights.to(device).requires_grad_()
    grad_slab, grad_weights = torch.autograd.grad(unrepack(given[0], segments, given[1]), given, upstream.to(device))
    scaled = (upstream * weights[:, None]).to(dtype)
    assert_near(grad_slab, loop_repack(scaled, counts, alignment, MAX_ROWS), True)
    wanted = torch.zeros_like(weights)
    bound = torch.zeros_like(weights)
    for expert, (start, count, _) in enumerate(place(counts, alignment)):
        for i in range(min(count, MAX_ROWS)):
            products = slab[expert, i].double() * upstream[start + i].double()
            wanted[start + i], bound[start + i] = products.sum(), products.abs().sum() * 1e-6
    assert grad_weights.dtype == torch.float32
    assert ((grad_weights.cpu() - wanted).abs() <= bound).all()


def test_gradient_of_weights_alone_and_of_slabs_alone(device: str) -> None:
    counts = COUNTS["overflow"]
    segments, slab = segments_of(counts, 8, device), torch.randn(5, MAX_ROWS, 16, device=device)
    weights = torch.rand(segments.num_rows, device=device)
    both = [slab.clone().requires_grad_(), weights.clone().requires_grad_()]
    grads = torch.autograd.grad(unrepack(both[0], segments, both[1])[:80].sum(), both)
    (alone,) = torch.autograd.grad(unrepack(both[0], segments, weights)[:80].sum(), both[:1])
    assert torch.equal(alone, grads[0])
    (alone,) = torch.autograd.grad(unrepack(slab, segments, both[1])[:80].sum(), both[1:])
    assert torch.equal(alone, grads[1])
    with pytest.raises(InputError, match="second derivative"):
        torch.autograd.grad(unrepack(both[0], segments)[:80].sum(), both[:1], create_graph=True)


def test_float64_gradients() -> None:
    """The plain form, against numerical differentiation."""
    counts = [2, 0, 5]
    segments = segments_of(counts, 4, "cpu", tail=0)
    weights = torch.rand(segments.num_rows, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(segments.num_rows, 3, dtype=torch.float64, requires_grad=True)

    def layer(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        slab, _ = repack(rows, segments, max_rows=4, overflow=OverflowFlag("cpu"))
        return unrepack(slab * slab, segments, weights)

    assert torch.autograd.gradcheck(layer, (rows, weights))


@every_routing
@every_alignment
@pytest.mark.parametrize("tail", [0, 300])
def test_row_experts(device: str, counts: list[int], alignment: int, tail: int) -> None:
    wanted = [-1] * (place(counts, alignment)[-1][2] + tail)
    for expert, (start, count, _) in enumerate(place(counts, alignment)):
        for i in range(count):
            wanted[start + i] = expert
    index = row_experts(segments_of(counts, alignment, device, tail))
    assert index.dtype == torch.int32
    assert index.tolist() == wanted


def test_no_rows_at_all(device: str) -> None:
    segments = segments_of([0, 0], 1, device, tail=0)
    rows = torch.empty(0, 16, device=device, requires_grad=True)
    slab, masked_m = repack(rows, segments, max_rows=3, overflow=OverflowFlag(device))
    assert (slab == 0).all()
    assert masked_m.tolist() == [0, 0]
    weights = torch.empty(0, device=device, requires_grad=True)
    back = unrepack(slab, segments, weights)
    back.sum().backward()
    assert back.shape == rows.grad.shape == (0, 16)
    assert weights.grad.shape == (0,)


def test_the_flag_stays_up(device: str) -> None:
    flag = OverflowFlag(device)
    for counts in ([3, 4], [3, 9], [12, 1], [1, 10], [2, 2]):
        rows = rows_of(counts, 1, 8, torch.float32).to(device)
        repack(rows, segments_of(counts, 1, device), max_rows=8, overflow=flag)
    with pytest.raises(CapacityError, match=r"got 12 rows.*max_rows of at least 12"):
        flag.check()
    flag.reset()
    flag.check()
    repack(rows, segments_of([2, 2], 1, device), max_rows=2, overflow=flag)
    flag.check()


def on_a_real_handle(rank: int, world: int, alignment: int) -> dict[str, Any]:
    """A static dispatch in the expert layout over the embedded buffer whose unwritten rows are NaN."""
    import torch.distributed as dist

    from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer

    torch.manual_seed(rank)
    buffer = EmbeddedElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8, hidden=256, num_topk=2, adversary=3)
    x = torch.randn(6 - rank, 256).bfloat16()
    idx = torch.rand(len(x), 4 * world).topk(2).indices
    weights = torch.rand(len(x), 2)
    sizes = {"num_experts": 4 * world, "expert_alignment": alignment, "do_cpu_sync": False, "do_expand": True}
    recv_x, _, recv_weights, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **sizes)
    segments, flag = ExpertSegments.of_handle(handle), OverflowFlag("cpu")
    slab, masked_m = repack(recv_x, segments, max_rows=8 * world, overflow=flag)
    flag.check()
    back = unrepack(slab, segments, recv_weights)
    combined, _, _ = buffer.combine(back, handle)
    wanted = sum((x.float() * weights[:, k, None]).bfloat16().float() for k in range(2))
    index = row_experts(segments)
    return {
        "counts": masked_m.tolist() == handle.num_unaligned_recv_tokens_per_expert.tolist(),
        "finite": bool(torch.isfinite(slab).all()),
        "index": [int((index == expert).sum()) for expert in range(4)] == masked_m.tolist(),
        "combined": bool(((combined.float() - wanted).abs() <= wanted.abs() * 2**-6 + 2**-6).all()),
    }


@pytest.mark.parametrize("alignment", [1, 16])
def test_on_a_real_handle(ranks2: RankPool, alignment: int) -> None:
    for results in ranks2.run(on_a_real_handle, alignment):
        assert results == dict.fromkeys(results, True)


def _bad(name: str) -> Any:
    segments, flag = segments_of([2, 3], 4, "cpu", tail=0), OverflowFlag("cpu")
    rows, slab = torch.zeros(8, 16), torch.zeros(2, 4, 16)
    quantised = fp8.quantize(rows)
    return {
        "row count": lambda: repack(rows[1:], segments, max_rows=4, overflow=flag),
        "max_rows": lambda: repack(rows, segments, max_rows=0, overflow=flag),
        "tile": lambda: repack(rows, segments, max_rows=4, overflow=flag, tile=0),
        "flag's device": lambda: repack(rows, segments, max_rows=4, overflow=OverflowFlag("meta")),
        "scales of bf16": lambda: repack(rows, segments, max_rows=4, overflow=flag, column_major=True),  # type: ignore[call-overload]
        "slab count": lambda: unrepack(slab[:1], segments),
        "slabs of fp8 rows": lambda: unrepack(quantised, segments),
        "weight dtype": lambda: unrepack(slab, segments, torch.zeros(8).bfloat16()),
        "weight count": lambda: unrepack(slab, segments, torch.zeros(7)),
        "weights with fp8": lambda: unrepack(quantised, segments, torch.zeros(8)),  # type: ignore[call-overload]
        "psum dtype": lambda: ExpertSegments(psum=segments.psum.long(), counts=segments.counts, num_rows=8),
        "counts shape": lambda: ExpertSegments(psum=segments.psum, counts=segments.counts[:1], num_rows=8),
        "alignment": lambda: ExpertSegments(psum=segments.psum, counts=segments.counts, num_rows=8, alignment=0),
    }[name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("row count", r"rows of the expert layout: got \(7, 16\) on cpu, expected \[8, H\]"),
        ("max_rows", "max_rows and tile: got 0 and None"),
        ("tile", "got 4 and 0"),
        ("flag's device", "device of the overflow flag: got meta"),
        ("scales of bf16", "column_major"),
        ("slab count", r"slabs: got \(1, 4, 16\)"),
        ("slabs of fp8 rows", r"slabs: got \(8, 128\)"),
        ("weight dtype", "weights of the rows: got torch.bfloat16"),
        ("weight count", r"weights of the rows: .*expected torch.float32 \(8,\)"),
        ("weights with fp8", "weights with FP8 slabs"),
        ("psum dtype", "psum of expert segments: got torch.int64"),
        ("counts shape", "counts of expert segments"),
        ("alignment", "got 0 and 8"),
    ],
)
def test_bad_input(name: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        _bad(name)()
