"""The embedded buffer's dispatch, cached dispatch and combine against the oracle, and what the oracle does not say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from embedded_inputs import CEILING, Case
from launch import RankPool
from torch import Tensor

WORLDS = [1, 2, 4]
LAYOUTS = [False, True]
TOKENS = ["even", "ragged", "first empty", "last empty", "all empty", "full"]
ROUTINGS = ["random", "one rank", "one expert", "idle experts", "masked", "all masked"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def product(**choices: list[Any]) -> Iterator[Case]:
    """A case for each combination; numbered seeds."""
    for seed, values in enumerate(itertools.product(*choices.values())):
        case = dict(zip(choices, values, strict=True))
        if case.get("expand") or not (case.get("zero_padding") or case.get("multiple_reduction") is False):
            yield Case(**({"seed": seed} | case))


CASES = {
    "dtypes": [*product(dtype=DTYPES, expand=LAYOUTS, sync=[True, False], bias=[2], topk=[4])],
    "alignment": [
        *product(alignment=[1, 8, 128], expand=LAYOUTS, sync=[True, False], zero_padding=[False, True]),
        *product(alignment=[8], expand=[True], tokens=["first empty"], zero_padding=[True], routing=ROUTINGS),
    ],
    "tokens": [*product(tokens=TOKENS, expand=LAYOUTS, sync=[True, False])],
    "routing": [
        *product(routing=ROUTINGS, expand=LAYOUTS, sync=[True, False], alignment=[4]),
        *product(routing=["one rank"], tokens=["full"], expand=LAYOUTS, sync=[True, False]),
        *product(routing=["repeated"], topk=[4], expand=LAYOUTS, alignment=[4]),
    ],
    "weights and bias": [*product(weights=[True, False], bias=[0, 1, 2], expand=LAYOUTS)],
    "reduction": [*product(multiple_reduction=[True, False], expand=[True], sync=[True, False], topk=[6], bias=[0, 2])],
    "scales": [
        *product(
            scales=[torch.float32, torch.int32],
            sf_layout=["rows", "columns", "every other"],
            tma=[False, True],
            expand=LAYOUTS,
        ),
        *product(scales=[torch.float32], tma=[True], expand=LAYOUTS, sync=[False], zero_padding=[False, True]),
        *product(scales=[torch.int32], tma=[True], expand=LAYOUTS, tokens=["all empty"]),
    ],
    "sizes": [
        *product(topk=[1, 8], local_experts=[1, 8], hidden=[1, 7, 32], expand=LAYOUTS),
        *product(topk=[8], local_experts=[8], dtype=DTYPES, tokens=["full"], expand=LAYOUTS),
        *product(tokens=["many"], topk=[3], expand=LAYOUTS, bias=[2], routing=["masked"]),
    ],
    "adversary": [
        *product(adversary=[7], expand=LAYOUTS, sync=[True, False], alignment=[1, 8], zero_padding=[False, True]),
        *product(adversary=[7], expand=LAYOUTS, sync=[True, False], dtype=DTYPES, routing=["masked"], bias=[1]),
        *product(adversary=[8], expand=LAYOUTS, tokens=TOKENS),
        *product(adversary=[9], expand=LAYOUTS, sync=[False], scales=[torch.float32, torch.int32], tma=[False, True]),
        *product(adversary=[7], expand=[True], multiple_reduction=[False], topk=[6]),
    ],
    "deterministic": [*product(deterministic=[True], adversary=[None, 3], expand=LAYOUTS, sync=[True, False])],
}


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
@pytest.mark.parametrize("group", CASES)
def test_equals_the_oracle(ranks: RankPool, group: str) -> None:
    from embedded_cases import check_cases

    wrong = [line for lines in ranks.run(check_cases, CASES[group]) for line in lines]
    assert not wrong, "\n".join([f"{len(wrong)} findings in {len(CASES[group])} cases", *wrong[:12]])


# One sum worked out by hand, since the oracle could share a misreading.


def sum_in_order(rank: int, world: int, expand: bool) -> Tensor:
    """Token 0 of rank 0 gets 2**24 from rank 1 at lane 0 and -2**24 from rank 0 at lanes 1 and 2, over a bias of 1."""
    from embedded_cases import buffer_of

    own = torch.tensor([[2, 0, 1]]) if rank == 0 else torch.empty(0, 3, dtype=torch.int64)
    buffer = buffer_of()
    x = torch.zeros(len(own), 1)
    recv, *_, handle, _ = buffer.dispatch(x, own, num_experts=4, num_max_tokens_per_rank=CEILING, do_expand=expand)
    recv[:] = 2.0**24 if rank else -(2.0**24) / (2 if expand else 1)
    combined: Tensor = buffer.combine(recv, handle, bias=torch.ones(len(own), 1))[0]
    return combined


@pytest.mark.parametrize("expand", LAYOUTS)
def test_bias_first_then_ranks_by_their_last_selection(ranks2: RankPool, expand: bool) -> None:
    combined = ranks2.run(sum_in_order, expand)[0]
    assert combined.tolist() == [[0.0]]  # 1 + 2**24 loses the 1; the other order would keep it


def round_once(rank: int, world: int, reduce_first: bool) -> Tensor:
    """1 and three times 3 * 2**-9, in bf16, from experts of rank 0."""
    from embedded_cases import buffer_of

    buffer = buffer_of(allow_multiple_reduction=reduce_first)
    recv, *_, handle, _ = buffer.dispatch(
        torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([[0, 1, 2, 3]]), num_experts=4 * world, do_expand=True
    )
    recv[:] = 3 * 2.0**-9
    recv[:1] = 1.0
    combined: Tensor = buffer.combine(recv, handle)[0]
    return combined


@pytest.mark.parametrize("reduce_first", [True, False])
def test_sums_round_once(ranks1: RankPool, reduce_first: bool) -> None:
    (combined,) = ranks1.run(round_once, reduce_first)
    assert combined.item() == 1 + 2 * 2.0**-7  # 1 + 9 * 2**-9 to the nearest; each step rounded gives 1 + 3 * 2**-7


# Bits that arithmetic would change.


def odd_bits(rank: int, world: int, dtype: torch.dtype, expand: bool) -> tuple[bool, Tensor]:
    """Send every token to rank 0: NaN payloads and -0.0, then combine -0.0."""
    from embedded_cases import buffer_of, same_bits

    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    least = torch.iinfo(integers).min
    x = torch.tensor([[-1, -2, least, least + 1, 1, torch.iinfo(integers).max]], dtype=integers).view(dtype)
    weights = torch.tensor([[-1]], dtype=torch.int64 if dtype == torch.float64 else torch.int32)
    weights = weights.view(torch.float64 if dtype == torch.float64 else torch.float32)
    buffer = buffer_of()
    recv, _, recv_weights, handle, _ = buffer.dispatch(
        x, torch.tensor([[0]]), weights, num_experts=world, do_expand=expand
    )
    rows = world if rank == 0 else 0
    same = same_bits(recv, x.expand(rows, -1)) and same_bits(recv_weights.flatten(), weights[0].expand(rows))
    return same, buffer.combine(torch.full_like(recv, -0.0), handle)[0]


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
@pytest.mark.parametrize("expand", LAYOUTS)
def test_dispatch_moves_bits_and_combine_starts_at_plus_zero(ranks: RankPool, expand: bool) -> None:
    for dtype in DTYPES:
        for same, combined in ranks.run(odd_bits, dtype, expand):
            assert same
            assert not bool(combined.ne(0).any())
            assert not bool(combined.signbit().any())


def odd_sizes(rank: int, world: int, dtype: torch.dtype, expand: bool) -> list[int]:
    """Hidden sizes at which tokens do not come back as often as they were sent."""
    from embedded_cases import buffer_of

    wrong = []
    for hidden in (1, 3, 4, 7, 255):
        buffer = buffer_of(hidden=255)
        x = torch.arange(1, 1 + 2 * hidden).view(2, hidden).remainder(7).to(dtype)
        idx = torch.arange(world).repeat(2, 1)
        rows, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=world, do_expand=expand)
        if not torch.equal(buffer.combine(rows, handle)[0], world * x):
            wrong.append(hidden)
    return wrong


@pytest.mark.parametrize("expand", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_hidden_size_travels(ranks2: RankPool, dtype: torch.dtype, expand: bool) -> None:
    assert ranks2.run(odd_sizes, dtype, expand) == [[], []]


def orders(rank: int, world: int, expand: bool, deterministic: bool) -> list[list[int]]:
    """First feature of the received rows in four equal dispatches of one adversarial buffer."""
    from embedded_cases import buffer_of

    buffer = buffer_of(adversary=5, deterministic=deterministic)
    idx = torch.arange(10)[:, None] % world
    x = (torch.arange(10.0) + 10 * rank)[:, None]
    return [buffer.dispatch(x, idx, num_experts=world, do_expand=expand)[0][:, 0].tolist() for _ in range(4)]


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
@pytest.mark.parametrize("expand", LAYOUTS)
def test_the_adversary_changes_the_order_from_call_to_call(ranks: RankPool, expand: bool) -> None:
    for calls in ranks.run(orders, expand, False):
        assert len({tuple(call) for call in calls}) > 1
        assert {tuple(sorted(call)) for call in calls} == {tuple(sorted(calls[0]))}
    for calls in ranks.run(orders, expand, True):
        assert all(call == sorted(call) for call in calls)


def statistics(rank: int, world: int) -> None:
    from embedded_cases import buffer_of

    buffer = buffer_of()
    stats = torch.tensor([100, 200], dtype=torch.int32)
    idx = torch.tensor([[0, 1], [1, 3 % (2 * world)]])
    for times, expand in enumerate(LAYOUTS, start=1):
        *_, handle, _ = buffer.dispatch(
            torch.zeros(2, 4), idx, None, stats, 2 * world, expert_alignment=8, do_expand=expand
        )
        counts = handle.num_unaligned_recv_tokens_per_expert
        assert stats.tolist() == (torch.tensor([100, 200]) + times * counts).tolist()
        assert counts.tolist() == ([1, 3] if world == 1 else [world, 2 * world] if rank == 0 else [0, world])


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_receive_statistics_are_added_in_place_and_exact(ranks: RankPool) -> None:
    ranks.run(statistics)


def collectives(rank: int, world: int, expand: bool) -> list[list[str]]:
    """Names of the collectives that dispatch, cached dispatch and combine issue."""
    from embedded_cases import buffer_of

    buffer = buffer_of()
    x, idx, weights = torch.zeros(5, 8), torch.arange(10).view(5, 2) % (2 * world), torch.ones(5, 2)
    names: list[list[str]] = []

    def profiled(call: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = call()
        names.append([event.name for event in profile.events() if event.name.startswith("c10d::")])
        return result

    recv, _, _, handle, _ = profiled(
        lambda: buffer.dispatch(x, idx, weights, num_experts=2 * world, do_expand=expand, expert_alignment=4)
    )
    profiled(lambda: buffer.dispatch(x, topk_weights=weights, handle=handle, do_expand=expand))
    profiled(lambda: buffer.combine(recv, handle))
    return names


@pytest.mark.parametrize("expand", LAYOUTS)
def test_two_collectives_a_call_and_none_at_one_rank(ranks1: RankPool, ranks2: RankPool, expand: bool) -> None:
    assert ranks1.run(collectives, expand) == [[[], [], []]]
    for names in ranks2.run(collectives, expand):
        assert [len(call) for call in names] == [2, 2, 2]


def shortened_metadata(rank: int, world: int) -> Tensor:
    """Without CPU sync the caller may cut rows and metadata to what was received."""
    from embedded_cases import buffer_of

    buffer = buffer_of()
    idx = torch.arange(6)[:, None] % world
    recv, *_, handle, _ = buffer.dispatch(torch.ones(6, 4), idx, num_experts=world, do_cpu_sync=False)
    count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    handle.recv_src_metadata = handle.recv_src_metadata[:count]
    combined: Tensor = buffer.combine(recv[:count], handle)[0]
    return combined


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_metadata_may_be_cut_to_the_received_rows(ranks: RankPool) -> None:
    for combined in ranks.run(shortened_metadata):
        assert torch.equal(combined, torch.ones(6, 4))


def expert_layout_rows(rank: int, world: int) -> list[Tensor]:
    """Combine with the slots alone, and with rows to spare."""
    from embedded_cases import buffer_of

    buffer = buffer_of(adversary=1)
    idx = torch.arange(5)[:, None] % world
    recv, *_, handle, _ = buffer.dispatch(
        torch.ones(5, 4), idx, num_experts=world, do_cpu_sync=False, do_expand=True, expert_alignment=8
    )
    last = int(handle.psum_num_recv_tokens_per_expert[-1])
    longer = torch.cat([recv, torch.full((3, 4), torch.nan)])
    return [buffer.combine(x, handle)[0] for x in (recv, longer, recv[: max(last, 1) + 2])]


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_the_expert_layout_may_have_more_rows_than_slots(ranks: RankPool) -> None:
    for combined in ranks.run(expert_layout_rows):
        assert all(torch.equal(each, torch.ones(5, 4)) for each in combined)


def token_layout_of_an_expert_handle(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """An expert handle holds the routing of both layouts."""
    from embedded_cases import buffer_of

    buffer = buffer_of()
    idx = torch.tensor([[0, world - 1], [-1, 0]])
    *_, handle, _ = buffer.dispatch(torch.ones(2, 4), idx, num_experts=world, do_expand=True)
    recv, recv_idx, *_ = buffer.dispatch(torch.full((2, 4), rank + 1.0), handle=handle)
    return recv[:, 0], recv_idx, handle.psum_num_recv_tokens_per_scaleup_rank


def test_a_handle_of_the_expert_layout_serves_the_token_layout(ranks2: RankPool) -> None:
    (first, first_idx, first_psum), (second, second_idx, second_psum) = ranks2.run(token_layout_of_an_expert_handle)
    assert (first.tolist(), first_idx.tolist(), first_psum.tolist()) == (
        [1.0, 1.0, 2.0, 2.0],
        [[0, -1], [-1, 0]] * 2,
        [2, 4],
    )
    assert (second.tolist(), second_idx.tolist(), second_psum.tolist()) == ([1.0, 2.0], [[-1, 0]] * 2, [1, 2])
