"""Pretrain a mixture-of-experts language model over data and expert parallel ranks.

    torchrun --standalone --nproc-per-node 2 examples/pretrain.py --preset tiny --out out/tiny

Runs on CPU (gloo) and CUDA (NCCL), on one rank (plain ``python``) or many. A rank's tokens are its share of the global
batch; the experts of every block are spread over all ranks. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpointing
import parallel
import plots
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expert_gemm import runs_native
from fp8_experts import runs_deep_gemm
from moe_model import ModelConfig, MoELanguageModel, RouterStats
from optimizers import build_optimizer, learning_rate, set_learning_rate
from parallel import Ranks, StopRequest
from records import Record, StepLog, read_log, require_writable, trajectory_line
from text_data import Batch, Windows, read_text, standard_library
from torch import Tensor

from megatron_moe_v2 import close_buffers, prepare_buffer
from megatron_moe_v2.fp8 import ScaleFormat
from megatron_moe_v2.fp8_wire import buffer_hidden

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden": 128, "blocks": 3, "heads": 4, "kv_heads": 2, "head_dim": 32,
        "experts": 16, "top_k": 2, "expert_ffn": 128,
        "steps": 300, "global_batch": 16, "seq_len": 128, "lr": 4e-3, "warmup": 20, "balance": 0.03,
    },
    "qwen3-a3b": {
        "hidden": 2048, "blocks": 48, "heads": 32, "kv_heads": 4, "head_dim": 128,
        "experts": 128, "top_k": 8, "expert_ffn": 768,
        "steps": 1000, "global_batch": 16, "seq_len": 2048, "lr": 3e-4, "warmup": 50, "balance": 0.001,
    },
}  # fmt: skip
SIZES = ("hidden", "blocks", "heads", "kv_heads", "head_dim", "experts", "top_k", "expert_ffn")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; a preset gives the defaults of sizes and schedule."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes and schedule to start from")
    preset, _ = first.parse_known_args(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, parents=[first], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_argument_group("model (defaults come from the preset)")
    for name in SIZES:
        model.add_argument(f"--{name.replace('_', '-')}", type=int)
    run = parser.add_argument_group("training (defaults come from the preset)")
    run.add_argument("--steps", type=int, help="length of the schedule")
    run.add_argument("--global-batch", type=int, help="windows a step over all ranks")
    run.add_argument("--seq-len", type=int)
    run.add_argument("--lr", type=float, help="peak learning rate")
    run.add_argument("--warmup", type=int, help="steps of linear warm-up")
    run.add_argument("--balance", type=float, help="weight of the load-balancing loss")
    run.add_argument("--weight-decay", type=float, default=0.1)
    run.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm")
    run.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data")
    run.add_argument("--data", type=Path, help="file or directory; default: the Python standard library's sources")
    where = parser.add_argument_group("expert parallelism and device")
    where.add_argument("--layout", choices=("token", "expert"), default="token", help="what dispatch returns")
    where.add_argument("--expert-alignment", type=int, default=1, help="expert layout: rows per expert, multiple of")
    where.add_argument(
        "--fp8-dispatch",
        choices=("float32", "ue8m0"),
        nargs="?",
        const="float32",
        help="tokens travel to their experts in FP8 with such scales, and back in their own dtype",
    )
    where.add_argument("--fp8-experts", action="store_true", help="with --fp8-dispatch: the first product in FP8 too")
    where.add_argument("--fp8-backward", action="store_true", help="with --fp8-dispatch: gradients do so too")
    where.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    where.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="auto: fp32 on CPU, else bf16")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("out/pretrain"), help="checkpoints, log and pictures")
    output.add_argument("--loss-log", type=Path, help="JSON lines, one a step; default: OUT/log.jsonl")
    output.add_argument("--save-every", type=int, default=0, metavar="N", help="also save every N steps")
    output.add_argument("--keep", type=int, default=2, help="newest checkpoints that are kept")
    output.add_argument("--no-save", action="store_true", help="write no checkpoint")
    output.add_argument("--no-plots", action="store_true", help="draw no pictures")
    output.add_argument(
        "--compare", type=Path, metavar="LOG", help="draw the loss of this other run's log beside this one's"
    )
    output.add_argument("--stop-at", type=int, metavar="STEP", help="save and stop after STEP, as Ctrl-C would")
    output.add_argument(
        "--resume", nargs="?", const="latest", help="go on from this checkpoint; default: newest in OUT/checkpoints"
    )
    parser.set_defaults(**PRESETS[preset.preset])
    return parser.parse_args(argv)


def places(args: argparse.Namespace) -> list[tuple[str, Path]]:
    """What the run will write, with the option that says where."""
    files = [("--loss-log", args.loss_log) if args.loss_log else ("--out", args.out / "log.jsonl")]
    if not (args.no_save and args.no_plots):
        files.append(("--out", args.out / "checkpoints"))
    return files


def objective(logits: Tensor, batch: Batch, stats: RouterStats, balance: float, stop: bool) -> tuple[Tensor, Record]:
    """This rank's term of the global objective, whose *sum over ranks* is minimised. Collective over the group.

    Cross-entropy is averaged over all ranks' tokens. The load-balancing loss of a block is ``E * sum_e f_e * P_e``,
    f the fraction of selections and P the mean probability over all ranks' tokens. f carries no gradient and P is
    linear in each rank's tokens, so the global f is all that a rank needs from the others.

    Args:
        logits: ``[B, S, vocab]``.
        stop: whether this rank was asked to stop; the ranks agree in the same all-reduce.

    Returns:
        The local term, a scalar with gradient, and the global ``loss``, ``balance``, ``load`` and ``stop``.
    """
    tokens = batch.global_tokens
    per_token = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    cross_entropy = per_token.sum(dtype=torch.float64) / tokens
    selections, prob_sums = stats.selections, stats.prob_sums
    extras = torch.stack([cross_entropy.detach(), cross_entropy.new_tensor(stop)])
    packed = torch.cat([selections.double().flatten(), prob_sums.detach().double().flatten(), extras])
    dist.all_reduce(packed)
    global_selections, global_probs = packed[:-2].view(2, *selections.shape).unbind(0)
    fractions = global_selections / global_selections.sum(dim=1, keepdim=True)
    scale = selections.shape[1] / tokens
    local_balance = scale * (fractions.float() * prob_sums).sum()
    facts = packed[-2:].tolist()
    record = {
        "loss": facts[0],
        "balance": float((fractions * global_probs).sum() * scale) / len(selections),
        "load": [[round(share, 5) for share in row] for row in fractions.tolist()],
        "stop": facts[1] > 0,
    }
    return cross_entropy + balance * local_balance, record


class Trainer:
    """Model, data and optimizer of one rank."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.args, self.ranks = args, ranks
        config = ModelConfig(**{name: getattr(args, name) for name in SIZES})
        text = read_text(args.data)
        share = {"seq_len": args.seq_len, "global_batch": args.global_batch, "seed": args.seed}
        self.data = Windows(text, rank=ranks.rank, world=ranks.world, **share)
        parallel.require_equal("the text (its CRC-32)", self.data.digest, ranks)
        dtype = args.dtype if args.dtype != "auto" else "fp32" if ranks.device.type == "cpu" else "bf16"
        compute_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        most_tokens = -(-args.global_batch // ranks.world) * args.seq_len
        fp8 = None if args.fp8_dispatch is None else ScaleFormat(kind=args.fp8_dispatch)
        hidden = config.hidden if fp8 is None else buffer_hidden(config.hidden)
        buffer = prepare_buffer(hidden=hidden, num_topk=config.top_k, num_max_tokens_per_rank=most_tokens)
        self.model = MoELanguageModel(
            config,
            rank=ranks.rank,
            seed=args.seed,
            compute_dtype=compute_dtype,
            device=ranks.device,
            layout=args.layout,
            expert_alignment=args.expert_alignment,
            fp8=fp8,
            dequantize=not args.fp8_experts,
            fp8_backward=args.fp8_backward,
        )
        self.experts = list(self.model.expert_parameters())
        expert_ids = {id(parameter) for parameter in self.experts}
        self.dense = [parameter for parameter in self.model.parameters() if id(parameter) not in expert_ids]
        self.optimizer, chosen = build_optimizer(
            (*self.dense, *self.experts), lr=args.lr, weight_decay=args.weight_decay, device=ranks.device
        )
        self.description = {
            "model": asdict(config),
            "text": self.data.digest,
            "steps": args.steps,
            "lr": args.lr,
            **share,
        }
        if ranks.is_first:
            experts = sum(parameter.numel() for parameter in self.experts) * ranks.world
            dense = sum(parameter.numel() for parameter in self.dense)
            native = "grouped_mm" if runs_native(ranks.device.type, compute_dtype) else "loop over experts"
            print(f"buffer: {buffer.describe()}")
            print(f"ranks: {ranks.world} on {ranks.device.type}, {args.layout} layout, {dtype}, expert GEMM: {native}")
            if fp8 is not None:
                back = "too" if args.fp8_backward else f"in {dtype}"
                print(f"dispatch: FP8 with {fp8.kind} scales, gradients {back}")
                if args.fp8_experts:
                    print(f"FP8 rows: {'DeepGEMM' if runs_deep_gemm(ranks.device) else 'de-quantised by the experts'}")
            print(f"optimizer: {chosen}")
            print(
                f"model: {dense:,} dense + {experts:,} expert parameters, {config.experts} experts, top-{config.top_k}"
            )
            source = args.data or f"the standard library's sources in {standard_library()}"
            print(f"text: {len(text):,} bytes, {self.data.num_windows:,} windows, {source}", flush=True)

    def step(self, number: int, stop: bool) -> Record:
        """Take step ``number`` (from 1). Collective over the group.

        Returns:
            The step's record with the global ``loss``, ``grad_norm``, ``load`` and ``stop``.
        """
        started = time.perf_counter()
        batch = self.data.batch(number - 1)
        device = self.ranks.device
        batch = Batch(
            inputs=batch.inputs.to(device), targets=batch.targets.to(device), global_tokens=batch.global_tokens
        )
        logits, stats = self.model(batch.inputs)
        local, record = objective(logits, batch, stats, self.args.balance, stop)
        torch.autograd.backward(local)
        parallel.sum_gradients(self.dense)
        grad_norm = parallel.clip_gradients(self.dense, self.experts, self.args.clip)
        lr = learning_rate(number, peak=self.args.lr, warmup=self.args.warmup, steps=self.args.steps)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens_per_s = batch.global_tokens / (time.perf_counter() - started)
        speed = {"grad_norm": grad_norm, "tokens_per_s": round(tokens_per_s, 1), "lr": lr, "ranks": self.ranks.world}
        return {"step": number, **record, **speed}


def resume(trainer: Trainer, checkpoints: Path, which: str) -> int:
    """Load a checkpoint into the trainer and return the steps it had taken. Collective over the group."""
    found = checkpointing.complete(checkpoints) if which == "latest" else [Path(which)]
    if not found:
        raise FileNotFoundError(f"--resume: found no finished checkpoint in {checkpoints}")
    start, notes = checkpointing.load(found[-1], trainer.model, trainer.optimizer, trainer.description)
    if trainer.ranks.is_first:
        print(f"resumed from {found[-1]} at step {start}" + "".join(f"; {note}" for note in notes), flush=True)
    return start


def train(args: argparse.Namespace, ranks: Ranks) -> None:
    """The whole run. Collective over the group."""
    trainer = Trainer(args, ranks)
    checkpoints = args.out / "checkpoints"
    start = resume(trainer, checkpoints, args.resume) if args.resume else 0
    last = min(args.steps, args.stop_at or args.steps)
    log = StepLog(args.loss_log or args.out / "log.jsonl", start=start, steps=args.steps, active=ranks.is_first)
    saved = done = start
    with log, StopRequest().listening() as request:
        stopped = False
        while done < last and not stopped:
            record = trainer.step(done + 1, request.requested)
            stopped = record.pop("stop")
            log.add(record)
            done += 1
            due = args.save_every and done % args.save_every == 0
            if not args.no_save and (due or stopped or done == last):
                path = checkpointing.save(
                    checkpoints, done, trainer.model, trainer.optimizer, trainer.description, args.keep
                )
                saved = done
    if not ranks.is_first:
        return
    if saved > start:
        print(f"{'stopped on request, ' if stopped else ''}saved {path}")
    if not args.no_plots:
        other = None if args.compare is None else (args.compare.parent.name, read_log(args.compare))
        pictures = plots.draw(log.records, args.out, vocab=trainer.model.config.vocab, other=other)
        print("pictures: " + (", ".join(map(str, pictures)) or "none, for want of matplotlib"))
    print(trajectory_line(log.records), flush=True)


def main() -> None:
    args = parse_arguments()
    require_writable("pretrain.py", places(args))
    ranks = parallel.start(args.device)
    try:
        train(args, ranks)
    except BaseException:
        close_buffers(abort=True)
        raise
    else:
        close_buffers()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
