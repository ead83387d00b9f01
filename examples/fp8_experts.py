"""A grouped matrix product whose rows arrive in FP8 from the dispatch: DeepGEMM where it is installed and works.

The weights are quantised in blocks of 128 x 128 at each forward. Elsewhere the rows are de-quantised and multiplied
with the weights as they are. (PyTorch's own scaled grouped product takes a scale a row on Hopper, not one for 128
channels.) Gradients are taken in the dtype of the tokens, from the de-quantised rows.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from expert_gemm import grouped_linear
from torch import Tensor

from megatron_moe_v2.fp8 import GROUP, QuantizedRows, ScaleFormat, dequantize, quantize, quantize_blocks


def _deep_gemm(rows: QuantizedRows, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    """``[P, O]`` bfloat16 by DeepGEMM; each expert's rows must be padded to a multiple of 128."""
    device = rows.data.device
    counts = rows_per_expert.to(device)
    expert = torch.arange(len(counts), device=device, dtype=torch.int32).repeat_interleave(
        counts, output_size=len(rows.data)
    )
    out = torch.empty(len(rows.data), weight.shape[2], dtype=torch.bfloat16, device=device)
    module = importlib.import_module("deep_gemm")
    module.m_grouped_fp8_gemm_nt_contiguous(rows.pair, quantize_blocks(weight.transpose(1, 2)), out, expert)
    return out


@functools.cache
def runs_deep_gemm(device: torch.device) -> bool:
    """Whether DeepGEMM is here and gives the product."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    draw = torch.Generator(device).manual_seed(0)
    tokens = torch.randn(2 * GROUP, 256, device=device, generator=draw).bfloat16()
    weight = torch.randn(2, 256, GROUP, device=device, generator=draw).bfloat16()
    counts = torch.full((2,), GROUP)
    rows = quantize(tokens, ScaleFormat(column_major=True))
    try:
        got = _deep_gemm(rows, weight, counts).float()
    except (ImportError, AttributeError, TypeError, RuntimeError, AssertionError):
        return False
    wanted = grouped_linear(dequantize(rows), weight, counts).float()
    return bool((got - wanted).norm() < 0.1 * wanted.norm())


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, rows: QuantizedRows, rows_per_expert: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *rows.pair, rows_per_expert)
        ctx.format, ctx.hidden, ctx.dtype = rows.format, rows.hidden, anchor.dtype
        if runs_deep_gemm(rows.data.device) and not (rows_per_expert % GROUP).any() and not rows.hidden % GROUP:
            return _deep_gemm(rows, weight, rows_per_expert).to(anchor.dtype)
        return grouped_linear(dequantize(rows, anchor.dtype), weight, rows_per_expert)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weight, data, scales, rows_per_expert = ctx.saved_tensors
        rows = dequantize(QuantizedRows(data=data, scales=scales, format=ctx.format, hidden=ctx.hidden), ctx.dtype)
        grad = grads[0].contiguous()
        grad_rows = grouped_linear(grad, weight.transpose(1, 2), rows_per_expert)
        each = rows_per_expert.tolist()
        parts = zip(rows.split(each), grad.split(each), strict=True)
        grad_weight = torch.stack([row.t() @ above for row, above in parts]).to(weight.dtype)
        return grad_rows, grad_weight, None, None  # anchor, weight, rows, rows_per_expert


def fp8_grouped_linear(rows: QuantizedRows, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    """Multiply each group of FP8 rows with its expert's matrix.

    Args:
        rows: ``[P, I]``, grouped by expert, with the anchor that a dispatch gives them.
        weight: ``[L, I, O]``.
        rows_per_expert: CPU int64 ``[L]``, sums to P.

    Returns:
        ``[P, O]`` in the dtype of the anchor.
    """
    product: Tensor = _GroupedLinear.apply(rows.anchor, weight, rows, rows_per_expert)
    return product
