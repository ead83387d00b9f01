"""``megatron-moe-v2 bench``: dispatch, combine and their backward, against the plain all-to-all dispatcher.

Runs under a launcher (``torchrun --nproc-per-node 4 -m megatron_moe_v2 bench``) or starts local ranks itself. The
baseline runs in the same processes, interleaved with what it is compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ..errors import MoEError
from ..pool import close_buffers
from ..prepare import prepare_buffer
from . import local_ranks, tables
from .measure import LAYOUTS, PHASES, PLAIN, PLAIN_KEPT, Subject, measure, subjects
from .verify import Oracle, make_inputs

__all__ = ["main"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_LARGEST_TOPK = 32


def _sizes(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 1")
    return int(text)


def _layouts(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(LAYOUTS):
        raise argparse.ArgumentTypeError(f"{text!r}: choose of {','.join(LAYOUTS)}")
    return [name for name in LAYOUTS if name in chosen]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-moe-v2 bench",
        description="Measures dispatch, combine and forward+backward in both layouts against a plain all-to-all "
        "dispatcher in the same run.",
        epilog="Exit status: 0, or 1 if a value was wrong or a rank failed.",
    )
    add = parser.add_argument
    add("--ranks", type=_positive, metavar="N", help="local ranks to start (2); not under torchrun")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA if each local rank has a GPU")
    add("--tokens", type=_positive, default=1024, metavar="T", help="tokens a rank (%(default)s)")
    add("--hidden", type=_positive, default=2048, metavar="H", help="elements of a token (%(default)s)")
    add("--experts", type=_positive, default=64, metavar="E", help="experts over all ranks (%(default)s)")
    add("--topk", type=_positive, default=8, metavar="K", help="experts of a token (%(default)s)")
    add("--dtype", choices=_DTYPES, default="bf16", help="of tokens (%(default)s); weights are float32")
    add("--iters", type=_positive, default=20, metavar="N", help="measured iterations (%(default)s)")
    add("--warmup", type=_positive, default=3, metavar="N", help="iterations before (%(default)s)")
    add("--seed", type=int, default=0, help="of inputs and routing (%(default)s)")
    names = ",".join(LAYOUTS)
    add("--layouts", type=_layouts, default=list(LAYOUTS), metavar="LIST", help=f"of {names}; plain always runs (all)")
    add("--sweep-tokens", type=_sizes, default=[], metavar="LIST", help="256,512,...: forward+backward for each too")
    add("--json", metavar="FILE", help="also write JSON lines; with - to standard output, and tables to standard error")
    args = parser.parse_args(argv)
    world = local_ranks.launched()
    if world is not None and args.ranks not in (None, world):
        parser.error(f"--ranks {args.ranks} under a launcher that started {world}")
    args.ranks = world or args.ranks or 2
    if args.experts % args.ranks:
        parser.error(f"--experts {args.experts} is no multiple of the {args.ranks} ranks")
    if args.topk > min(args.experts, _LARGEST_TOPK):
        parser.error(f"--topk {args.topk} is above {min(args.experts, _LARGEST_TOPK)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the benchmark with command-line arguments; the exit status."""
    args = _parse(argv)
    try:
        if local_ranks.launched() is None:
            local_ranks.spawn(_rank, args.ranks, args.device, args)
        else:
            with local_ranks.joined(args.device) as device:
                _rank(device, args)
    except (MoEError, ProcessRaisedException) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except ProcessExitedException as error:
        return error.exit_code or 1
    return 0


def _rank(device: torch.device, args: argparse.Namespace) -> None:
    """One rank's part. Collective over the default group; ends with status 1 on all ranks if a value was wrong."""
    group = dist.group.WORLD
    assert group is not None
    entry = prepare_buffer(
        group, hidden=args.hidden, num_topk=args.topk, num_max_tokens_per_rank=max(args.tokens, *args.sweep_tokens, 1)
    )
    output = _Output(args.json) if dist.get_rank() == 0 else None
    if output:
        facts = tables.environment(entry, device, _arguments(args))
        output.write(tables.header(facts), [facts])
    visible = entry.backend.name == "embedded"
    under_test = subjects([*args.layouts, PLAIN, PLAIN_KEPT], args.experts, group, visible=visible)
    found = _measure(args, args.tokens, PHASES, under_test, device)
    if output:
        output.write(tables.table(found), found)
    swept = []
    for num_tokens in args.sweep_tokens:
        some = _measure(args, num_tokens, ["forward+backward"], under_test, device)
        swept += [one | {"record": "sweep"} for one in some]
    if output and swept:
        output.write(tables.sweep_table(swept), swept)
    if output:
        output.close()
    close_buffers()
    dist.barrier()
    if any(one["wrong_values"] for one in [*found, *swept]):
        raise SystemExit(1)


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    names = ("tokens", "hidden", "experts", "topk", "dtype", "iters", "warmup", "seed")
    return {name: getattr(args, name) for name in names}


def _measure(
    args: argparse.Namespace, num_tokens: int, phases: Sequence[str], under_test: list[Subject], device: torch.device
) -> list[dict[str, Any]]:
    """Records of one size, on every rank. Collective over the default group."""
    group = dist.group.WORLD
    assert group is not None
    dtype = _DTYPES[args.dtype]
    seed = args.seed * group.size() + group.rank()
    inputs = make_inputs(num_tokens, args.hidden, args.experts, args.topk, dtype=dtype, device=device, seed=seed)
    oracle = Oracle(inputs, args.experts, group)
    results = measure(under_test, phases, inputs, oracle, group, iterations=args.iters, warmup=args.warmup)
    return tables.records(results, args.topk, args.hidden * dtype.itemsize)


class _Output:
    """Where tables and JSON lines go."""

    def __init__(self, json_target: str | None) -> None:
        self._people: TextIO = sys.stderr if json_target == "-" else sys.stdout
        self._lines: TextIO | None = None
        if json_target is not None:
            self._lines = sys.stdout if json_target == "-" else open(json_target, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, text: str, found: Sequence[dict[str, Any]]) -> None:
        print(text, "\n", sep="", file=self._people, flush=True)
        if self._lines is not None:
            self._lines.writelines(json.dumps(one) + "\n" for one in found)
            self._lines.flush()

    def close(self) -> None:
        if self._lines is not None and self._lines is not sys.stdout:
            self._lines.close()
