"""From a dense router's probabilities and mask to the K selections of each token, with gradients.

On CUDA tensors one Triton kernel each way, where Triton is installed. Legend: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .buffers import layout
from .communication import first_order

__all__ = ["select_experts"]


def select_experts(probs: Tensor, mask: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """The most probable K experts that the mask selects, in descending probability.

    Args:
        probs: floating ``[T, E]``.
        mask: bool ``[T, E]``.
        num_topk: K; where a token selects fewer, the rest of its row selects nothing.

    Returns:
        Their probabilities ``[T, K]``, zero for nothing, and their indices, int64 ``[T, K]``, -1 for nothing.
    """
    kernels = layout.kernels_for(probs)
    if kernels is None or probs.element_size() > 4 or probs.shape[1] > kernels.MOST_EXPERTS:
        ranked = probs.detach().masked_fill(~mask, float("-inf"))
        score, idx = ranked.topk(num_topk, dim=-1)
        nothing = score == float("-inf")
        return probs.gather(-1, idx).masked_fill(nothing, 0), idx.masked_fill(nothing, -1)
    return _Select.apply(probs, mask, num_topk, kernels)  # type: ignore[no-untyped-call, no-any-return]


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, mask: Tensor, num_topk: int, kernels: Any) -> tuple[Tensor, Tensor]:
        weights, idx = kernels.select(probs.contiguous(), mask.contiguous(), num_topk)
        ctx.save_for_backward(idx)
        ctx.num_experts, ctx.kernels = probs.shape[1], kernels
        ctx.mark_non_differentiable(idx)
        return weights, idx

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        (idx,) = ctx.saved_tensors
        return ctx.kernels.unselect(grad.contiguous(), idx, ctx.num_experts), None, None, None
