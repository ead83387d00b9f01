"""How buffer, bytes and time grow with the number of ranks, and a picture of it."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BackendError
from . import Bandwidths, Plan, make_plan
from .model import Cluster, Model
from .text import amount
from .traffic import simulate

__all__ = ["Point", "as_json", "draw", "sweep", "table"]

LARGEST = 2048
SAMPLES = 4000


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number of ranks.

    Attributes:
        num_experts: of the model, or rounded up to a multiple of the ranks.
        ranks_of_token, nodes_of_token: that receive a token, by the closed form.
        simulated: the same two, mean over random tokens.
        within, between, plain_between: bytes that a rank sends in a dispatch and a combine.
        seconds, plain_seconds: of a dispatch and a combine.
        hit: limits that are exceeded.
    """

    ranks: int
    nodes: int
    num_experts: int
    num_buffer_bytes: int
    ranks_of_token: float
    nodes_of_token: float
    simulated: tuple[float, float]
    within: float
    between: float
    plain_between: float
    seconds: float
    plain_seconds: float
    hit: list[str]


def sweep(model: Model, cluster: Cluster, **options: Any) -> list[Point]:
    """Powers of two up to 2048 ranks; arguments as :func:`make_plan`. Experts are added where they do not divide."""
    counts = [2**power for power in range(LARGEST.bit_length()) if 2**power % cluster.etp == 0]
    return [_point(model, dataclasses.replace(cluster, ranks=ranks), options) for ranks in counts]


def _point(model: Model, cluster: Cluster, options: dict[str, Any]) -> Point:
    shards = cluster.ranks // cluster.etp
    experts = -(-model.num_experts // shards) * shards
    if experts != model.num_experts:
        grouped = experts % model.num_groups == 0
        groups = (model.num_groups, model.topk_groups) if grouped else (1, 1)
        model = dataclasses.replace(model, num_experts=experts, num_groups=groups[0], topk_groups=groups[1])
    made = make_plan(model, cluster, **options)
    copies = made.copies
    assert copies is not None
    return Point(
        ranks=cluster.ranks,
        nodes=len(cluster.nodes),
        num_experts=experts,
        num_buffer_bytes=made.num_buffer_bytes,
        ranks_of_token=copies.received,
        nodes_of_token=copies.nodes,
        simulated=simulate(model, cluster, SAMPLES),
        within=_both(made, "expected", "within"),
        between=_both(made, "expected", "between"),
        plain_between=_both(made, "plain", "between"),
        seconds=_both(made, "expected", "seconds"),
        plain_seconds=_both(made, "plain", "seconds"),
        hit=[one.id for one in made.limits if one.status == "fail"],
    )


def _both(made: Plan, kind: str, field: str) -> float:
    return float(sum(getattr(made.phases[phase][kind], field) for phase in ("dispatch", "combine")))


def as_json(points: Sequence[Point]) -> str:
    return json.dumps([dataclasses.asdict(one) for one in points], indent=1)


def table(points: Sequence[Point], model: Model, cluster: Cluster, speed: Bandwidths) -> str:
    """A line a number of ranks."""
    lines = [
        f"{model.name}, {cluster.tokens} tokens a rank, nodes of {cluster.gpus_per_node}; dispatch and combine",
        f"{'ranks':>5}{'nodes':>6}{'experts':>8}{'buffer':>10}{'ranks/token':>13}{'simulated':>10}{'nodes/token':>12}"
        f"{'simulated':>10}{'NVLink':>9}{'network':>9}{'plain':>9}{'ms':>8}{'plain':>8}  beyond a limit",
    ]
    for one in points:
        lines.append(
            f"{one.ranks:>5}{one.nodes:>6}{one.num_experts:>8}{amount(one.num_buffer_bytes):>10}"
            f"{one.ranks_of_token:>13.3f}{one.simulated[0]:>10.3f}{one.nodes_of_token:>12.3f}{one.simulated[1]:>10.3f}"
            f"{amount(one.within):>9}{amount(one.between):>9}{amount(one.plain_between):>9}"
            f"{one.seconds * 1e3:>8.2f}{one.plain_seconds * 1e3:>8.2f}  {', '.join(one.hit)}"
        )
    lines.append(
        f"balanced routing, {SAMPLES} random tokens simulated; {speed.efficiency:g} of {speed.nvlink_gbs:g} GB/s NVLink"
        f" and {speed.rdma_gbs:g} GB/s network; experts are added where they do not divide over the ranks"
    )
    return "\n".join(lines)


def draw(points: Sequence[Point], model: Model, path: Path) -> None:
    """Write three panels: buffer, bytes, time.

    Raises:
        BackendError: matplotlib is not installed.
    """
    try:
        figure_type: Any = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise BackendError("--plot needs matplotlib, which is not installed", fix="pip install matplotlib") from None
    figure = figure_type(figsize=(13, 4), layout="constrained")
    ranks = [one.ranks for one in points]
    panels: list[tuple[str, dict[str, list[float]]]] = [
        ("buffer, GiB a rank", {"DeepEP V2": [one.num_buffer_bytes / 2**30 for one in points]}),
        (
            "sent by a rank, MB",
            {
                "NVLink": [one.within / 1e6 for one in points],
                "network": [one.between / 1e6 for one in points],
                "network, plain": [one.plain_between / 1e6 for one in points],
            },
        ),
        (
            "time, ms",
            {"DeepEP V2": [one.seconds * 1e3 for one in points], "plain": [one.plain_seconds * 1e3 for one in points]},
        ),
    ]
    for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for label, values in lines.items():
            axes.plot(ranks, values, marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_title(title, loc="left")
        axes.set_xlabel("expert-parallel ranks")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.suptitle(f"{model.name}: dispatch and combine of one layer")
    figure.savefig(path, dpi=130)
