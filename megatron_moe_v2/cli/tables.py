"""What the benchmark prints: header, table, sweep, and the same as records for JSON lines."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__
from ..pool import PooledBuffer
from .local_ranks import num_cores
from .measure import PHASES, PLAIN, Measurement

__all__ = ["environment", "header", "records", "sweep_table", "table"]

METHOD = """\
Identity experts. An iteration runs every dispatcher once, in an order that rotates; before each phase all ranks meet at
a barrier, and the slowest rank's time counts. dispatch: router output to rows at the experts; combine: back to [T, H];
forward+backward: both and their backward, with gradients of tokens and of weights; weights travel, none is applied.
token-bare: fused_dispatch and fused_combine alone, a row per token. token: FlexTokenDispatcher, our permutation by
expert included. expert: the buffer delivers rows by expert. plain: permute, exchange counts, all-to-all of every routed
copy and its weight, sort by expert, and back, each step the fastest exact one of PyTorch's own. plain-kept: the same
with our memory habits, which dispatchers in use do not have: scratch kept between calls, and huge pages.
sent: bytes a rank hands to collectives in one call, metadata and its own share included. comm: share of the time inside
collectives, waiting for other ranks included. GB/s, logical: T * K copies * row bytes * directions / p50, of which
dispatch and combine have 1, forward+backward 4. wrong: values unequal to the oracle, which computes rows, sums and
gradients from all ranks' inputs, over the last warm-up and the last measured iteration. vs plain: of the same phase."""

METHOD_BESIDE = """\
raw-token, raw-expert: the four calls of a step made on the buffer itself, without this package or autograd: dispatch,
combine, cached dispatch of the gradient, combine of the gradients of rows and weights. embedded: the expert layout over
this package's buffer of plain torch.distributed calls. GB/s, a rank: bytes that a rank receives, as DeepEP's own test
counts them (see docs/bench.md), over p50 of the whole call, where that test takes the transfer kernel's time alone."""

SWEPT = {"tokens": "tokens a rank", "hidden": "hidden", "topk": "top-k"}
"""What a sweep can vary, in words."""

_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": os.environ.get("MALLOC_MMAP_THRESHOLD_"),
    "MALLOC_TRIM_THRESHOLD_": os.environ.get("MALLOC_TRIM_THRESHOLD_"),
    "MALLOC_TOP_PAD_": os.environ.get("MALLOC_TOP_PAD_"),
    "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES"),
    "LD_PRELOAD": os.environ.get("LD_PRELOAD"),
    "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF"),
}


