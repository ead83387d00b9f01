"""The embedded buffer as an object: attributes, sizes, queries, events, handle, life cycle."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from embedded_inputs import CEILING
from launch import Failure, RankPool

MIB = 2**20

DEFAULTS = {
    "num_bytes": None,
    "num_cpu_bytes": 0,
    "num_max_tokens_per_rank": 0,
    "hidden": 0,
    "num_topk": 0,
    "use_fp8_dispatch": False,
    "deterministic": False,
    "allow_hybrid_mode": True,
    "allow_multiple_reduction": True,
    "prefer_overlap_with_compute": True,
    "sl_idx": 3,
    "num_allocated_qps": 0,
    "num_cpu_timeout_secs": 300,
    "num_gpu_timeout_secs": 100,
    "explicitly_destroy": False,
}


DISPATCH = """x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts num_max_tokens_per_rank
expert_alignment num_sms num_qps previous_event previous_event_before_epilogue async_with_compute_stream
allocate_on_comm_stream handle do_handle_copy do_cpu_sync do_expand do_zero_padding use_tma_aligned_col_major_sf"""

COMBINE = """x handle topk_weights bias num_sms num_qps previous_event previous_event_before_epilogue
async_with_compute_stream allocate_on_comm_stream"""


def test_signatures_are_those_of_the_contract() -> None:
    from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer as Buffer

    own = list(inspect.signature(Buffer).parameters.values())
    assert [p.name for p in own[:16]] == ["group", *DEFAULTS]
    assert {p.name: p.default for p in own[1:16]} == DEFAULTS
    assert all(p.kind is p.KEYWORD_ONLY for p in own[16:])
    for method, names in (
        (Buffer.dispatch, DISPATCH),
        (Buffer.combine, COMBINE),
        (Buffer.barrier, "use_comm_stream with_cpu_sync sequential"),
    ):
        assert list(inspect.signature(method).parameters)[1:] == names.split()


def attributes(rank: int, world: int) -> None:
    from embedded_cases import buffer_of

    buffer = buffer_of(allow_hybrid_mode=False, num_allocated_qps=5, deterministic=True, explicitly_destroy=True)
    expected = {
        "group": dist.group.WORLD,
        "rank_idx": rank,
        "num_ranks": world,
        "allow_hybrid_mode": False,
        "allow_multiple_reduction": True,
        "prefer_overlap_with_compute": True,
        "deterministic": True,
        "num_max_tokens_per_rank": CEILING,
        "num_allocated_qps": 5,
        "explicitly_destroy": True,
        "num_bytes": 2 * MIB,
        "num_scaleout_ranks": 1,
        "num_scaleup_ranks": world,
        "scaleout_rank_idx": 0,
        "scaleup_rank_idx": rank,
    }
    assert {name: getattr(buffer, name) for name in expected} == expected
    assert buffer.runtime is not None
    assert hasattr(buffer, "nccl_comm_handle")
    assert buffer.get_logical_domain_size() == (1, world)
    assert buffer.get_physical_domain_size() == (buffer.num_rdma_ranks, buffer.num_nvlink_ranks)
    assert buffer.num_rdma_ranks * buffer.num_nvlink_ranks == world
    assert buffer_of(num_bytes=6 * MIB, num_max_tokens_per_rank=0, hidden=0, num_topk=0).num_bytes == 6 * MIB
    assert [buffer_of(allow_hybrid_mode=hybrid).num_allocated_qps for hybrid in (True, False)] == [129, 17]


def queries(rank: int, world: int) -> None:
    from embedded_cases import buffer_of

    direct, hybrid = buffer_of(allow_hybrid_mode=False), buffer_of()
    sms = direct.get_theoretical_num_sms(8 * world, 4)
    assert isinstance(sms, int)
    assert sms >= 4
    assert sms % 2 == 0
    assert direct.get_theoretical_num_sms(8 * world, 4) == sms
    assert [direct.get_theoretical_num_qps(n) for n in (4, 9, 24)] == [4, 9, 9]
    assert [hybrid.get_theoretical_num_qps(n) for n in (4, 8, 24)] == [65, 129, 129]
    assert buffer_of(allow_hybrid_mode=False, num_allocated_qps=2).get_theoretical_num_qps(24) == 2
    direct.get_comm_stream()
    for options in ({}, {"use_comm_stream": False}, {"with_cpu_sync": True, "sequential": False}):
        direct.barrier(**options)
    if world > 1:
        with pytest.raises(ValueError, match="num_experts"):
            direct.get_theoretical_num_sms(8 * world + 1, 4)


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("job", [attributes, queries], ids=lambda job: job.__name__)
def test_construction(ranks: RankPool, job: Any) -> None:
    ranks.run(job)


def size(rank: int, world: int, *arguments: Any) -> tuple[int, int]:
    """Size hint, and what a buffer of these sizes reports."""
    from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer

    assert dist.group.WORLD is not None
    tokens, hidden, topk, fp8, reduction = arguments
    hint = EmbeddedElasticBuffer.get_buffer_size_hint(dist.group.WORLD, tokens, hidden, topk, fp8, True, reduction)
    buffer = EmbeddedElasticBuffer(
        dist.group.WORLD,
        num_max_tokens_per_rank=tokens,
        hidden=hidden,
        num_topk=topk,
        use_fp8_dispatch=fp8,
        allow_multiple_reduction=reduction,
    )
    return hint, buffer.num_bytes


def _bytes(world: int, tokens: int, hidden: int, topk: int, fp8: bool, reduction: bool) -> int:
    def up(value: int, unit: int) -> int:
        return (value + unit - 1) // unit * unit

    topk = topk or 32
    row = hidden + up(4 * up(hidden, 32) // 32, 32) if fp8 else 2 * hidden
    dispatch = world * tokens * (row + up(12 * topk + 4, 32))
    combine = (min(world, topk) if reduction else topk) * tokens * (2 * hidden + up(8 * topk, 32))
    return up(max(dispatch, combine), 2 * MIB)


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
def test_sizes_follow_the_closed_form(ranks: RankPool) -> None:
    for case in (
        (4096, 2048, 8, False, True),
        (4096, 2048, 8, True, True),
        (8192, 7168, 0, False, True),
        (1000, 7168, 8, False, False),
        (777, 1000, 3, True, False),
        (1, 16, 1, False, True),
    ):
        assert ranks.run(size, *case) == [(_bytes(ranks.world, *case),) * 2] * ranks.world


@pytest.mark.parametrize(("ranks", "measured"), [(1, 18_874_368), (2, 35_651_584)], indirect=["ranks"])
def test_sizes_equal_those_measured_on_the_real_buffer(ranks: RankPool, measured: int) -> None:
    assert ranks.run(size, 4096, 2048, 8, False, True)[0] == (measured, measured)


def handle_and_events(rank: int, world: int) -> None:
    from embedded_cases import buffer_of

    buffer = buffer_of()
    x, idx = torch.ones(4, 8), torch.arange(4)[:, None] % world
    copied = buffer.dispatch(x, idx, num_experts=world)[3]
    shared = buffer.dispatch(x, idx, num_experts=world, do_handle_copy=False)[3]
    assert copied.topk_idx is not idx
    assert shared.topk_idx is idx
    assert copied.num_sms > 0
    assert copied.expert_alignment == 1
    idx.fill_(-1)
    assert buffer.dispatch(x, handle=copied)[0].shape[0] == copied.num_recv_tokens
    assert buffer.dispatch(x, handle=copied, num_sms=30)[3] is copied
    assert copied.num_sms != 30
    recv, *_, event = buffer.dispatch(x, handle=copied, async_with_compute_stream=True)
    event.current_stream_wait()
    with event(release_handle=True):
        pass
    assert event.event is None
    captured = buffer.capture()
    combined, _, event = buffer.combine(
        recv, copied, previous_event=captured, allocate_on_comm_stream=True, async_with_compute_stream=True, num_sms=8
    )
    event.current_stream_wait(release_handle=True)
    assert combined.tolist() == x.tolist()
    x.fill_(5.0)
    assert recv.eq(1).all(), "what was received must not change with what was sent"
    recv.fill_(7.0)
    assert combined.eq(1).all(), "what was combined must not change with what was returned"


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_handle_and_events(ranks: RankPool) -> None:
    ranks.run(handle_and_events)


def results_last(rank: int, world: int) -> None:
    """No result is scratch memory that a later call overwrites."""
    from embedded_cases import buffer_of

    buffer = buffer_of()
    idx, kept = torch.arange(6).view(3, 2) % (2 * world), []
    for call in range(3):
        x, weights = torch.full((3, 8), float(call)), torch.full((3, 2), call + 0.5)
        for expand in (False, True):
            recv, recv_idx, recv_weights, handle, _ = buffer.dispatch(
                x, idx, weights, num_experts=2 * world, do_expand=expand
            )
            again = buffer.dispatch(x, topk_weights=weights, handle=handle, do_expand=expand)
            combined, combined_weights, _ = buffer.combine(recv, handle, topk_weights=recv_weights)
            results = [recv, recv_weights, *again[:3], recv_idx, combined, combined_weights]
            tensors = [each for each in results + list(vars(handle).values()) if isinstance(each, torch.Tensor)]
            kept += [(each, each.clone()) for each in tensors]
    assert all(each.is_contiguous() for each, _ in kept)
    assert all(torch.equal(each, copy) for each, copy in kept)


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_results_outlive_later_calls(ranks: RankPool) -> None:
    ranks.run(results_last)


def destroy(rank: int, world: int) -> dict[str, Failure]:
    """What is raised by destroying without leave, and by every call on a destroyed buffer."""
    from embedded_cases import buffer_of

    x, idx = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64)
    kept, gone = buffer_of(), buffer_of(explicitly_destroy=True)
    recv, *_, handle, _ = gone.dispatch(x, idx, num_experts=world)
    gone.destroy()
    gone.destroy()
    assert gone.runtime is None
    calls = {
        "destroy": kept.destroy,
        "dispatch": lambda: gone.dispatch(x, idx, num_experts=world),
        "cached dispatch": lambda: gone.dispatch(x, handle=handle),
        "combine": lambda: gone.combine(recv, handle),
        "barrier": gone.barrier,
    }
    raised = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            raised[name] = Failure.of(error)
    kept.dispatch(x, idx, num_experts=world)
    return raised


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_destroy_needs_leave_and_ends_everything(ranks: RankPool) -> None:
    for raised in ranks.run(destroy):
        assert raised.pop("destroy").isa("MoEError")
        assert {name: failure.type_name for name, failure in raised.items()} == dict.fromkeys(
            ["dispatch", "cached dispatch", "combine", "barrier"], "BufferClosedError"
        )


def subgroup(rank: int, world: int) -> Any:
    """Two buffers of two disjoint groups of two; ranks are the group's own."""
    from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer

    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    buffer: Any = EmbeddedElasticBuffer(groups[rank % 2], num_max_tokens_per_rank=4, hidden=8)
    recv, *_ = buffer.dispatch(torch.full((1, 1), float(rank)), torch.tensor([[0, 1]]), num_experts=2)
    return buffer.rank_idx, buffer.num_ranks, recv.flatten().tolist()


def test_a_subgroup_has_its_own_ranks(ranks4: RankPool) -> None:
    assert ranks4.run(subgroup) == [
        (0, 2, [0.0, 2.0]),
        (0, 2, [1.0, 3.0]),
        (1, 2, [0.0, 2.0]),
        (1, 2, [1.0, 3.0]),
    ]
