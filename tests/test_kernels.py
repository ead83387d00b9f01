"""Triton permutation against the plain forms: in Triton's interpreter on a CPU, on the device where there is a GPU."""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("megatron_moe_v2.buffers.kernels")
layout = pytest.importorskip("megatron_moe_v2.buffers.layout")
selection = pytest.importorskip("megatron_moe_v2.selection")

DEVICE = "cuda" if ON_GPU else "cpu"


def _routing(rows: int, num_topk: int, num_local_experts: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, 2 * num_local_experts, generator=draw).topk(num_topk).indices
    return chosen.masked_fill(chosen >= num_local_experts, -1).to(DEVICE)


def _sum(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The plain form, on the CPU, where ``layout`` does not hand over to the kernels."""
    return layout.sum_rows(rows.cpu(), slots.cpu()).to(DEVICE)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(("rows", "num_topk", "num_local_experts"), [(0, 2, 4), (1, 1, 1), (45, 4, 6), (300, 3, 5)])
def test_slots_equal_the_plain_form(rows: int, num_topk: int, num_local_experts: int, alignment: int) -> None:
    idx = _routing(rows, num_topk, num_local_experts, 1)
    weights = torch.rand(rows, num_topk, device=DEVICE)
    plain = layout.expert_slots(idx, num_local_experts, alignment)
    num_slots = int(plain.aligned.sum())
    numbered, counts, aligned, grouped = kernels.slots(idx, num_local_experts, alignment, weights, num_slots)
    assert torch.equal(numbered.long(), plain.slots)
    assert torch.equal(counts.long(), plain.counts)
    assert torch.equal(aligned.long(), plain.aligned)
    position = layout.rows_of_slots(plain.slots, num_slots)
    assert torch.equal(grouped, layout.pick(weights.reshape(-1), position))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("alignment", [1, 16])
def test_group_and_ungroup_equal_the_plain_forms(alignment: int, dtype: torch.dtype) -> None:
    idx = _routing(60, 4, 6, 2)
    plain = layout.expert_slots(idx, 6, alignment)
    num_slots = int(plain.aligned.sum())
    numbered, counts, aligned, _ = kernels.slots(idx, 6, alignment, None, num_slots)
    x = torch.randn(60, 72, device=DEVICE).to(dtype)
    grouped = kernels.group(x, numbered, counts, aligned, num_slots)
    position = layout.rows_of_slots(plain.slots, num_slots)
    wanted = torch.where((position < 0)[:, None], 0, x[(position // 4).clamp_min(0)])
    assert torch.equal(grouped, wanted)
    rows = torch.randn(num_slots, 72, device=DEVICE).to(dtype)
    weights = torch.randn(num_slots, device=DEVICE)
    summed, picked = kernels.ungroup(rows, numbered, torch.empty_like(x), weights)
    assert torch.equal(picked, layout.pick(weights, plain.slots))
    wanted = _sum(rows, plain.slots)
    # The interpreter cuts float32 to bfloat16 instead of rounding it.
    torch.testing.assert_close(summed, wanted, rtol=2**-7 if dtype == torch.bfloat16 and not ON_GPU else 0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "num_experts", "num_topk"), [(0, 4, 2), (1, 1, 1), (37, 12, 4), (50, 64, 8)])
def test_selection_equals_the_plain_form(tokens: int, num_experts: int, num_topk: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    # All different, some negative or zero: among equals the plain form may choose others
    probs = torch.rand(tokens, num_experts, generator=draw).argsort(1).sub(2).mul(0.5).to(dtype)
    mask = torch.rand(tokens, num_experts, generator=draw) < 0.4
    ours, plain = (probs.clone().requires_grad_() for _ in range(2))
    weights, idx = selection.select_experts(plain, mask, num_topk)
    by_expert = mask.to(DEVICE).T.contiguous().T  # of other strides
    found, chosen = selection._Select.apply(ours.to(DEVICE), by_expert, num_topk, kernels)
    assert torch.equal(chosen.cpu(), idx)
    assert torch.equal(found.cpu(), weights)
    upstream = torch.rand(tokens, num_topk, generator=draw).to(dtype)
    weights.backward(upstream)
    found.backward(upstream.to(DEVICE))
    assert torch.equal(ours.grad, plain.grad)


def test_selection_among_equals_and_numbers_that_are_none() -> None:
    """Experts of a token are never twice the same, whatever the probabilities are; a selected zero is selected."""
    nan, inf = torch.nan, torch.inf
    probs = torch.tensor([[0.0, 0, 0, 0], [1, 1, 2, 1], [nan, -inf, inf, -nan], [-0.0, 0, -1, -inf], [0, 5, 0, 0]])
    probs[2, 3].view(torch.int32).bitwise_or_(-(2**31))  # a NaN with its sign set
    mask = torch.ones(5, 4, dtype=torch.bool)
    mask[4] = torch.tensor([False, False, True, True])
    weights, idx = kernels.select(probs.to(DEVICE), mask.to(DEVICE), 3)
    assert idx.tolist() == [[0, 1, 2], [2, 0, 1], [0, 3, 2], [0, 1, 2], [2, 3, -1]]
    weights = weights.cpu().nan_to_num(9, posinf=8)
    assert weights.tolist() == [[0, 0, 0], [2, 1, 1], [9, 9, 8], [0, 0, -1], [0, 0, 0]]
    plain_weights, plain = selection.select_experts(probs, mask, 3)
    assert plain[4].sort().values.tolist() == [-1, 2, 3]
    assert plain[2].sort().values.tolist() == [0, 2, 3]
    assert plain_weights[4].tolist() == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("rows", "hidden"), [(8192, 2048), (4096, 7168)])
def test_bandwidth(rows: int, hidden: int) -> None:
    """Copying rows to experts and summing them back reaches 70 % of what a plain copy moves."""
    idx = torch.rand(rows, 128, device=DEVICE).topk(8).indices
    x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
    num_slots = rows * 8
    numbered, counts, aligned, _ = kernels.slots(idx, 128, 1, None, num_slots)
    grouped = kernels.group(x, numbered, counts, aligned, num_slots)
    target = torch.empty_like(grouped)
    bytes_moved = (rows + num_slots) * hidden * 2

    def milliseconds(function) -> float:  # type: ignore[no-untyped-def]
        return float(triton.testing.do_bench(function, warmup=50, rep=200))

    copy = 2 * grouped.numel() * 2 / milliseconds(lambda: target.copy_(grouped))
    group = milliseconds(lambda: kernels.group(x, numbered, counts, aligned, num_slots))
    ungroup = milliseconds(lambda: kernels.ungroup(grouped, numbered, x))
    number = milliseconds(lambda: kernels.slots(idx, 128, 1, None, num_slots))
    print(
        f"{rows} x {hidden}: copy {copy / 1e6:.0f} GB/s, slots {number:.3f} ms, group {group:.3f} ms "
        f"{bytes_moved / group / 1e6:.0f} GB/s, ungroup {ungroup:.3f} ms {bytes_moved / ungroup / 1e6:.0f} GB/s"
    )
    assert bytes_moved / group > 0.7 * copy
    assert bytes_moved / ungroup > 0.7 * copy
