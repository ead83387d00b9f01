"""From a dense router's probabilities and mask to the K selections of each token, with gradients.

On CUDA tensors one Triton kernel each way, where Triton is installed. Legend: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .buffers import layout
from .communication import eager, first_order

__all__ = ["select_experts"]


@eager
def select_experts(probs: Tensor, mask: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """The most probable K experts that the mask selects, in descending probability.

    Among equals the lower expert comes first on CUDA, any on a CPU. What is selected with a probability of minus
    infinity is not.

    Args:
        probs: floating ``[T, E]``.
        mask: ``[T, E]``, not zero where an expert is selected.
        num_topk: K, at most E; where a token selects fewer, the rest of its row selects nothing.

    Returns:
        Their probabilities ``[T, K]``, zero for nothing, and their indices, int64 ``[T, K]``, -1 for nothing.
    """
    mask, kernels = mask.bool(), layout.kernels_for(probs)
    if kernels is None or probs.element_size() > 4 or probs.shape[1] > kernels.MOST_EXPERTS:
        ranked = probs.detach().masked_fill(~mask, float("-inf"))
        score, idx = ranked.topk(num_topk, dim=-1)
        nothing = score == float("-inf")
        return probs.gather(-1, idx).masked_fill(nothing, 0), idx.masked_fill(nothing, -1)
    return _Select.apply(probs, mask, num_topk, kernels)  # type: ignore[no-untyped-call, no-any-return]


class _Select(torch.autograd.Function):
    """:func:`select_experts` by Triton kernels."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, mask: Tensor, num_topk: int, kernels: Any) -> tuple[Tensor, Tensor]:
        """``[T, E]`` and ``[T, E]`` to ``[T, K]`` and ``[T, K]``."""
        weights, idx = kernels.select(probs.contiguous(), mask.contiguous(), num_topk)
        ctx.save_for_backward(idx)
        ctx.num_experts, ctx.kernels = probs.shape[1], kernels
        ctx.mark_non_differentiable(idx)
        return weights, idx

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        """``[T, K]`` to ``[T, E]``, zero for what was not selected."""
        (idx,) = ctx.saved_tensors
        dense = ctx.kernels.unselect(grad.contiguous(), idx, ctx.num_experts)
        return dense, None, None, None  # probs, mask, K, kernels
