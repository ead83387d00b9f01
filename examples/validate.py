"""The evidence run: does expert parallelism work here, on this buffer, over this fabric?

    torchrun --nnodes 2 --nproc-per-node 8 ... examples/validate.py --expect-backend deepep_v2

Runs on CPU (gloo) and CUDA (NCCL), on one rank (plain ``python``) or many. The last line is ``VALIDATION PASS`` or
``VALIDATION FAIL`` with the reasons, and the exit status, 0 or 1, is the same on every rank. What the lines mean is in
docs/validation.md.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

import fabric_counters
import parallel
import pretrain
import torch
import torch.distributed as dist
import validate_payloads as payloads
import validate_provenance as provenance
from fabric_counters import Sent
from parallel import Ranks
from records import Record, trajectory_line
from validate_verdict import Verdict

from megatron_moe_v2 import close_buffers, prepare_buffer
from megatron_moe_v2.probe import probe

BACKENDS = ("deepep_v2", "deepep_v1", "embedded")
LOCAL_EXPERTS, MOST_EXPERTS = 8, 2048
HEAD_DIM = 64


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("sizes")
    model.add_argument("--hidden", type=int, default=256, help=f"a multiple of {HEAD_DIM}; of 256 on DeepEP V2")
    model.add_argument("--experts", type=int, help=f"over all ranks; default: {LOCAL_EXPERTS} a rank")
    model.add_argument("--topk", type=int, default=4)
    model.add_argument("--tokens", type=int, default=512, help="of each rank in a step")
    model.add_argument("--seq-len", type=int, default=128)
    model.add_argument("--blocks", type=int, default=2)
    model.add_argument("--expert-ffn", type=int, default=128)
    model.add_argument("--warmup-steps", type=int, default=2, help="steps before those that are timed")
    model.add_argument("--steps", type=int, default=20)
    model.add_argument("--layout", choices=payloads.LAYOUTS, default="token", help="what the steps train with")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--expect-backend", choices=BACKENDS, help="fail if another buffer carries the tokens")
    parser.add_argument(
        "--no-fabric",
        action="store_true",
        help="several nodes may send nothing by InfiniBand or EFA: one NVLink domain, or plain TCP",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the whole run")
    tests = parser.add_argument_group("to try this script itself")
    tests.add_argument(
        "--pretend-nodes", type=int, metavar="N", help="spread the ranks over N nodes that are not there"
    )
    tests.add_argument("--sysfs", type=Path, default=Path("/sys"), help="where to read the counters")
    args = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.experts is None:
        args.experts = world * max(1, min(LOCAL_EXPERTS, MOST_EXPERTS // world))
    for wrong, text in (
        (args.hidden < HEAD_DIM or args.hidden % HEAD_DIM, f"--hidden {args.hidden}: not a multiple of {HEAD_DIM}"),
        (args.experts < 1 or args.experts % world, f"--experts {args.experts}: not a multiple of the {world} ranks"),
        (not 1 <= args.topk <= args.experts, f"--topk {args.topk}: not from 1 to the {args.experts} experts"),
        (args.tokens < 1 or args.tokens % args.seq_len, f"--tokens {args.tokens}: not a multiple of --seq-len"),
        (world * args.tokens > payloads.BASE**payloads.DIGITS, f"--tokens {args.tokens}: too many over all ranks"),
        (args.steps < 2 or args.warmup_steps < 0, f"--steps {args.steps}: at least 2 show whether the loss falls"),
    ):
        if wrong:
            parser.error(text)
    return args


class Validation:
    """One rank's run. Every method is collective over the group."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, verdict: Verdict) -> None:
        self.args, self.ranks, self.verdict = args, ranks, verdict
        self.dtype = torch.float32 if ranks.device.type == "cpu" else torch.bfloat16

    def say(self, text: str) -> None:
        if self.ranks.is_first:
            print(text, flush=True)

    def run(self) -> None:
        self.introduce()
        before = fabric_counters.read_counters(self.args.sysfs)
        self.meet()
        self.build()
        crossing = self.round_trip()
        self.train()
        dist.barrier()
        self.judge_fabric(
            fabric_counters.sent_between(before, fabric_counters.read_counters(self.args.sysfs)), crossing
        )
        self.verdict.stage = "closing the buffers"
        close_buffers()

    def meet(self) -> None:
        """Nobody goes on before everybody is here."""
        arrived = torch.ones(1, device=self.ranks.device)
        dist.all_reduce(arrived)
        assert int(arrived) == self.ranks.world

    def introduce(self) -> None:
        """What runs where; all hosts must run the same sources."""
        self.verdict.stage = "comparing the ranks"
        pretended, digest = self.args.pretend_nodes, provenance.source_digest()
        place = f"pretended node {self.ranks.rank * pretended // self.ranks.world}" if pretended else _host()
        shared = self.verdict.share("place", {"place": place, "name": socket.gethostname(), "digest": digest})
        places = [one["place"] for one in shared]
        distinct = list(dict.fromkeys(places))
        self.nodes = [distinct.index(one) for one in places]
        self.names = [f"{node} ({shared[self.nodes.index(node)]['name']})" for node in range(len(distinct))]
        digests = {one["digest"] for one in shared}
        found = probe()
        count = f"{len(distinct)} node{'s' if len(distinct) > 1 else ''}"
        self.say(f"validation: {self.ranks.world} ranks on {count}, {self.ranks.device.type}")
        self.say(f"nodes: {'PRETENDED, ' if pretended else ''}{', '.join(self.names)}")
        self.say(f"commit: {provenance.commit()}; sources {digest:08x}")
        self.say(f"versions: {provenance.versions(self.ranks.device, found)}")
        for line in provenance.describe_deep_ep(found):
            self.say(line)
        if len(digests) > 1:
            self.verdict.fail("the ranks run different sources of megatron_moe_v2: install the same on all nodes")

    def build(self) -> None:
        """The buffer, compiled for both layouts before anything is timed or counted in steps."""
        self.verdict.stage = "building and warming up the buffer"
        args, started = self.args, time.perf_counter()
        entry = prepare_buffer(
            hidden=args.hidden,
            num_topk=args.topk,
            num_max_tokens_per_rank=args.tokens,
            num_experts=args.experts,
            warmup=True,
        )
        kind = provenance.class_of(entry.buffer)
        self.say(f"backend: {entry.backend.name}, because {entry.backend.reason}")
        file = provenance.class_file(kind)
        self.say(f"active class: {kind.__qualname__}, module {kind.__module__}, file {file}")
        self.say(f"built and warmed up in {time.perf_counter() - started:.1f} s")
        for text in provenance.patches(kind, probe()):
            self.say(f"PATCHED: {text}")
            self.verdict.fail(text)
        if args.expect_backend not in (None, entry.backend.name):
            self.verdict.fail(f"backend {entry.backend.name}, expected {args.expect_backend}: {entry.backend.reason}")

    def round_trip(self) -> int:
        """Both layouts, forward and backward, value by value; returns bytes of this rank that had to leave its node."""
        self.verdict.stage = "the round trip"
        args, ranks = self.args, self.ranks
        sizes = payloads.Sizes(
            tokens=args.tokens,
            hidden=args.hidden,
            experts=args.experts,
            topk=args.topk,
            dtype=self.dtype,
            device=ranks.device,
        )
        results = [payloads.round_trip(layout, ranks.rank, ranks.world, sizes) for layout in payloads.LAYOUTS]
        for mine in results:
            wrong = (mine.experts - mine.exact, mine.wrong_sums, mine.wrong_gradients)
            if any(wrong):
                self.verdict.fail(
                    f"wrong payloads in the {mine.layout} layout: {wrong[0]} of {mine.experts} experts, "
                    f"{wrong[1]} sums, {wrong[2]} gradients"
                )
        every = [one for rank in self.verdict.share("payloads", [asdict(one) for one in results]) for one in rank]
        exact, total, sums, gradients = (
            sum(one[name] for one in every) for name in ("exact", "experts", "wrong_sums", "wrong_gradients")
        )
        self.say(f"per-expert payloads: exact {exact}/{total}, wrong sums {sums}, wrong gradients {gradients}")
        return len(payloads.LAYOUTS) * payloads.crossing_bytes(ranks.rank, self.nodes, sizes)

    def train(self) -> None:
        """A small language model on the standard library's sources; its loss must fall."""
        self.verdict.stage = "making the model"
        args, total = self.args, self.args.warmup_steps + self.args.steps
        words = (
            f"--hidden {args.hidden} --blocks {args.blocks} --heads {args.hidden // HEAD_DIM} --kv-heads 1 "
            f"--head-dim {HEAD_DIM} --experts {args.experts} --top-k {args.topk} --expert-ffn {args.expert_ffn} "
            f"--steps {total} --warmup {min(4, total // 2)} --seq-len {args.seq_len} --lr 2e-3 "
            f"--global-batch {self.ranks.world * args.tokens // args.seq_len} --layout {args.layout}"
        )
        trainer = pretrain.Trainer(pretrain.parse_arguments(shlex.split(words)), self.ranks)
        records: list[Record] = []
        for number in range(1, total + 1):
            warm = number <= args.warmup_steps
            place = f"{number}/{args.warmup_steps}" if warm else f"{number - args.warmup_steps}/{args.steps}"
            self.verdict.stage = label = f"{'WARMUP' if warm else 'STEP'} {place}"
            started = time.perf_counter()
            record = trainer.step(number, stop=False)
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize()
            milliseconds = 1000 * (time.perf_counter() - started)
            records.append(record)
            loss, norm = record["loss"], record["grad_norm"]
            self.say(f"{label} loss={loss:.4f} grad_norm={norm:.4f} step_ms={milliseconds:.1f}")
            if not math.isfinite(loss + norm):
                self.verdict.fail(f"loss {loss}, gradient norm {norm} at {label}")
                return
        line = trajectory_line(records)
        self.say(line)
        if not line.endswith("decreased=True"):
            self.verdict.fail(f"the loss did not fall: {line}")

    def judge_fabric(self, sent: Sent, crossing: int) -> None:
        """Bytes by fabric and by sockets, a node's once; each node's fabric must have sent what had to leave."""
        self.verdict.stage = "comparing the counters"
        shared = self.verdict.share("sent", {**asdict(sent), "crossing": crossing})
        totals = dict.fromkeys(("fabric", "sockets", "loopback"), 0)
        for node, name in enumerate(self.names):
            ranks = [one for one, place in zip(shared, self.nodes, strict=True) if place == node]
            mine, least = ranks[0], sum(one["crossing"] for one in ranks)
            for key in totals:
                totals[key] += mine[key]
            if len(self.names) == 1:
                continue
            text = f"node {name}: {mine['fabric']:,} bytes sent by {', '.join(mine['devices']) or 'no fabric device'}"
            text += f", {mine['sockets']:,} by sockets; at least {least:,} had to leave it"
            self.say(text)
            if mine["fabric"] < max(least, 1) and not self.args.no_fabric:
                self.verdict.fail(f"{'too few' if mine['fabric'] else 'no'} fabric bytes: {text}")
        self.say(
            f"fabric: {totals['fabric']:,} bytes sent; sockets: {totals['sockets']:,} bytes sent, "
            f"loopback {totals['loopback']:,}"
        )


def _host() -> str:
    """The same for all processes of one machine, also in different containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def main(argv: list[str] | None = None) -> NoReturn:
    """Validate and end the process; a wrong command line ends it with status 2."""
    args = parse_arguments(argv)
    try:
        ranks = parallel.start(args.device)
        verdict = Verdict(ranks.rank, ranks.world, seconds=args.timeout)
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"VALIDATION FAIL: no process group: {type(error).__name__}: {error}", flush=True)
        raise

    def stopped(number: int, frame: FrameType | None) -> None:
        if not verdict.settling:
            raise SystemExit(f"stopped by {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, stopped)
    try:
        Validation(args, ranks, verdict).run()
    except BaseException as error:
        traceback.print_exception(error)
        verdict.fail(f"{type(error).__name__} at {verdict.stage}: {error}")
        leave(verdict.settle(broken=True))
    status = verdict.settle()
    if status == 0:
        dist.destroy_process_group()
    leave(status)


def leave(status: int) -> NoReturn:
    """End the process without the destructors of a group whose other ranks may be gone, and of threads that wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
