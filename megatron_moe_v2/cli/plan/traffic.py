"""How many copies of a token travel, and where to, when the router is balanced: closed forms, and a simulation.

A token selects K distinct experts, all sets of K equally likely; with groups, first all sets of groups. A set of m
experts out of E is then missed with probability C(E - m, K) / C(E, K), so a rank or a node gets the token, once, with
one minus that. Copies that stay on their own rank are counted apart: they use no link.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from .model import Cluster, Model

__all__ = ["Copies", "Traffic", "chance", "simulate", "traffic"]


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Rows for each token of a sender, mean over senders.

    Attributes:
        own: stay on the rank.
        within: cross NVLink.
        between: cross the network.
    """

    own: float
    within: float
    between: float

    @property
    def total(self) -> float:
        return self.own + self.within + self.between


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one dispatch; combine moves as many rows the other way.

    Attributes:
        plain: one row for each selected expert, as a plain all-to-all sends.
        direct: one row for each rank with a selected expert.
        hybrid: one row for each node with a selected expert, then one for each rank there, over NVLink.
        received: rows that a rank receives for each token of a rank, each token once; as many ranks receive a token.
        nodes: that receive a token.
        worst_sent: rows across each kind of link, all selections on different ranks, as far from home as there are;
            hybrid between nodes.
        worst_received: rows for each token of a rank that arrive where all tokens go to one rank.
    """

    plain: Copies
    direct: Copies
    hybrid: Copies
    received: float
    nodes: float
    worst_sent: Copies
    worst_received: Copies


@functools.cache
def chance(num_experts: int, num_topk: int, groups: int, topk_groups: int, members: tuple[int, ...]) -> float:
    """Probability that at least one of a set of experts is selected.

    Args:
        members: experts of the set in each group that has any.
    """
    size = num_experts // groups
    ways = {(0, 0): 1}  # groups of the set that are taken, and experts of the set in them
    for count in members:
        further: dict[tuple[int, int], int] = {}
        for (taken, covered), number in ways.items():
            for more in (0, 1):
                key = (taken + more, covered + more * count)
                further[key] = further.get(key, 0) + number
        ways = further
    others, within_reach = groups - len(members), size * topk_groups
    missed = sum(
        number * math.comb(others, topk_groups - taken) * math.comb(within_reach - covered, num_topk)
        for (taken, covered), number in ways.items()
        if taken <= topk_groups
    )
    return 1 - missed / (math.comb(groups, topk_groups) * math.comb(within_reach, num_topk))


def _members(first: int, end: int, size: int) -> tuple[int, ...]:
    """How many of the experts ``[first, end)`` lie in each group of ``size``."""
    groups = range(first // size, -(-end // size))
    return tuple(sorted(min(end, (group + 1) * size) - max(first, group * size) for group in groups))


def traffic(model: Model, cluster: Cluster) -> Traffic:
    """Expected and worst copies; ``ranks / etp`` must divide the experts."""
    ranks, nodes = cluster.ranks, cluster.nodes
    local = model.num_experts // (ranks // cluster.etp)
    size = model.num_experts // model.num_groups

    def hit(first: int, end: int) -> float:
        members = _members(first, end, size)
        return chance(model.num_experts, model.num_topk, model.num_groups, model.topk_groups, members)

    by_rank = [hit(rank // cluster.etp * local, (rank // cluster.etp + 1) * local) for rank in range(ranks)]
    by_node = [hit(node[0] // cluster.etp * local, (node[-1] // cluster.etp + 1) * local) for node in nodes]
    per_rank = model.num_topk * local / model.num_experts
    direct = _spread(by_rank, nodes)
    home = sum(len(node) * chance_of for node, chance_of in zip(nodes, by_node, strict=True)) / ranks
    total = sum(by_rank)
    at_rail = sum(sum(by_rank[rank] for rank in node) / len(node) for node in nodes)
    most = max(len(node) for node in nodes)
    copies = model.num_topk * cluster.etp
    far = min(model.num_topk, len(nodes) - 1)
    if model.topk_groups < model.num_groups and most // cluster.etp * local % size == 0:
        far = min(far, model.topk_groups)
    return Traffic(
        plain=_spread([per_rank] * ranks, nodes),
        direct=direct,
        hybrid=Copies(own=at_rail, within=total - at_rail, between=sum(by_node) - home),
        received=total,
        nodes=sum(by_node),
        worst_sent=Copies(own=0, within=min(copies, most - 1), between=far),
        worst_received=Copies(own=1, within=most - 1, between=ranks - most),
    )


def _spread(by_rank: Sequence[float], nodes: Sequence[range]) -> Copies:
    """Where copies go whose number is known for each destination, from a sender that is any rank."""
    ranks, total = len(by_rank), sum(by_rank)
    at_home = sum(len(node) * sum(by_rank[rank] for rank in node) for node in nodes) / ranks
    own = total / ranks
    return Copies(own=own, within=at_home - own, between=total - at_home)


def simulate(model: Model, cluster: Cluster, samples: int, seed: int = 0) -> tuple[float, float]:
    """Ranks and nodes that get a token, mean over random tokens, as a check of the closed form."""
    draw = random.Random(seed)
    local = model.num_experts // (cluster.ranks // cluster.etp)
    size = model.num_experts // model.num_groups
    ranks = nodes = 0
    for _ in range(samples):
        groups = draw.sample(range(model.num_groups), model.topk_groups)
        picks = draw.sample(range(size * model.topk_groups), model.num_topk)
        shards = {(groups[pick // size] * size + pick % size) // local for pick in picks}
        hit = {shard * cluster.etp + part for shard in shards for part in range(cluster.etp)}
        ranks += len(hit)
        nodes += len({rank // cluster.gpus_per_node for rank in hit})
    return ranks / samples, nodes / samples
