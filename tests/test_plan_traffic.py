"""Expected copies against enumeration and simulation, bytes against DeepEP's published figures and against counting."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import RankPool

from megatron_moe_v2 import close_buffers, fused_dispatch, prepare_buffer
from megatron_moe_v2.cli.plan import make_plan
from megatron_moe_v2.cli.plan.memory import num_buffer_bytes
from megatron_moe_v2.cli.plan.model import PRESETS, Cluster, Model
from megatron_moe_v2.cli.plan.traffic import simulate, traffic
from megatron_moe_v2.cli.traffic import Clock, counted


def model(experts: int, topk: int, groups: int = 1, topk_groups: int = 1, hidden: int = 1024) -> Model:
    return Model(
        name="m",
        hidden=hidden,
        num_experts=experts,
        num_topk=topk,
        num_layers=1,
        expert_ffn=64,
        num_groups=groups,
        topk_groups=topk_groups,
    )


def counted_copies(selections: Any, sender: int, experts: int, ranks: int, per_node: int, etp: int) -> dict[str, Any]:
    """Rows own, within and between of one sender, mean over selections, one by one."""
    local = experts // (ranks // etp)
    node = sender // per_node
    totals = {name: np.zeros(3) for name in ("plain", "direct", "hybrid")}
    for chosen in selections:
        plain = [shard * etp + part for shard in (expert // local for expert in chosen) for part in range(etp)]
        direct = set(plain)
        for name, ranks_hit in (("plain", plain), ("direct", list(direct))):
            for rank in ranks_hit:
                totals[name][0 if rank == sender else 1 if rank // per_node == node else 2] += 1
        for other in {rank // per_node for rank in direct}:
            totals["hybrid"][2] += other != node
            rail = min(other * per_node + sender % per_node, ranks - 1)
            for rank in direct:
                if rank // per_node == other:
                    totals["hybrid"][0 if rank == rail else 1] += 1
    return {name: total / len(selections) for name, total in totals.items()}


CASES = {
    "one-rank": (8, 2, 1, 1, 1, 4, 1),
    "one-node": (8, 3, 1, 1, 4, 4, 1),
    "two-nodes": (8, 3, 1, 1, 4, 2, 1),
    "one-expert-each": (8, 2, 1, 1, 8, 4, 1),
    "groups-are-nodes": (12, 3, 3, 2, 6, 2, 1),
    "groups-within-a-rank": (12, 2, 6, 2, 3, 3, 1),
    "groups-across-ranks-unaligned": (12, 3, 4, 2, 6, 3, 1),
    "expert-tensor-parallel": (8, 2, 1, 1, 8, 4, 2),
    "expert-tensor-parallel-across-nodes": (8, 2, 1, 1, 8, 2, 4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_closed_form_equals_enumeration(case: tuple[int, ...]) -> None:
    experts, topk, groups, topk_groups, ranks, per_node, etp = case
    size = experts // groups
    selections = [
        chosen
        for taken in itertools.combinations(range(groups), topk_groups)
        for chosen in itertools.combinations(
            [e for group in taken for e in range(group * size, (group + 1) * size)], topk
        )
    ]
    every = [counted_copies(selections, rank, experts, ranks, per_node, etp) for rank in range(ranks)]
    cluster = Cluster(ranks=ranks, gpus_per_node=per_node, etp=etp)
    found = traffic(model(experts, topk, groups, topk_groups), cluster)
    for name in ("plain", "direct", "hybrid"):
        copies = getattr(found, name)
        mean = sum(one[name] for one in every) / ranks
        np.testing.assert_allclose([copies.own, copies.within, copies.between], mean, atol=1e-12, err_msg=name)
    assert found.received == pytest.approx(found.direct.total)


@pytest.mark.parametrize(
    ("name", "ranks", "per_node"),
    [("deepseek-v3", 64, 8), ("qwen3-30b-a3b", 16, 8), ("mixtral-8x7b", 8, 8), ("glm-4.5", 32, 4), ("kimi-k2", 2, 8)],
)
def test_closed_form_equals_simulation(name: str, ranks: int, per_node: int) -> None:
    """Random scores, as a router has them; the simulation of the package agrees too."""
    preset = PRESETS[name]
    cluster = Cluster(ranks=ranks, gpus_per_node=per_node)
    samples, size = 20000, preset.num_experts // preset.num_groups
    draw = np.random.default_rng(0)
    scores = draw.random((samples, preset.num_experts))
    if preset.num_groups > 1:
        taken = draw.random((samples, preset.num_groups)).argsort(1)[:, preset.topk_groups :]
        blocked = np.zeros((samples, preset.num_groups), bool)
        np.put_along_axis(blocked, taken, True, 1)
        scores[np.repeat(blocked, size, 1)] = -1
    chosen = scores.argsort(1)[:, -preset.num_topk :]
    rank = chosen // (preset.num_experts // ranks)

    def distinct(values: Any) -> float:
        ordered = np.sort(values, 1)
        return float((1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)).mean())

    found = traffic(preset, cluster)
    assert found.received == pytest.approx(distinct(rank), rel=0.01)
    assert found.nodes == pytest.approx(distinct(rank // per_node), rel=0.01)
    assert simulate(preset, cluster, 20000) == pytest.approx((found.received, found.nodes), rel=0.01)


@pytest.mark.parametrize(("nodes", "published"), [(2, 90), (4, 61)])
def test_time_agrees_with_published_bandwidth(nodes: int, published: float) -> None:
    """DeepEP's README: top-8 of 256, 8 GPUs a node, 400 Gb/s NICs, in rows for each node, its own included."""
    made = make_plan(model(256, 8, hidden=7168), Cluster(ranks=8 * nodes, seq_len=8192))
    assert made.copies is not None
    phase = made.phases["combine"]["expected"]
    logical = 8192 * made.copies.nodes * 7168 * 2 / phase.seconds / 1e9
    assert logical == pytest.approx(published, rel=0.03)