def environment(
    entry: PooledBuffer, device: torch.device, arguments: dict[str, Any], beside: Sequence[str] = ()
) -> dict[str, Any]:
    """The header as a record."""
    facts = {
        "record": "header",
        "package": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "cores": num_cores(),
        "threads_per_rank": torch.get_num_threads(),
        "ranks": dist.get_world_size(),
        "transport": dist.get_backend_config(),
        "buffer": entry.describe(),
        "allocator": {name: value for name, value in _ALLOCATOR.items() if value},
        "arguments": arguments,
    }
    return facts | {"beside": list(beside)} if beside else facts


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def header(facts: dict[str, Any]) -> str:
    """The record for people, with the method."""
    tuned = ", ".join(f"{name}={value}" for name, value in facts["allocator"].items())
    sizes = ", ".join(f"{name} {value}" for name, value in facts["arguments"].items() if value is not None)
    return "\n".join(
        [
            f"megatron-moe-v2 {facts['package']}, torch {facts['torch']}, Python {facts['python']}",
            f"{facts['device']}, {facts['cores']} cores; {facts['ranks']} ranks, {facts['transport']}, "
            f"{facts['threads_per_rank']} threads a rank",
            f"buffer: {facts['buffer']}",
            f"memory allocator: {tuned or 'as it comes, no tuning variable is set'}",
            f"sizes: {sizes}",
            "",
            METHOD,
            *([METHOD_BESIDE] if "beside" in facts else []),
        ]
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the ordered values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def received_bytes(phase: str, rows: float, num_topk: int, row_bytes: int) -> float:
    """Bytes that a rank receives in a phase, in the convention of DeepEP's own test, in either layout.

    A token counts once for each rank that has an expert of it, the sending rank included, never once for each expert.
    Dispatched it is its row, K indices of 8 bytes and K weights of 4; combined, its row, and in backward K gradients of
    weights; a cached dispatch, which is the backward of combine, brings its row.
    """
    per_token = {
        "dispatch": row_bytes + 12 * num_topk,
        "combine": row_bytes,
        "forward+backward": 4 * row_bytes + 16 * num_topk,
    }
    return rows * per_token[phase]


def records(
    results: Sequence[Measurement], copies: int, row_bytes: int, rows_per_rank: float | None = None
) -> list[dict[str, Any]]:
    """One record for each measurement.

    Args:
        copies: K.
        row_bytes: of one token.
        rows_per_rank: tokens that a rank receives, each once.
    """
    plain = {one.phase: one for one in results if one.subject == PLAIN}
    found = []
    for one in results:
        middle, beside = _quantile(one.seconds, 0.5), plain[one.phase]
        moved = one.num_tokens * copies * row_bytes * (4 if one.phase == "forward+backward" else 1)
        bytes_to_plain = None
        if one.sent_bytes is not None and beside.sent_bytes:
            bytes_to_plain = one.sent_bytes / beside.sent_bytes
        found.append(
            {
                "record": "result",
                "tokens": one.num_tokens,
                "dispatcher": one.subject,
                "phase": one.phase,
                "p50_us": middle * 1e6,
                "p10_us": _quantile(one.seconds, 0.1) * 1e6,
                "p90_us": _quantile(one.seconds, 0.9) * 1e6,
                "sent_bytes_per_rank": one.sent_bytes,
                "logical_gb_per_s": moved / middle / 1e9,
                "rank_gb_per_s": None
                if rows_per_rank is None
                else received_bytes(one.phase, rows_per_rank, copies, row_bytes) / middle / 1e9,
                "communication_share": one.communication,
                "wrong_values": one.wrong,
                "time_to_plain": middle / _quantile(beside.seconds, 0.5),
                "bytes_to_plain": bytes_to_plain,
                "iterations": len(one.seconds),
            }
        )
    return found


def _aligned(rows: Sequence[Sequence[str]], left: int) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def table(found: Sequence[dict[str, Any]], *, by_rank: bool = False) -> str:
    """One line for each phase and dispatcher; ``by_rank`` adds the bandwidth in DeepEP's convention."""
    more = ["a rank"] if by_rank else []
    title = ["phase", "dispatcher", "p50 µs", "p10 µs", "p90 µs", "sent", "GB/s"]
    title += [*more, "comm", "wrong", "time", "bytes"]
    lines = [
        [
            one["phase"],
            one["dispatcher"],
            *(_number(one[name], ",.0f") for name in ("p50_us", "p10_us", "p90_us", "sent_bytes_per_rank")),
            _number(one["logical_gb_per_s"], ".3f"),
            *(_number(one["rank_gb_per_s"], ".3f") for _ in more),
            _number(one["communication_share"], ".0%"),
            str(one["wrong_values"]),
            _number(one["time_to_plain"], ".2f"),
            _number(one["bytes_to_plain"], ".2f"),
        ]
        for phase in PHASES
        for one in found
        if one["phase"] == phase
    ]
    over = [""] * (len(title) - 2) + ["vs", "plain"]
    return _aligned([over, title, *lines], 2)


def sweep_table(found: Sequence[dict[str, Any]]) -> str:
    """Forward+backward over one of :data:`SWEPT`: milliseconds, and microseconds a token."""
    over = found[0].get("over", "tokens")
    names = list(dict.fromkeys(one["dispatcher"] for one in found))
    time = {(one[over], one["dispatcher"]): one["p50_us"] for one in found}
    sizes = {one[over]: one["tokens"] for one in found}
    title = [over, *(f"{name} ms" for name in names), *(f"{name} µs/token" for name in names)]
    lines = [
        [
            f"{size:,}",
            *(f"{time[size, name] / 1e3:.2f}" if (size, name) in time else "-" for name in names),
            *(f"{time[size, name] / num_tokens:.2f}" if (size, name) in time else "-" for name in names),
        ]
        for size, num_tokens in sizes.items()
    ]
    return f"forward+backward by {SWEPT[over]}, p50\n" + _aligned([title, *lines], 0)
