"""Laws of the embedded buffer over drawn routings, at one, two and four ranks.

Hypothesis draws in this process; each example is one call into lasting rank processes, so that shrinking works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from embedded_inputs import CEILING
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import RankPool
from torch import Tensor

Law = Callable[..., list[str]]


@dataclass(frozen=True)
class Routing:
    """Per rank rows of global experts, -1 for none, and how they are dispatched."""

    rows: list[list[list[int]]]
    local_experts: int
    topk: int
    alignment: int
    adversary: int | None

    def idx(self, rank: int) -> Tensor:
        return torch.tensor(self.rows[rank], dtype=torch.int64).view(-1, self.topk)


@st.composite
def routings(draw: st.DrawFn, world: int) -> Routing:
    local = draw(st.integers(1, 4))
    topk = draw(st.integers(1, min(4, local * world)))
    experts = st.integers(-1, local * world - 1)
    row = st.lists(experts, min_size=topk, max_size=topk).map(_without_repeats)
    rows = [draw(st.lists(row, max_size=5)) for _ in range(world)]
    return Routing(rows, local, topk, draw(st.sampled_from([1, 4])), draw(st.sampled_from([None, 1, 2])))


def _without_repeats(row: list[int]) -> list[int]:
    return [expert if expert not in row[:k] else -1 for k, expert in enumerate(row)]


class _Side:
    """One rank's view of a routing."""

    def __init__(self, routing: Routing, rank: int, world: int, expand: bool) -> None:
        from embedded_cases import buffer_of

        self.routing, self.rank, self.world, self.expand = routing, rank, world, expand
        self.buffer = buffer_of(adversary=routing.adversary)
        self.idx = routing.idx(rank)
        draw = torch.Generator().manual_seed(rank)
        self.x = torch.randint(-99, 99, (len(self.idx), 6), generator=draw).float()  # sums of these are exact
        self.weights = torch.rand(self.idx.shape, generator=draw)

    def dispatch(self, idx: Tensor | None = None, **options: Any) -> Any:
        return self.buffer.dispatch(
            self.x,
            self.idx if idx is None else idx,
            self.weights,
            num_experts=self.routing.local_experts * self.world,
            num_max_tokens_per_rank=CEILING,
            expert_alignment=self.routing.alignment,
            do_expand=self.expand,
            **options,
        )

    def factors(self, names: Tensor, recv_idx: Tensor | None, handle: Any, count: int) -> Tensor:
        """[count] what the experts of a received row multiply it by: expert e by ``names[e]``, several by their sum."""
        own = names[self.rank * self.routing.local_experts :][: self.routing.local_experts]
        if recv_idx is not None:
            return torch.where(recv_idx >= 0, own[recv_idx.clamp_min(0)], 0).sum(1)
        factors, start = torch.zeros(count, dtype=own.dtype), 0
        for local, exact in enumerate(handle.num_unaligned_recv_tokens_per_expert.tolist()):
            factors[start : start + exact] = own[local]
            start += -(-exact // self.routing.alignment) * self.routing.alignment
        return factors


def ones_count(rank: int, world: int, routing: Routing, expand: bool) -> list[str]:
    """Dispatch, replace by ones, combine: destination ranks in the token layout, selections in the expert layout."""
    side = _Side(routing, rank, world, expand)
    recv, *_, handle, _ = side.dispatch()
    combined = side.buffer.combine(torch.ones_like(recv), handle)[0]
    chosen = [[expert for expert in row if expert >= 0] for row in routing.rows[rank]]
    homes = [{expert // routing.local_experts for expert in row} for row in chosen]
    want = torch.tensor([float(len(row)) for row in (chosen if expand else homes)])
    return [] if torch.equal(combined, want[:, None].expand(-1, 6)) else [f"rank {rank}: {combined[:, 0]} for {want}"]


def weights_return(rank: int, world: int, routing: Routing, expand: bool) -> list[str]:
    """Weights sent back as they came return exactly, and zero where nothing was selected."""
    side = _Side(routing, rank, world, expand)
    recv, _, recv_weights, handle, _ = side.dispatch()
    back = side.buffer.combine(recv, handle, topk_weights=recv_weights)[1]
    want = torch.where(side.idx >= 0, side.weights, 0.0)
    return [] if torch.equal(back, want) else [f"rank {rank}: {back} for {want}"]


def cached_equals_fresh(rank: int, world: int, routing: Routing, expand: bool) -> list[str]:
    """A cached dispatch of the same tensors gives the same rows in the same places, where they are defined."""
    side = _Side(routing, rank, world, expand)
    options: dict[str, Any] = {"do_zero_padding": True} if expand else {}
    recv, recv_idx, recv_weights, handle, _ = side.dispatch(**options)
    again = side.buffer.dispatch(side.x, topk_weights=side.weights, handle=handle, do_expand=expand, **options)
    same = [torch.equal(recv, again[0]), torch.equal(recv_weights, again[2]), again[3] is handle]
    same.append(recv_idx is again[1] if expand else torch.equal(recv_idx, again[1]))
    return [] if all(same) else [f"rank {rank}: {same}"]


def permutation(rank: int, world: int, routing: Routing, expand: bool) -> list[str]:
    """Renaming experts, and with them what they compute, leaves the layer's result as it was."""
    side = _Side(routing, rank, world, expand)
    names = torch.arange(1, routing.local_experts * world + 1)
    renamed = torch.randperm(len(names), generator=torch.Generator().manual_seed(len(names)))
    moved = torch.where(side.idx >= 0, renamed[side.idx.clamp_min(0)], -1)
    results = []
    for idx, factor_of in ((side.idx, names), (moved, names[renamed.argsort()])):
        recv, recv_idx, _, handle, _ = side.dispatch(idx)
        factors = side.factors(factor_of, recv_idx, handle, len(recv))
        results.append(side.buffer.combine(recv * factors[:, None], handle)[0])
    return [] if torch.equal(*results) else [f"rank {rank}: {results}"]


LAWS = {law.__name__: law for law in (ones_count, weights_return, cached_equals_fresh, permutation)}


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("expand", [False, True], ids=["token", "expert"])
@pytest.mark.parametrize("law", LAWS)
def test_law(ranks: RankPool, law: str, expand: bool) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(routing=routings(ranks.world))
    def holds(routing: Routing) -> None:
        assert [line for lines in ranks.run(LAWS[law], routing, expand, timeout=30) for line in lines] == []

    holds()
