"""``megatron-moe-v2 plan``: ceiling, buffer, traffic, time, activations and limits, by arithmetic alone.

Needs neither a GPU nor torch. What it assumes is printed with what it says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import SettingsError
from ...names import named
from ...settings import PREFIX
from ..doctor.findings import FAIL, Finding
from ..env import FABRIC_ALIASES, FABRICS
from .limits import find_limits
from .memory import Activations, activations, combine_row_bytes, dispatch_row_bytes, num_buffer_bytes, padded
from .model import PRESETS, Cluster, Model, from_config
from .traffic import Copies, Traffic, traffic

__all__ = ["Bandwidths", "Plan", "main", "make_plan"]

NVLINK_GBS = 450.0
"""A direction, of NVLink 4: half of the 900 GB/s that NVIDIA states for an H100 or H200."""
RDMA_GBS = 50.0
"""A GPU and direction: one 400 Gb/s NIC for each GPU."""
EFFICIENCY = 0.9
"""Share of it that DeepEP's own estimate of SM counts reckons with (``get_nvlink_gbs``)."""

_MOST_RANKS = 2**20
_MODES = ("hybrid", "direct")


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """GB/s of a GPU in each direction as stated, and the share that is reached."""

    nvlink_gbs: float = NVLINK_GBS
    rdma_gbs: float = RDMA_GBS
    efficiency: float = EFFICIENCY

    def seconds(self, within: float, between: float) -> float:
        """Of bytes over NVLink and over the network at the same time."""
        return max(within / self.nvlink_gbs, between / self.rdma_gbs) / (self.efficiency * 1e9)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Bytes that a rank sends in one dispatch or combine, and its time."""

    own: float
    within: float
    between: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that ``plan`` prints."""

    model: Model
    cluster: Cluster
    mode: str
    fp8: bool
    bandwidths: Bandwidths
    ceiling: int
    num_buffer_bytes: int
    copies: Traffic | None
    phases: dict[str, dict[str, Phase]]
    activations: dict[str, Activations]
    limits: list[Finding]
    exports: list[str]


def make_plan(
    model: Model,
    cluster: Cluster,
    *,
    mode: str = "hybrid",
    fp8: bool = False,
    bandwidths: Bandwidths | None = None,
    gpu_gib: float = 80.0,
    fabric: str = "ib",
    alignment: int = 1,
) -> Plan:
    """The plan; without traffic where experts do not divide over the ranks."""
    speed = bandwidths or Bandwidths()
    hybrid = mode == "hybrid" and len(cluster.nodes) > 1
    num_bytes = num_buffer_bytes(
        cluster,
        hidden=padded(model.hidden),
        num_topk=model.num_topk * cluster.etp,
        num_max_tokens_per_rank=cluster.tokens,
        hybrid=hybrid,
        fp8=fp8,
    )
    found = list(find_limits(model, cluster, hybrid=hybrid, num_bytes=num_bytes, gpu_gib=gpu_gib))
    copies = None if any(one.id == "experts-per-rank" for one in found) else traffic(model, cluster)
    return Plan(
        model=model,
        cluster=cluster,
        mode=mode if len(cluster.nodes) > 1 else "one NVLink domain",
        fp8=fp8,
        bandwidths=speed,
        ceiling=cluster.tokens,
        num_buffer_bytes=num_bytes,
        copies=copies,
        phases=_phases(model, cluster, copies, hybrid, fp8, speed) if copies else {},
        activations=activations(model, cluster, copies.received, alignment) if copies else {},
        limits=found,
        exports=_exports(cluster, mode, fabric, [one.id for one in found if one.status == FAIL]),
    )


def _phases(
    model: Model, cluster: Cluster, copies: Traffic, hybrid: bool, fp8: bool, speed: Bandwidths
) -> dict[str, dict[str, Phase]]:
    """Dispatch and combine, expected and worst, as DeepEP V2 and as a plain all-to-all move them."""
    hidden = padded(model.hidden)
    ours = copies.hybrid if hybrid else copies.direct
    worst = copies.worst_received
    rows = {
        "dispatch": dispatch_row_bytes(hidden, model.num_topk * cluster.etp, fp8),
        "combine": combine_row_bytes(hidden),
    }
    plain_row = 2 * model.hidden

    def phase(copy: Copies, row: int) -> Phase:
        own, within, between = (cluster.tokens * row * rows for rows in (copy.own, copy.within, copy.between))
        return Phase(own=own, within=within, between=between, seconds=speed.seconds(within, between))

    return {
        name: {"expected": phase(ours, row), "worst": phase(worst, row), "plain": phase(copies.plain, plain_row)}
        for name, row in rows.items()
    }


def _exports(cluster: Cluster, mode: str, fabric: str, failed: Sequence[str]) -> list[str]:
    """Lines for a shell, all of them comments where a limit fails: nobody should paste those."""
    several = len(cluster.nodes) > 1
    lines = [f"export {PREFIX}MAX_TOKENS_PER_RANK={cluster.tokens}"]
    for one in FABRICS[fabric if several else "nvlink"]:
        if one.name == f"{PREFIX}MODE":
            lines.append(f"export {PREFIX}MODE={mode}")
        elif not one.optional:
            lines.append(one.line())
    if not failed:
        return lines
    return [f"# not to be exported, for limits fail: {', '.join(failed)}", *(f"# {line}" for line in lines)]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 1")
    return int(text)