def test_worst_cases() -> None:
    found = traffic(model(64, 8), Cluster(ranks=16, gpus_per_node=8))
    assert (found.worst_received.within, found.worst_received.between) == (7, 8)
    assert (found.worst_sent.within, found.worst_sent.between) == (7, 1)
    limited = traffic(model(256, 8, 8, 4), Cluster(ranks=64, gpus_per_node=8))
    assert limited.worst_sent.between == 4
    assert traffic(model(256, 8), Cluster(ranks=64, gpus_per_node=8)).worst_sent.between == 7


def job_traffic(rank: int, world: int, experts: int, topk: int, hidden: int, fp8: bool) -> tuple[int, float, int, int]:
    """Bytes of a dispatch, rows received, and bytes of a combine, as counted."""
    torch.manual_seed(rank)
    group = dist.group.WORLD
    assert group is not None
    tokens = 2048
    prepare_buffer(group, hidden=hidden, num_topk=topk, num_max_tokens_per_rank=tokens)
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    topk_idx = torch.rand(tokens, experts).topk(topk, dim=1).indices
    from megatron_moe_v2 import fused_combine

    with counted(Clock(torch.device("cpu"))) as sent:
        recv_x, _, _, _, handle = fused_dispatch(x, topk_idx, torch.ones(tokens, topk), experts, group)
        dispatched = sent.sent_bytes
        sent.reset()
        fused_combine(recv_x, group, handle)
        combined = sent.sent_bytes
    close_buffers()
    return dispatched, recv_x.shape[0] / tokens, combined, tokens


@pytest.mark.parametrize(
    ("ranks", "experts", "topk", "hidden"),
    [(2, 16, 4, 2048), (4, 32, 8, 2048), (4, 8, 2, 4096)],
    indirect=["ranks"],
    ids=["2-ranks", "4-ranks", "4-ranks-top-2"],
)
def test_expected_bytes_equal_counted_bytes(ranks: RankPool, experts: int, topk: int, hidden: int) -> None:
    """The embedded buffer hands its own share to the collective as well."""
    results = ranks.run(job_traffic, experts, topk, hidden, False, timeout=120)
    cluster = Cluster(ranks=len(results), seq_len=2048)
    made = make_plan(model(experts, topk, hidden=hidden), cluster)
    assert made.copies is not None
    for place, phase in ((0, "dispatch"), (2, "combine")):
        expected = made.phases[phase]["expected"]
        mean = sum(one[place] for one in results) / len(results)
        assert expected.own + expected.within + expected.between == pytest.approx(mean, rel=0.02), phase
    rows = sum(one[1] for one in results) / len(results)
    assert made.copies.received == pytest.approx(rows, rel=0.02)


def test_buffer_grows_as_its_parts() -> None:
    """Two nodes of 8: the parts that DeepEP lays out, written out."""
    rows, hidden, topk, channels = 4096, 7168, 8, 1280
    dispatch_row, combine_row = hidden * 2 + 128, hidden * 2 + 64
    common: dict[str, Any] = {"hidden": hidden, "num_topk": topk, "num_max_tokens_per_rank": rows}
    cluster = Cluster(ranks=16, gpus_per_node=8)

    def rounded(value: int) -> int:
        return -(-value // 2097152) * 2097152

    hybrid = max(
        dispatch_row * (8 * 2 * rows + rows + 2 * (rows + channels)),
        combine_row * (8 * 2 * rows + 2 * rows + 2 * (rows + channels)),
    )
    assert num_buffer_bytes(cluster, **common) == rounded(hybrid)
    direct = max(dispatch_row * (16 * rows + rows), combine_row * (8 * rows + 16 * rows))
    assert num_buffer_bytes(cluster, hybrid=False, **common) == rounded(direct)
    single = max(dispatch_row * 17 * rows, combine_row * (8 * rows + 16 * rows * 8))
    assert num_buffer_bytes(cluster, hybrid=False, multiple_reduction=False, **common) == rounded(single)
