"""What all ranks feed into a dispatch and its combine, drawn from a case's seed and equal in every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from oracle import Key, Oracle
from torch import Tensor

__all__ = ["CEILING", "Case", "World"]

CEILING = 12


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs and options of one dispatch and its combine.

    Attributes:
        tokens: ``even``, ``ragged``, ``first empty``, ``last empty``, ``all empty``, ``full`` (the ceiling)
            or ``many`` (hundreds).
        routing: ``random``, ``one rank``, ``one expert``, ``idle experts``, ``masked``, ``all masked`` or
            ``repeated`` (an expert several times in a row).
        scales: with FP8 rows and scales of this dtype, else None.
        sf_layout: strides of the scales that go in: ``rows``, ``columns`` or ``every other``.
        bias: number of bias tensors in combine.
        adversary: seed of the buffer's adversary.
    """

    tokens: str = "ragged"
    routing: str = "random"
    dtype: torch.dtype = torch.bfloat16
    hidden: int = 16
    topk: int = 3
    local_experts: int = 3
    alignment: int = 1
    expand: bool = False
    sync: bool = True
    zero_padding: bool = False
    weights: bool = True
    scales: torch.dtype | None = None
    sf_layout: str = "rows"
    tma: bool = False
    bias: int = 0
    multiple_reduction: bool = True
    deterministic: bool = False
    adversary: int | None = None
    seed: int = 0

    @property
    def ceiling(self) -> int:
        return 300 if self.tokens == "many" else CEILING

    def __str__(self) -> str:
        plain = Case()
        parts = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return ", ".join(parts) or "plain"


def _token_counts(kind: str, world: int) -> list[int]:
    counts = {
        "even": [6] * world,
        "ragged": [3 + (5 * rank + 4) % 8 for rank in range(world)],
        "first empty": [0] + [5] * (world - 1),
        "last empty": [5] * (world - 1) + [0],
        "all empty": [0] * world,
        "full": [CEILING] * world,
        "many": [300 - 131 * (rank % 2) for rank in range(world)],
    }
    return counts[kind]


def _routing(kind: str, count: int, topk: int, local: int, world: int, draw: torch.Generator) -> Tensor:
    allowed = {
        "one rank": torch.arange(local * (world - 1), local * world),
        "one expert": torch.tensor([local * world - 1]),
        "idle experts": torch.arange(0, local * world, 2),
    }.get(kind, torch.arange(local * world))
    scores = torch.rand(count, len(allowed), generator=draw)
    width = min(topk, len(allowed))
    rows = torch.full((count, topk), -1, dtype=torch.int64)
    rows[:, :width] = allowed[scores.topk(width).indices]
    rows = rows.gather(1, torch.rand(count, topk, generator=draw).argsort(dim=1))
    if kind == "masked":
        rows[torch.rand(count, topk, generator=draw) < 0.4] = -1
        rows[::4] = -7  # any negative number means none
    if kind == "repeated":
        rows[:, 1::2] = rows[:, ::2][:, : topk // 2]
    if kind == "all masked":
        rows[:] = -1
    return rows


def _spread(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Normal numbers over 24 binary orders of magnitude, so that order and rounding of sums show."""
    scale = torch.randint(-12, 13, shape, generator=draw).double().exp2()
    return torch.randn(shape, generator=draw, dtype=torch.float64) * scale


class World:
    """All ranks' inputs of a case."""

    def __init__(self, case: Case, world: int) -> None:
        draw = torch.Generator().manual_seed(case.seed * 7919 + world)
        counts = _token_counts(case.tokens, world)
        idx = [_routing(case.routing, n, case.topk, case.local_experts, world, draw) for n in counts]
        self.case, self.size, self.draw = case, world, draw
        self.oracle = Oracle(
            topk_idx=idx, num_experts=case.local_experts * world, max_tokens=case.ceiling, alignment=case.alignment
        )
        self.weight_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
        self.x = self.tokens(case.dtype, case.hidden)
        self.weights = [torch.rand(n, case.topk, generator=draw).to(self.weight_dtype) + 0.5 for n in counts]
        self.scales = [self._scales(n) for n in counts]

    def tokens(self, dtype: torch.dtype, hidden: int) -> list[Tensor]:
        return [_spread((len(idx), hidden), self.draw).to(dtype) for idx in self.oracle.topk_idx]

    def _scales(self, count: int) -> Tensor:
        shape = (count, 3)
        bits = torch.randint(-(2**31), 2**31 - 1, shape, generator=self.draw, dtype=torch.int64).to(torch.int32)
        scales = bits if self.case.scales == torch.int32 else torch.rand(shape, generator=self.draw)
        if self.case.sf_layout == "columns":
            return scales.t().contiguous().t()
        if self.case.sf_layout == "every other":
            return scales.repeat_interleave(2, dim=1)[:, ::2]
        return scales

    def expert_rows(self, dtype: torch.dtype, hidden: int) -> list[dict[Any, Tensor]]:
        """Per rank what its experts gave for each row, keyed as the oracle keys the layout."""
        outputs: list[dict[Any, Tensor]] = []
        for rank in range(self.size):
            keys: list[Any] = (
                [key for expert in self.oracle.received_by_expert(rank) for key in expert]
                if self.case.expand
                else self.oracle.received(rank)
            )
            rows = _spread((len(keys), hidden), self.draw).to(dtype)
            outputs.append(dict(zip(keys, rows, strict=True)))
        return outputs

    def returned_weights(self) -> list[dict[Key, float]]:
        """Per rank the weight that it gives back for each selection it owns, exact in float32."""
        return [
            {
                key: float(torch.rand((), generator=self.draw))
                for expert in self.oracle.received_by_expert(rank)
                for key in expert
            }
            for rank in range(self.size)
        ]