def _ranks(text: str) -> int:
    if (ranks := _positive(text)) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_MOST_RANKS}")
    return ranks


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-moe-v2 plan",
        description="What a model needs of dispatch and combine on a cluster: arithmetic, no GPU.",
        epilog="Exit status: 0, 1 if a limit would be hit, 2 wrong usage. Example: plan --model deepseek-v3 --ranks 64",
    )
    add = parser.add_argument
    model = parser.add_argument_group("model").add_argument
    one_of = f"one of {', '.join(PRESETS)}"
    model("--model", type=named(PRESETS), choices=PRESETS, metavar="NAME", help=one_of)
    model("--config", type=Path, metavar="FILE", help="a Hugging Face config.json, or its folder")
    model("--hidden", type=_positive, metavar="H")
    model("--experts", type=_positive, metavar="E", help="routed experts")
    model("--topk", type=_positive, metavar="K")
    model("--layers", type=_positive, metavar="N", help="layers with experts")
    model("--ffn", type=_positive, metavar="F", help="inner width of an expert")
    add("--ranks", type=_ranks, default=8, metavar="R", help="ranks that exchange tokens, EP times ETP (%(default)s)")
    add("--gpus-per-node", type=_positive, default=8, metavar="N", help="GPUs of an NVLink domain (%(default)s)")
    add("--seq-len", type=_positive, default=4096, metavar="S", help="(%(default)s)")
    add("--micro-batch", type=_positive, default=1, metavar="B", help="(%(default)s)")
    add("--tp", type=_positive, default=1, metavar="N", help="tensor parallel with sequence parallel (%(default)s)")
    add("--cp", type=_positive, default=1, metavar="N", help="context parallel (%(default)s)")
    add("--etp", type=_positive, default=1, metavar="N", help="expert tensor parallel (%(default)s)")
    add("--mode", type=named(_MODES), choices=_MODES, default="hybrid", help="between nodes (%(default)s)")
    add("--fp8", action="store_true", help="tokens travel as FP8 in dispatch")
    add("--alignment", type=_positive, default=128, metavar="A", help="of the expert layout (%(default)s)")
    add("--ungrouped", action="store_true", help="ignore that the router takes experts from some groups alone")
    add("--nvlink-gbs", type=_rate, default=NVLINK_GBS, metavar="GB/S", help="a direction (%(default)g: NVLink 4)")
    add("--rdma-gbs", type=_rate, default=RDMA_GBS, metavar="GB/S", help="a GPU (%(default)g: a 400 Gb/s NIC)")
    add("--efficiency", type=_rate, default=EFFICIENCY, metavar="SHARE", help="of it that is reached (%(default)g)")
    add("--gpu-gib", type=_rate, default=80.0, metavar="GIB", help="memory of a GPU (%(default)g)")
    fabrics = [name for name in FABRICS if name != "single-gpu"]
    add("--fabric", type=named(fabrics, FABRIC_ALIASES), choices=fabrics, default="ib", help="(%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    add("--sweep", action="store_true", help="how it grows with ranks, up to 2048")
    add("--plot", type=Path, metavar="FILE", help="draw the sweep (.png, .svg, .pdf; needs matplotlib)")
    args = parser.parse_args(argv)
    if args.model and args.config:
        parser.error("give --model or --config, not both")
    sizes = (args.hidden, args.experts, args.topk)
    if not (args.model or args.config or all(sizes)):
        parser.error("give --model, --config, or --hidden, --experts and --topk")
    if args.plot and not args.sweep:
        parser.error("--plot draws the --sweep")
    if args.efficiency > 1:
        parser.error(f"--efficiency {args.efficiency:g} is above 1")
    return args


def _model(args: argparse.Namespace) -> Model:
    """A preset or configuration with what flags change, or flags alone."""
    flags = {
        "hidden": args.hidden,
        "num_experts": args.experts,
        "num_topk": args.topk,
        "num_layers": args.layers,
        "expert_ffn": args.ffn,
    }
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    if not (args.model or args.config):
        rest = {"name": "your model", "num_layers": 1, "expert_ffn": args.hidden, "source": "flags"}
        return Model(**{**rest, **given})
    base = PRESETS[args.model] if args.model else from_config(args.config)
    if given:
        given["source"] = f"{base.source}, and flags"
    if args.ungrouped or args.experts:
        given |= {"num_groups": 1, "topk_groups": 1}
    return dataclasses.replace(base, **given)


def main(argv: Sequence[str]) -> int:
    """Print the plan or the sweep; the exit status."""
    args = _parse(argv)
    try:
        model = _model(args)
        cluster = Cluster(
            ranks=args.ranks,
            gpus_per_node=args.gpus_per_node,
            seq_len=args.seq_len,
            micro_batch=args.micro_batch,
            tp=args.tp,
            cp=args.cp,
            etp=args.etp,
        )
        speed = Bandwidths(nvlink_gbs=args.nvlink_gbs, rdma_gbs=args.rdma_gbs, efficiency=args.efficiency)
        options: dict[str, Any] = {"mode": args.mode, "fp8": args.fp8, "bandwidths": speed, "gpu_gib": args.gpu_gib}
        if args.sweep:
            from . import sweep

            points = sweep.sweep(model, cluster, **options)
            if args.plot:
                sweep.draw(points, model, args.plot)
            print(sweep.as_json(points) if args.json else sweep.table(points, model, cluster, speed))
            return 0
        made = make_plan(model, cluster, fabric=args.fabric, alignment=args.alignment, **options)
    except (SettingsError, RuntimeError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(dataclasses.asdict(made), indent=1))
    else:
        from .text import text

        print(text(made, args.alignment))
    return int(any(one.status == FAIL for one in made.limits))
