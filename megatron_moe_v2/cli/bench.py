"""``megatron-moe-v2 bench``: dispatch, combine and their backward, against the plain all-to-all dispatcher.

Runs under a launcher (``torchrun --nproc-per-node 4 -m megatron_moe_v2 bench``) or starts local ranks itself. The
baseline runs in the same processes, interleaved with what it is compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ..errors import MoEError
from ..names import named
from ..pool import PooledBuffer, close_buffers
from ..prepare import prepare_buffer
from . import local_ranks, report, tables
from .beside import BESIDE, chosen, embedded_buffer, embedded_subject, raw_subjects
from .measure import LAYOUTS, PHASES, PLAIN, PLAIN_KEPT, Subject, measure, subjects
from .verify import Oracle, make_inputs

__all__ = ["main"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
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


def _beside(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    if not set(names) <= set(BESIDE):
        raise argparse.ArgumentTypeError(f"{text!r}: choose of {','.join(BESIDE)}, or none")
    return names


def _report(text: str) -> Path:
    path = Path(text)
    if path.suffix not in report.SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(report.SUFFIXES)}")
    _writable(text)
    return path


def _writable(text: str) -> str:
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(Path(text).parent)!r}")
    return text


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
    dtype = named(_DTYPES, _DTYPE_ALIASES)
    add("--dtype", type=dtype, choices=_DTYPES, default="bf16", help="of tokens (%(default)s); weights are float32")
    add("--iters", type=_positive, default=20, metavar="N", help="measured iterations (%(default)s)")
    add("--warmup", type=_positive, default=3, metavar="N", help="iterations before (%(default)s)")
    add("--seed", type=int, default=0, help="of inputs and routing (%(default)s)")
    names = ",".join(LAYOUTS)
    add("--layouts", type=_layouts, default=list(LAYOUTS), metavar="LIST", help=f"of {names}; plain always runs (all)")
    beside = f"of {','.join(BESIDE)}, or none; on the real buffers all, else none"
    add(
        "--beside",
        type=_beside,
        metavar="LIST",
        help=f"also measure the buffer's own calls, the embedded one: {beside}",
    )
    add("--sweep-tokens", type=_sizes, default=[], metavar="LIST", help="256,512,...: forward+backward for each too")
    add("--sweep-hidden", type=_sizes, default=[], metavar="LIST", help="the same over hidden sizes")
    add("--sweep-topk", type=_sizes, default=[], metavar="LIST", help="the same over top-k")
    add("--report", type=_report, metavar="FILE", help="also write a page with charts: FILE.html or FILE.md")
    add(
        "--json",
        type=_writable,
        metavar="FILE",
        help="also write JSON lines; with - to standard output, and tables to standard error",
    )
    args = parser.parse_args(argv)
    world = local_ranks.launched()
    if world is not None and args.ranks not in (None, world):
        parser.error(f"--ranks {args.ranks} under a launcher that started {world}")
    args.ranks = world or args.ranks or 2
    if args.experts % args.ranks:
        parser.error(f"--experts {args.experts} is no multiple of the {args.ranks} ranks")
    for flag, num_topk in (("--topk", args.topk), *(("--sweep-topk", one) for one in args.sweep_topk)):
        if num_topk > min(args.experts, _LARGEST_TOPK):
            parser.error(f"{flag} {num_topk} is above {min(args.experts, _LARGEST_TOPK)}")
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
        if "BrokenPipeError" not in str(error):  # the reader, head for one, has seen enough
            print(f"bench: {error}", file=sys.stderr)
        return 1
    except ProcessExitedException as error:
        return error.exit_code or 1
    return 0


def _rank(device: torch.device, args: argparse.Namespace) -> None:
    """One rank's part. Collective over the default group; ends with status 1 on all ranks if a value was wrong."""
    size = {"tokens": args.tokens, "hidden": args.hidden, "topk": args.topk}
    entry = _buffer(args, size)
    beside = chosen(args.beside, entry, args.hidden)
    for hidden in args.sweep_hidden:  # a refusal comes before hours of measuring
        chosen(args.beside, entry, hidden)
    output = _Output(args.json) if dist.get_rank() == 0 else None
    facts = tables.environment(entry, device, _arguments(args), beside)
    if output:
        output.write(tables.header(facts), [facts])
    with _under_test(args, entry, size) as under_test:
        found = _measure(args, size, PHASES, under_test, device)
    if output:
        output.write(tables.table(found, by_rank=bool(beside)), found)
    swept = []
    for over in tables.SWEPT:
        some = []
        for value in getattr(args, f"sweep_{over}"):
            one_size = size | {over: value}
            with _under_test(args, _buffer(args, one_size), one_size) as under_test:
                measured = _measure(args, one_size, ["forward+backward"], under_test, device)
            some += [one | {"record": "sweep", "over": over} for one in measured]
        if output and some:
            output.write(tables.sweep_table(some), some)
        swept += some
    if output:
        output.close()
        if args.report is not None:
            report.write(args.report, facts, found, swept)
    close_buffers()
    dist.barrier()
    if any(one["wrong_values"] for one in [*found, *swept]):
        raise SystemExit(1)


def _buffer(args: argparse.Namespace, size: dict[str, int]) -> PooledBuffer:
    """The buffer for a size, with one ceiling for all. Collective over the default group."""
    ceiling = max(args.tokens, *args.sweep_tokens, 1)
    return prepare_buffer(None, hidden=size["hidden"], num_topk=size["topk"], num_max_tokens_per_rank=ceiling)


@contextmanager
def _under_test(args: argparse.Namespace, entry: PooledBuffer, size: dict[str, int]) -> Iterator[list[Subject]]:
    """Everything that is measured at a size. Collective over the default group."""
    visible = entry.backend.name == "embedded"
    names = chosen(args.beside, entry, size["hidden"])
    with ExitStack() as closing:
        found = subjects(args.layouts, args.experts, entry.group, visible=visible)
        if "raw" in names:
            found += raw_subjects(entry, args.experts, size["topk"], visible=visible)
        if "embedded" in names:
            found.append(embedded_subject(closing.enter_context(embedded_buffer(entry)), args.experts))
        yield [*found, *subjects([PLAIN, PLAIN_KEPT], args.experts, entry.group, visible=visible)]


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    names = ("tokens", "hidden", "experts", "topk", "dtype", "iters", "warmup", "seed")
    return {name: getattr(args, name) for name in names}


def _measure(
    args: argparse.Namespace,
    size: dict[str, int],
    phases: Sequence[str],
    under_test: list[Subject],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Records of one size, on every rank. Collective over the default group."""
    group = dist.group.WORLD
    assert group is not None
    dtype = _DTYPES[args.dtype]
    seed = args.seed * group.size() + group.rank()
    inputs = make_inputs(
        size["tokens"], size["hidden"], args.experts, size["topk"], dtype=dtype, device=device, seed=seed
    )
    oracle = Oracle(inputs, args.experts, group)
    results = measure(under_test, phases, inputs, oracle, group, iterations=args.iters, warmup=args.warmup)
    found = tables.records(results, size["topk"], size["hidden"] * dtype.itemsize, oracle.rows_per_rank)
    return [one | size for one in found]


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
