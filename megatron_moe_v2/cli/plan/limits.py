"""Limits that a plan would hit, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from ..doctor.findings import FAIL, WARN, Finding
from .memory import padded
from .model import Cluster, Model

__all__ = ["find_limits"]

MAX_TOPK = 32
MAX_EXPERTS = 2048
MAX_LOCAL_EXPERTS = 256
MAX_RANKS = 1024
MAX_HYBRID_LANES = 128
MAX_SCALEOUT, MAX_SCALEUP = 32, 64
LARGEST_PADDING = 0.1
DEFAULT_CEILING = 8192
LARGEST_SHARE = 0.1
"""Of the GPU's memory that a communication buffer may take without a word."""

GROUP = "limits"


def find_limits(model: Model, cluster: Cluster, *, hybrid: bool, num_bytes: int, gpu_gib: float) -> Iterator[Finding]:
    """What does not fit DeepEP V2, or this package's defaults; nothing where all is well."""
    shards = cluster.ranks // cluster.etp
    if model.num_experts % shards:
        yield _limit(
            "experts-per-rank",
            f"{model.num_experts} experts on {shards} expert-parallel ranks",
            "experts that divide evenly",
            "Change the number of ranks, or add redundant experts.",
        )
    local, nodes = -(-model.num_experts // shards), len(cluster.nodes)
    copies = model.num_topk * cluster.etp
    yield from _at_most("top-k", copies, MAX_TOPK, "Less expert-tensor parallelism, or a smaller top-k.")
    yield from _at_most("experts", model.num_experts * cluster.etp, MAX_EXPERTS, "Fewer experts.")
    yield from _at_most("local-experts", local, MAX_LOCAL_EXPERTS, "More expert-parallel ranks.")
    yield from _at_most("ranks", cluster.ranks, MAX_RANKS, "Fewer ranks in the group.")
    if hybrid and nodes > 1:
        up = cluster.gpus_per_node
        direct = "More expert-parallel ranks, or MCORE_DEEPEP_V2_MODE=direct."
        yield from _at_most("hybrid-lanes", up + local, MAX_HYBRID_LANES, direct)
        yield from _at_most("scale-out-ranks", nodes, MAX_SCALEOUT, "Fewer nodes, or MCORE_DEEPEP_V2_MODE=direct.")
        yield from _at_most("scale-up-ranks", up, MAX_SCALEUP, "MCORE_DEEPEP_V2_MODE=direct.")
    if nodes > 1 and cluster.ranks % cluster.gpus_per_node:
        yield _limit(
            "uneven-nodes",
            f"{cluster.ranks} ranks on nodes of {cluster.gpus_per_node}",
            "full nodes",
            "Use a multiple of the GPUs of a node.",
        )
    wide = padded(model.hidden)
    if wide != model.hidden:
        fits = wide - model.hidden <= LARGEST_PADDING * model.hidden
        yield Finding(
            id="hidden",
            group=GROUP,
            status=WARN if fits else FAIL,
            found=f"hidden {model.hidden}" + (f" travels as {wide}" if fits else ""),
            needed="a multiple of 256, or at most a tenth below one",
            fix="Padding costs bytes and a copy." if fits else f"Use {wide}, or MCORE_DEEPEP_V2_BACKEND=embedded.",
        )
    split = cluster.tp * cluster.cp
    if cluster.seq_len % split:
        yield Finding(
            id="sequence",
            group=GROUP,
            status=WARN,
            found=f"a sequence of {cluster.seq_len} does not divide over tp {cluster.tp} x cp {cluster.cp}",
            needed="parts of equal length",
            fix=f"Pad it to {-(-cluster.seq_len // split) * split}, or change tp or cp; the ceiling is rounded up.",
        )
    if cluster.tokens > DEFAULT_CEILING:
        yield Finding(
            id="ceiling",
            group=GROUP,
            status=WARN,
            found=f"{cluster.tokens} tokens a rank, above the default ceiling {DEFAULT_CEILING}",
            needed="a ceiling that holds a call",
            fix=f"export MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK={cluster.tokens}",
        )
    if num_bytes > LARGEST_SHARE * gpu_gib * 2**30:
        grave = num_bytes > gpu_gib * 2**30
        yield Finding(
            id="memory",
            group=GROUP,
            status=FAIL if grave else WARN,
            found=f"the buffer takes {num_bytes / 2**30:.1f} of {gpu_gib:g} GiB",
            needed="memory that the model can spare",
            fix="Fewer tokens a rank (more tp or cp, a smaller micro-batch), or fewer ranks in the group.",
        )


def _at_most(name: str, value: int, most: int, fix: str) -> Iterator[Finding]:
    if value > most:
        yield _limit(name, str(value), f"at most {most}", fix)


def _limit(name: str, found: str, needed: str, fix: str) -> Finding:
    return Finding(id=name, group=GROUP, status=FAIL, found=found, needed=needed, fix=fix)
