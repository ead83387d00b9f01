"""The permutation arithmetic against loops in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import accumulate
from torch import Tensor

from megatron_moe_v2.buffers import layout

EXAMPLES = settings(max_examples=60)


@dataclass(frozen=True)
class Routing:
    """Rows of selections: an expert from 0 to ``num_experts`` or a negative number."""

    rows: list[list[int]]
    topk: int
    num_experts: int
    ranks: int

    @property
    def tensor(self) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int64).view(-1, self.topk)

    def home(self, expert: int) -> int:
        return expert // (self.num_experts // self.ranks)


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    ranks, local, topk = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    row = st.lists(st.integers(-2, ranks * local - 1), min_size=topk, max_size=topk)
    return Routing(draw(st.lists(row, max_size=6)), topk, ranks * local, ranks)


@st.composite
def rows_and_index(draw: st.DrawFn) -> tuple[list[int], int]:
    count = draw(st.integers(1, 6))
    return draw(st.lists(st.integers(0, count - 1), max_size=8)), count


def aligned(count: int, alignment: int) -> int:
    while count % alignment:
        count += 1
    return count


@EXAMPLES
@given(routings())
def test_owners(routing: Routing) -> None:
    want = [[routing.home(e) if e >= 0 else routing.ranks for e in row] for row in routing.rows]
    assert layout.owners(routing.tensor, routing.num_experts, routing.ranks).tolist() == want


def check_sent(to: layout.Destinations, want: list[tuple[int, int, int]], routing: Routing) -> None:
    """``want``: (rank, token, lane) in the order of sending."""
    assert to.rank.tolist() == [rank for rank, _, _ in want]
    assert to.token.tolist() == [token for _, token, _ in want]
    assert to.lane.tolist() == [lane for _, _, lane in want]
    assert to.counts == [sum(rank == each for rank, _, _ in want) for each in range(routing.ranks)]
    table = [[-1] * routing.topk for _ in routing.rows]
    from_rank = [[-1] * (routing.ranks + 1) for _ in routing.rows]
    for number, (rank, token, lane) in enumerate(want):
        table[token][lane] = number
        from_rank[token][rank] = number
    assert to.table(len(routing.rows), routing.topk).tolist() == table
    if len({(rank, token) for rank, token, _ in want}) == len(want):
        assert to.row_from_rank(len(routing.rows), routing.ranks).tolist() == from_rank


@EXAMPLES
@given(routings())
def test_destinations(routing: Routing) -> None:
    want = []
    for rank in range(routing.ranks):
        for token, row in enumerate(routing.rows):
            lanes = [k for k, expert in enumerate(row) if expert >= 0 and routing.home(expert) == rank]
            want += [(rank, token, max(lanes))] if lanes else []
    check_sent(layout.destinations(routing.tensor, routing.num_experts, routing.ranks), want, routing)


@EXAMPLES
@given(routings())
def test_selections(routing: Routing) -> None:
    want = [
        (rank, token, lane)
        for rank in range(routing.ranks)
        for token, row in enumerate(routing.rows)
        for lane, expert in enumerate(row)
        if expert >= 0 and routing.home(expert) == rank
    ]
    check_sent(layout.selections(routing.tensor, routing.num_experts, routing.ranks), want, routing)


@EXAMPLES
@given(routings(), st.integers(1, 5), st.one_of(st.none(), st.randoms(use_true_random=False)))
def test_expert_slots_and_their_rows(routing: Routing, alignment: int, shuffle: object) -> None:
    local = routing.tensor
    total = local.numel()
    order = list(range(total))
    if shuffle is not None:
        shuffle.shuffle(order)  # type: ignore[attr-defined]
    flat = local.flatten().tolist()
    counts = [flat.count(expert) for expert in range(routing.num_experts)]
    sizes = [aligned(count, alignment) for count in counts]
    want, places = [-1] * total, [-1] * sum(sizes)
    for expert in range(routing.num_experts):
        start = sum(sizes[:expert])
        for number, position in enumerate(p for p in order if flat[p] == expert):
            want[position] = start + number
            places[start + number] = position
    given_order = None if shuffle is None else torch.tensor(order, dtype=torch.int64)
    got = layout.expert_slots(local, routing.num_experts, alignment, given_order)
    assert got.slots.flatten().tolist() == want
    assert got.slots.shape == local.shape
    assert got.counts.tolist() == counts
    assert got.aligned.tolist() == layout.align_counts(got.counts, alignment).tolist() == sizes
    assert layout.rows_of_slots(got.slots, sum(sizes)).tolist() == places
    assert layout.rows_of_slots(got.slots.int(), sum(sizes)).tolist() == places


@EXAMPLES
@given(st.permutations(range(7)))
def test_invert(permutation: Sequence[int]) -> None:
    inverse = layout.invert(torch.tensor(permutation)).tolist()
    assert [permutation[place] for place in inverse] == list(range(7))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EXAMPLES
@given(rows_and_index(), st.integers(1, 9), st.integers(0, 3))
def test_gather_rows_moves_bits(dtype: torch.dtype, index: tuple[list[int], int], hidden: int, offset: int) -> None:
    chosen, count = index
    wide = torch.randint(0, 255, (count, (hidden + offset) * dtype.itemsize), dtype=torch.uint8).view(dtype)
    rows = wide[:, offset:]
    want = torch.tensor([[*rows.contiguous().view(torch.uint8)[row].tolist()] for row in chosen], dtype=torch.uint8)
    target = torch.zeros(len(chosen), hidden + 2, dtype=torch.uint8).repeat_interleave(dtype.itemsize, 1).view(dtype)
    out = layout.gather_rows(rows, torch.tensor(chosen, dtype=torch.int64), target[:, 1 : hidden + 1])
    for got in (out, layout.gather_rows(rows, torch.tensor(chosen, dtype=torch.int64))):
        assert got.shape == (len(chosen), hidden)
        assert got.dtype == dtype
        assert torch.equal(got.contiguous().view(torch.uint8), want.view(len(chosen), hidden * dtype.itemsize))
    edges = target[:, [0, hidden + 1]] if dtype != torch.float8_e4m3fn else target.view(torch.uint8)[:, [0, hidden + 1]]
    assert not edges.any()


@EXAMPLES
@given(st.lists(st.integers(-2, 3), max_size=6), st.sampled_from([0, 4]))
def test_pick(index: list[int], count: int) -> None:
    values, index = torch.arange(1.0, count + 1), [each if count else -1 for each in index]
    want = [float(values[each]) if each >= 0 else 0.0 for each in index]
    assert layout.pick(values, torch.tensor(index, dtype=torch.int64)).tolist() == want


@EXAMPLES
@given(st.lists(st.lists(st.integers(-2, 3), min_size=3, max_size=3), max_size=5), st.sampled_from([0, 4]))
def test_pick_lanes(table: list[list[int]], count: int) -> None:
    values = torch.arange(1.0, 3 * count + 1).view(count, 3)
    table = [[each if count else -1 for each in row] for row in table]
    want = [[float(values[each, lane]) if each >= 0 else 0.0 for lane, each in enumerate(row)] for row in table]
    got = layout.pick_lanes(values, torch.tensor(table, dtype=torch.int64).view(-1, 3))
    assert got.tolist() == want


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@EXAMPLES
@given(
    st.lists(st.lists(st.integers(-1, 5), min_size=4, max_size=4), max_size=5), st.integers(0, 2), st.integers(0, 2**16)
)
def test_sum_rows_adds_in_order_and_rounds_once(
    dtype: torch.dtype, table: list[list[int]], biases: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)

    def spread(*shape: int) -> Tensor:
        scale = torch.randint(-6, 7, shape, generator=draw).double().exp2()
        return (torch.randn(*shape, generator=draw, dtype=torch.float64) * scale).to(dtype)

    rows, bias = spread(6, 5), tuple(spread(len(table), 5) for _ in range(biases))
    lines = [[each[t] for each in bias] + [rows[r] for r in line if r >= 0] for t, line in enumerate(table)]
    want = torch.stack([accumulate(line, rows) for line in lines]) if lines else rows.new_empty(0, 5)
    index = torch.tensor(table, dtype=torch.int64).view(-1, 4)
    out = torch.full((len(table), 7), 9.0, dtype=dtype)
    layout.sum_rows(rows, index, bias=bias, out=out[:, 1:6])
    assert torch.equal(out[:, 1:6], want)
    assert out[:, [0, 6]].eq(9).all()
    assert torch.equal(layout.sum_rows(rows, index, bias=bias), want)


def test_sum_rows_over_many_blocks() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 3, generator=draw, dtype=torch.float64)
    table = torch.randint(-1, 500, (700, 5), generator=draw)
    want = torch.stack([rows[[r for r in line if r >= 0]].sum(0) for line in table.tolist()])
    assert torch.allclose(layout.sum_rows(rows, table), want, rtol=0, atol=1e-13)
