"""The benchmark's inputs and what must come out of them, computed from all ranks' inputs without any buffer.

Values are small integers, so that every sum is exact in every dtype and one wrong bit counts.

Legend: T tokens of a rank, H hidden, K top-k, E experts, L local experts, n received tokens, P rows by expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Inputs", "Oracle", "make_inputs"]

_LARGEST = 8  # times the largest top-k, 32: the integers that bfloat16 holds exactly


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """One rank's: leaves ``x`` ``[T, H]`` and ``weights`` float32 ``[T, K]``, ``topk_idx`` int64 ``[T, K]`` of distinct
    experts, and the gradient ``grad`` ``[T, H]`` of the combined tokens."""

    x: Tensor
    topk_idx: Tensor
    weights: Tensor
    grad: Tensor


def make_inputs(
    num_tokens: int,
    hidden: int,
    num_experts: int,
    num_topk: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Inputs:
    """Random rows and a uniform random routing."""
    generator = torch.Generator().manual_seed(seed)

    def integers() -> Tensor:
        return torch.randint(-_LARGEST, _LARGEST + 1, (num_tokens, hidden), generator=generator).to(device, dtype)

    weights = torch.rand(num_tokens, num_topk, generator=generator).to(device)
    topk_idx = torch.rand(num_tokens, num_experts, generator=generator).topk(num_topk, dim=1).indices.to(device)
    return Inputs(x=integers().requires_grad_(), topk_idx=topk_idx, weights=weights.requires_grad_(), grad=integers())


class Oracle:
    """Counts wrong values. Construction is collective over the group.

    Args:
        inputs: this rank's; every rank has as many tokens.
        num_experts: E.

    Attributes:
        rows_per_rank: tokens that a rank receives, each once, mean over ranks; its own included.
    """

    def __init__(self, inputs: Inputs, num_experts: int, group: dist.ProcessGroup) -> None:
        self.inputs = inputs
        self.num_local_experts = num_experts // group.size()
        self.first_expert = group.rank() * self.num_local_experts
        self.x, self.topk_idx, self.weights = (
            _gather(one.detach(), group) for one in (inputs.x, inputs.topk_idx, inputs.weights)
        )
        self.num_copies = inputs.topk_idx.shape[1]
        self.num_ranks_of_token = self._num_ranks(inputs.topk_idx, group.size())
        self.rows_per_rank = float(self._num_ranks(self.topk_idx, group.size()).sum()) / group.size()

    def _num_ranks(self, topk_idx: Tensor, num_ranks: int) -> Tensor:
        ranks = topk_idx // self.num_local_experts
        return torch.nn.functional.one_hot(ranks, num_ranks).amax(1).sum(1, keepdim=True)

    def wrong_tokens(self, rows: Tensor, local_idx: Tensor, weights: Tensor) -> int:
        """Token layout: ``[n, H]``, local expert or -1 ``[n, K]``, weights ``[n, K]``, in any order of rows."""
        local = self.topk_idx - self.first_expert
        local = local.masked_fill((local < 0) | (local >= self.num_local_experts), -1)
        here = (local >= 0).any(1)
        return _differences((rows, local_idx, weights), (self.x[here], local[here], self.weights[here]))

    def wrong_copies(self, rows: Tensor, counts: Tensor, weights: Tensor) -> int:
        """Rows by expert: ``[P, H]``, rows of each expert ``[L]``, weights ``[P]``, in any order within an expert."""
        local = self.topk_idx - self.first_expert
        token, lane = ((local >= 0) & (local < self.num_local_experts)).nonzero().unbind(1)
        expert = torch.arange(self.num_local_experts).repeat_interleave(counts.cpu()).to(rows.device)
        expected = (self.x[token], local[token, lane][:, None], self.weights[token, lane][:, None])
        return _differences((rows, expert[:, None], weights[:, None]), expected)

    def wrong_sums(self, combined: Tensor, values: Tensor, *, per_copy: bool) -> int:
        """``[T, H]`` against ``values`` once for each copy, or once for each rank that got the token."""
        times = self.num_copies if per_copy else self.num_ranks_of_token
        return int((combined != values.detach() * times).sum())

    def wrong_weight_gradients(self, grad: Tensor) -> int:
        """The gradient of half the squared norm of the received weights: the weights themselves."""
        return int((grad != self.inputs.weights.detach()).sum())


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def _fingerprints(rows: Tensor, keys: Tensor) -> Tensor:
    """An int64 for each row of bits and its keys."""
    bits = rows.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[1] + keys.shape[1],), generator=generator).to(rows.device)
    parts = [
        (part.long() * factors[: rows.shape[1]]).sum(1) + (key * factors[rows.shape[1] :]).sum(1)
        for part, key in zip(bits.split(512), keys.split(512), strict=True)
    ]
    return torch.cat(parts)


def _differences(got: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor]) -> int:
    """Values that differ between two sets of (rows, experts, weights), once both are in an order of their own."""
    if len(got[0]) != len(expected[0]):
        return max(abs(len(got[0]) - len(expected[0])), 1) * expected[0].shape[1]
    if not len(got[0]):
        return 0
    order, wanted = _fingerprints(*got[:2]).argsort(), _fingerprints(*expected[:2]).argsort()
    return sum(int((one[order] != other[wanted]).sum()) for one, other in zip(got, expected, strict=True))
