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
import socket
import sys
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import fabric_counters
import parallel
import pretrain
import torch
import torch.distributed as dist
import validate_payloads as payloads
import validate_provenance as provenance
from parallel import Ranks
from records import Record, trajectory_line
from validate_verdict import SETTLE_SECS, Stop, Verdict, place

from megatron_moe_v2 import close_buffers, prepare_buffer
from megatron_moe_v2.probe import probe

BACKENDS = ("deepep_v2", "deepep_v1", "embedded")
LOCAL_EXPERTS, MOST_EXPERTS = 8, 2048
MOST_SECS = 1_000_000
HEAD_DIM = 64
COUNTER_SECS = 2.0  # how late a driver may report what it has sent


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
    _, world = place()
    if args.experts is None:
        args.experts = world * max(1, min(LOCAL_EXPERTS, MOST_EXPERTS // world))
    for wrong, text in (
        (args.hidden < HEAD_DIM or args.hidden % HEAD_DIM, f"--hidden {args.hidden}: not a multiple of {HEAD_DIM}"),
        (args.experts < 1 or args.experts % world, f"--experts {args.experts}: not a multiple of the {world} ranks"),
        (not 1 <= args.topk <= args.experts, f"--topk {args.topk}: not from 1 to the {args.experts} experts"),
        (args.seq_len < 1, f"--seq-len {args.seq_len}: at least 1"),
        (args.tokens < 1 or args.tokens % max(args.seq_len, 1), f"--tokens {args.tokens}: not a multiple of --seq-len"),
        (world * args.tokens > payloads.BASE**payloads.DIGITS, f"--tokens {args.tokens}: too many over all ranks"),
        (args.steps < 2 or args.warmup_steps < 0, f"--steps {args.steps}: at least 2 show whether the loss falls"),
        (args.blocks < 1, f"--blocks {args.blocks}: at least 1"),
        (args.expert_ffn < 1, f"--expert-ffn {args.expert_ffn}: at least 1"),
        (not 0 < args.timeout < MOST_SECS, f"--timeout {args.timeout}: from 0 to {MOST_SECS} seconds"),
        ((args.pretend_nodes or 0) < 0, f"--pretend-nodes {args.pretend_nodes}: at least 1"),
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
        self.counted_round_trip()
        self.train()
        dist.barrier()
        self.sum_up(fabric_counters.sent_since(before, self.args.sysfs))
        self.verdict.stage = "closing the buffers"
        close_buffers()
        self.verdict.share("closed", None)  # nobody leaves the group while another rank still uses it
        self.verdict.stage = "leaving the process group"
        dist.destroy_process_group()

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
        for text in provenance.patches(entry.buffer, probe()):
            self.say(f"PATCHED: {text}")
            self.verdict.fail(text)
        if args.expect_backend not in (None, entry.backend.name):
            self.verdict.fail(f"backend {entry.backend.name}, expected {args.expect_backend}: {entry.backend.reason}")

    def counted_round_trip(self) -> None:
        """The round trip between two readings of the counters, when no rank sends anything else."""
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
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        self.verdict.share("quiet", None)
        before = fabric_counters.read_counters(args.sysfs)
        self.verdict.share("counters read", None)
        self.round_trip(sizes)
        leaving = [0] * len(self.names)
        for rank, node in enumerate(self.nodes):
            leaving[node] += len(payloads.LAYOUTS) * payloads.crossing_bytes(rank, self.nodes, sizes)
        judged = len(self.names) > 1 and not args.no_fabric
        patience, least = (COUNTER_SECS if judged else 0.0), leaving[self.nodes[ranks.rank]]
        self.judge_fabric(fabric_counters.sent_since(before, args.sysfs, least=least, patience=patience), leaving)

    def round_trip(self, sizes: payloads.Sizes) -> None:
        """Both layouts, forward and backward, value by value; returns when all ranks have got theirs."""
        ranks = self.ranks
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

    def judge_fabric(self, sent: fabric_counters.Sent, leaving: list[int]) -> None:
        """Each node's fabric must have sent what the round trip's dispatches had to send out of it."""
        shared = self.verdict.share("sent in the round trip", asdict(sent))
        if len(self.names) == 1:
            return
        for node, (name, least) in enumerate(zip(self.names, leaving, strict=True)):
            mine = shared[self.nodes.index(node)]
            text = f"node {name}, round trip: {mine['fabric']:,} bytes sent by "
            text += f"{', '.join(mine['devices']) or 'no fabric device'}, {mine['sockets']:,} by sockets; "
            text += f"at least {least:,} had to leave it"
            self.say(text)
            if mine["fabric"] < max(least, 1) and not self.args.no_fabric:
                self.verdict.fail(f"{'too few' if mine['fabric'] else 'no'} fabric bytes: {text}")

    def sum_up(self, sent: fabric_counters.Sent) -> None:
        """Bytes of the whole run, a node's once; it judges nothing."""
        self.verdict.stage = "comparing the counters"
        shared = self.verdict.share("sent", asdict(sent))
        once = [shared[self.nodes.index(node)] for node in range(len(self.names))]
        fabric, sockets, loopback = (sum(one[key] for one in once) for key in ("fabric", "sockets", "loopback"))
        self.say(f"fabric: {fabric:,} bytes sent; sockets: {sockets:,} bytes sent, loopback {loopback:,}")


def _host() -> str:
    """The same for all processes of one machine, also in different containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def main(argv: list[str] | None = None) -> NoReturn:
    """Validate and end the process; a wrong command line ends it with status 2."""
    args = parse_arguments(argv)
    rank, world = place()
    verdict = Verdict(rank, world, seconds=args.timeout, stop=Stop())
    try:
        verdict.connect()
        verdict.stage = "starting the process group"
        # The verdict comes first, also where a collective would time out.
        ranks = parallel.start(args.device, timeout=timedelta(seconds=args.timeout + SETTLE_SECS))
        Validation(args, ranks, verdict).run()
    except BaseException as error:
        traceback.print_exception(error)
        verdict.fail(f"{type(error).__name__} at {verdict.stage}: {error}")
        leave(verdict.settle(broken=True))
    leave(verdict.settle())


def leave(status: int) -> NoReturn:
    """End the process without the destructors of a group whose other ranks may be gone, and of threads that wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
