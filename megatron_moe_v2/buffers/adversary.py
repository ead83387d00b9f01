"""Test only: everything that the contract leaves free, drawn anew at each call.

With it a CPU test is as unkind as a GPU: rows arrive in another legal order each time, and what nobody wrote is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Adversary", "poison"]

_POISON_INT = -(2**30)


def poison(tensor: Tensor) -> None:
    """Fill with NaN, integers with -2**30 (the least value where that does not fit)."""
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        tensor.fill_(float("nan"))
    elif tensor.element_size() > 1:
        tensor.fill_(max(_POISON_INT, torch.iinfo(tensor.dtype).min))
    else:
        tensor.view(torch.uint8).fill_(0x7F)


class Adversary:
    """Draws legal orders from a seed and the rank; a deterministic buffer has one legal order only."""

    def __init__(self, seed: int, rank: int, *, deterministic: bool = False) -> None:
        self._draw = torch.Generator().manual_seed(seed * 1000003 + rank)
        self._deterministic = deterministic

    def receive_order(self, rows_in: list[int], device: torch.device) -> Tensor:
        """int64 ``[n]``: which arrived row stands at each place; sources stay in ascending segments."""
        parts, start = [torch.empty(0, dtype=torch.int64)], 0
        for rows in rows_in:
            parts.append(start + self._permutation(rows))
            start += rows
        return torch.cat(parts).to(device)

    def slot_order(self, num_selections: int, device: torch.device) -> Tensor:
        """int64 ``[n * K]``: order in which selections take the slots of their expert."""
        return self._permutation(num_selections).to(device)

    def _permutation(self, length: int) -> Tensor:
        return torch.arange(length) if self._deterministic else torch.randperm(length, generator=self._draw)
