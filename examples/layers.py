"""Linear, RMSNorm and embedding whose weight gradients do not depend on how windows are spread over ranks.

A weight's gradient is a sum over all tokens of the global batch. Summed in float32 in another order it differs in the
last bits, and a router turns last bits into another choice of expert sooner or later: runs on one and on two ranks
would part after some dozen steps. Here each window's share of the gradient is computed by itself and the shares are
added in float64, where the order no longer shows, over windows here and over ranks in
:func:`parallel.sum_gradients`. (Expert weights need nothing: the rows that reach an expert, and their order, are the
same at any rank count.)

Legend: B windows of this rank (may be 0), S positions, I and O features in and out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _PerWindow(torch.autograd.Function):
    """A weight seen once per window."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, windows: int, dtype: torch.dtype) -> Tensor:
        return weight.to(dtype).expand(windows, *weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        wide = torch.float64 if grad.dtype == torch.float32 else torch.float32
        return grad.sum(0, dtype=wide), None, None  # weight, windows, dtype


def replicated(*shape: int) -> nn.Parameter:
    """An uninitialised float32 parameter that takes a gradient of any floating dtype."""
    weight = nn.Parameter(torch.empty(*shape))
    weight.grad_dtype = None
    return weight


def per_window(weight: Tensor, windows: int, dtype: torch.dtype) -> Tensor:
    """``weight`` as ``[windows, *shape]`` in ``dtype``, a view where the dtype is the same."""
    view: Tensor = _PerWindow.apply(weight, windows, dtype)
    return view


class Linear(nn.Module):
    """``[B, S, I]`` to ``[B, S, O]`` without bias, in the dtype of the input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = replicated(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, per_window(self.weight, x.shape[0], x.dtype).transpose(1, 2))


class RMSNorm(nn.Module):
    """Normalises the last axis of ``[B, ..., I]`` in float32 and returns float32."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = replicated(features)

    def forward(self, x: Tensor) -> Tensor:
        weight = per_window(self.weight, x.shape[0], torch.float32)
        weight = weight.view(x.shape[0], *[1] * (x.dim() - 2), x.shape[-1])
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps) * weight


class Embedding(nn.Module):
    """int64 ``[B, S]`` to float32 ``[B, S, O]``."""

    def __init__(self, vocab: int, outputs: int) -> None:
        super().__init__()
        self.weight = replicated(vocab, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        windows, vocab = tokens.shape[0], self.weight.shape[0]
        table = per_window(self.weight, windows, torch.float32).flatten(0, 1)
        return F.embedding(tokens + vocab * torch.arange(windows, device=tokens.device)[:, None], table)
