"""Fine-tune the mixture-of-experts model by reinforcement: sample answers, check them, train on what was right.

    torchrun --standalone --nproc-per-node 2 examples/rl_finetune.py --out out/rl

A step is a rollout (small, static shapes, the decoding buffer, a CUDA graph on a GPU) and a training step on what was
sampled (the training buffer), in one process. The task are sums like ``7+5=12``; see rl_task.py. Before the first step
the model learns by example until it is right now and then, so that there is something to reinforce. It starts from
random weights or from a checkpoint of pretrain.py. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpointing
import parallel
import rl_plots
import torch
import torch.distributed as dist
from expert_gemm import runs_native
from moe_model import Choose, ModelConfig, MoELanguageModel
from optimizers import build_optimizer, create_state, learning_rate, set_learning_rate, set_step
from parallel import Ranks, StopRequest
from pretrain import PRESETS, SIZES, objective
from records import Record, StepLog, require_writable
from rl_buffers import PhaseBuffers
from rl_grpo import advantages, answer_logprobs, grpo_terms
from rl_rollout import Rollout, Sampler, gumbel_noise
from rl_task import Sums
from text_data import Batch
from torch import Tensor

from megatron_moe_v2 import RoutingReplay, check_capacity, close_buffers


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, metavar="DIR", help="start from this checkpoint of pretrain.py, its sizes")
    for name in SIZES:
        model.add_argument(f"--{name.replace('_', '-')}", type=int, default=PRESETS["tiny"][name])
    example = parser.add_argument_group("learning by example, before")
    example.add_argument("--warmup-steps", type=int, default=80, help="0: only what the checkpoint knows")
    example.add_argument("--warmup-batch", type=int, default=64, help="sums a step over all ranks")
    example.add_argument("--warmup-lr", type=float, default=3e-3)
    run = parser.add_argument_group("reinforcement")
    run.add_argument("--steps", type=int, default=200)
    run.add_argument("--digits", type=int, default=1, help="of the numbers to add")
    run.add_argument("--prompts", type=int, default=16, help="sums a step over all ranks")
    run.add_argument("--group", type=int, default=8, help="answers to each")
    run.add_argument("--epochs", type=int, default=3, help="updates on each rollout")
    run.add_argument("--lr", type=float, default=5e-4, help="peak learning rate")
    run.add_argument("--clip", type=float, default=0.2, help="how far a ratio of probabilities may count from 1")
    run.add_argument("--kl-weight", type=float, default=0.02, help="weight of the divergence from the reference")
    run.add_argument("--clip-grad", type=float, default=1.0, help="largest global gradient norm")
    run.add_argument("--seed", type=int, default=0)
    moe = parser.add_argument_group("expert parallelism and device")
    moe.add_argument("--layout", choices=("token", "expert"), default="token", help="in training")
    moe.add_argument("--decode-layout", choices=("token", "expert"), default="expert", help="in rollouts")
    moe.add_argument("--routing-replay", action="store_true", help="train with the experts that the rollout took")
    moe.add_argument("--recompute", action="store_true", help="recompute blocks in backward")
    moe.add_argument("--rebuild-buffers", action="store_true", help="hold only the buffer of the present phase")
    moe.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    moe.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="auto: fp32 on CPU, else bf16")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("out/rl"), help="checkpoints, log and picture")
    output.add_argument("--save-every", type=int, default=0, metavar="N", help="also save every N steps")
    output.add_argument("--stop-at", type=int, metavar="STEP", help="save and stop after STEP, as Ctrl-C would")
    output.add_argument("--no-plots", action="store_true", help="draw no picture")
    output.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in OUT")
    return parser.parse_args(argv)


def seed_of(*key: object) -> int:
    return zlib.crc32(repr(key).encode())


class Finetuner:
    """Policy, reference, sampler and optimizer of one rank."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.args, self.ranks, self.task = args, ranks, Sums(digits=args.digits)
        self.first, self.end = (args.prompts * r // ranks.world * args.group for r in (ranks.rank, ranks.rank + 1))
        most = -(-args.prompts // ranks.world) * args.group
        length = self.task.prompt_len + self.task.answer_len - 1
        rows = max(most, -(-args.warmup_batch // ranks.world)) * length
        workload: dict[str, Any] = {
            "prefill_rows": rows,
            "max_tokens_per_rank": rows,
            "decode_max_batch": most if ranks.device.type == "cuda" else 0,
            "running_requests": most * ranks.world,
            "dp_size": ranks.world,
        }
        check_capacity(**workload)
        sizes = {name: getattr(args, name) for name in SIZES}
        if args.model is not None:
            sizes = json.loads((args.model / checkpointing.DESCRIPTION).read_text())["model"]
        self.config = config = ModelConfig(**sizes)
        self.model, self.reference = self._model(), self._model().requires_grad_(False)
        if args.model is not None:
            checkpointing.load_model(args.model, self.model)
        self.experts = list(self.model.expert_parameters())
        expert_ids = {id(parameter) for parameter in self.experts}
        self.dense = [parameter for parameter in self.model.parameters() if id(parameter) not in expert_ids]
        self.replay = RoutingReplay(
            num_layers=config.blocks,
            num_sequences=self.end - self.first,
            num_positions=length,
            num_topk=config.top_k,
            device=ranks.device,
            group=dist.group.WORLD,
        )
        self.sampler = Sampler(
            self.model,
            sequences=self.end - self.first,
            prompt_len=self.task.prompt_len,
            answer_len=self.task.answer_len,
            replay=self.replay,
        )
        self.buffers = PhaseBuffers(
            ranks,
            config,
            training_rows=rows,
            workload=workload,
            decode_layout=args.decode_layout,
            capture=self.sampler.capture,
            rebuild=args.rebuild_buffers,
        )
        self.optimizer, chosen = self._optimizer(args.lr)
        names = ("digits", "prompts", "group", "epochs", "steps", "lr", "kl_weight", "routing_replay", "seed")
        self.description = {"model": asdict(config), **{name: getattr(args, name) for name in names}}
        if ranks.is_first:
            native = runs_native(ranks.device.type, self.model.compute_dtype)
            print("buffers: " + " | ".join(self.buffers.described))
            print(f"ranks: {ranks.world} on {ranks.device.type}, {args.layout} layout, decoding {args.decode_layout}")
            print(f"optimizer: {chosen}; expert GEMM: {'grouped_mm' if native else 'loop over experts'}", flush=True)

    def _model(self) -> MoELanguageModel:
        args, on_cpu = self.args, self.ranks.device.type == "cpu"
        fp32 = args.dtype == "fp32" or (args.dtype == "auto" and on_cpu)
        return MoELanguageModel(
            self.config,
            rank=self.ranks.rank,
            seed=args.seed,
            compute_dtype=torch.float32 if fp32 else torch.bfloat16,
            device=self.ranks.device,
            layout=args.layout,
            decode_layout=args.decode_layout,
            recompute=args.recompute,
        )

    def _optimizer(self, lr: float) -> tuple[torch.optim.Optimizer, str]:
        parameters = (*self.dense, *self.experts)
        return build_optimizer(parameters, lr=lr, weight_decay=0.0, device=self.ranks.device)

    def _descend(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
        """Backward, sums over ranks, and a step; the gradient norm. Collective over the group."""
        torch.autograd.backward(loss)
        parallel.sum_gradients(self.dense)
        norm = parallel.clip_gradients(self.dense, self.experts, self.args.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def learn_by_example(self, out: Path) -> None:
        """Right sums, before the first step; what results is saved as the reference. Collective over the group."""
        args, ranks = self.args, self.ranks
        optimizer, _ = self._optimizer(args.warmup_lr)
        create_state(optimizer)
        generator = torch.Generator().manual_seed(seed_of(args.seed, "examples"))
        first, end = (args.warmup_batch * r // ranks.world for r in (ranks.rank, ranks.rank + 1))
        loss = float("nan")
        for number in range(1, args.warmup_steps + 1):
            pairs = self.task.draw(args.warmup_batch, generator)
            tokens = torch.cat((self.task.prompts(pairs), self.task.answers(pairs)), dim=1)
            targets = tokens[:, 1:].clone()
            targets[:, : self.task.prompt_len - 1] = -100  # which cross-entropy leaves out
            answers = targets[:, self.task.prompt_len - 1 :]
            answers[~self.task.written(answers)] = -100
            counted = int((targets != -100).sum())
            share = [part[first:end].to(ranks.device) for part in (tokens[:, :-1], targets)]
            batch = Batch(inputs=share[0], targets=share[1], global_tokens=counted)
            logits, stats = self.model(batch.inputs, one_window=True)
            local, record = objective(logits, batch, stats, PRESETS["tiny"]["balance"], False)
            loss = record["loss"]
            lr = learning_rate(number, peak=args.warmup_lr, warmup=10, steps=args.warmup_steps)
            set_learning_rate(optimizer, lr)
            self._descend(optimizer, local)
        checkpointing.save(out, args.warmup_steps, self.model, optimizer, self.description, keep=1)
        if ranks.is_first:
            print(f"learned from {args.warmup_steps} batches of examples, loss {loss:.3f}", flush=True)

    def _rollout(self, number: int) -> tuple[Rollout, Tensor, Tensor]:
        """Sampled answers, their rewards, and which bytes count. Collective over the group."""
        args, device = self.args, self.ranks.device
        generator = torch.Generator().manual_seed(seed_of(args.seed, "prompts", number))
        pairs = self.task.draw(args.prompts, generator).repeat_interleave(args.group, dim=0)[self.first : self.end]
        count, seed = args.prompts * args.group, seed_of(args.seed, "noise", number)
        vocab, answer_len = self.config.vocab, self.task.answer_len
        noise = gumbel_noise(count, answer_len, vocab, self.first, self.end, seed)
        rollout = self.sampler.sample(self.task.prompts(pairs).to(device), noise.to(device))
        answers = rollout.tokens[:, -self.task.answer_len :].cpu()
        return rollout, self.task.rewards(pairs, answers).to(device), self.task.written(answers).to(device)

    def _choose(self, block: int, topk_idx: Tensor) -> Tensor:
        if self.args.routing_replay:
            return self.replay.replay(block, topk_idx)
        self.replay.compare(block, topk_idx)
        return topk_idx

    def _logprobs(self, model: MoELanguageModel, rollout: Rollout, choose: Choose | None = None) -> Tensor:
        logits, _ = model(rollout.tokens[:, :-1], one_window=True, choose=choose)
        return answer_logprobs(logits, rollout.tokens, self.task.answer_len)

    def step(self, number: int, stop: bool) -> Record:
        """Take step ``number`` (from 1). Collective over the group."""
        args, started = self.args, time.perf_counter()
        with self.buffers.rollout():
            rollout, rewards, written = self._rollout(number)
        sampled = time.perf_counter()
        advantage = advantages(rewards, args.group)
        facts = torch.stack([rewards.sum().double(), written.sum().double(), rewards.new_tensor(stop).double()])
        dist.all_reduce(facts)
        total, global_bytes, stopping = facts.tolist()
        lr = learning_rate(number, peak=args.lr, warmup=5, steps=args.steps)
        set_learning_rate(self.optimizer, lr)
        with self.buffers.training():
            with torch.no_grad():
                reference = self._logprobs(self.reference, rollout)
            sums = []
            for _ in range(args.epochs):
                now = self._logprobs(self.model, rollout, self._choose)
                terms = grpo_terms(
                    now,
                    rollout.logprobs,
                    reference,
                    advantage,
                    written,
                    global_bytes=global_bytes,
                    clip=args.clip,
                    kl_weight=args.kl_weight,
                )
                norm = self._descend(self.optimizer, terms.loss)
                sums.append(torch.stack((terms.kl, terms.gap)))
        sums_and_counts = torch.cat((*sums, self.replay.counts.double()))
        dist.all_reduce(sums_and_counts)
        kl, gap, *_, differing, compared = sums_and_counts.tolist()
        return {
            "step": number,
            "reward": total / (args.prompts * args.group),
            "kl": kl / global_bytes,
            "logprob_gap": gap / global_bytes,
            "disagreement": differing / max(compared, 1),
            "grad_norm": norm,
            "lr": lr,
            "rollout_s": round(sampled - started, 4),
            "training_s": round(time.perf_counter() - sampled, 4),
            "ranks": self.ranks.world,
            **({"memory_mib": dict(self.buffers.memory)} if args.rebuild_buffers else {}),
            "stop": stopping > 0,
        }


def step_text(record: Record) -> str:
    return (
        f"reward {record['reward']:.2f}, KL {record['kl']:.3f}, grad norm {record['grad_norm']:.2f}, "
        f"rollout {record['rollout_s']:.2f} s, training {record['training_s']:.2f} s"
    )


def begin(tuner: Finetuner, out: Path, resume: bool) -> int:
    """Policy and reference as they are before the next step; the steps taken. Collective over the group."""
    if not resume:
        with tuner.buffers.training():
            tuner.learn_by_example(out / "reference")
        tuner.reference.load_state_dict(tuner.model.state_dict())
        return 0
    reference, found = (checkpointing.complete(out / name) for name in ("reference", "checkpoints"))
    if not reference or not found:
        raise FileNotFoundError(f"--resume: found no finished checkpoint in {out}")
    checkpointing.load_model(reference[-1], tuner.reference)
    start, notes = checkpointing.load(found[-1], tuner.model, tuner.optimizer, tuner.description)
    set_step(tuner.optimizer, start * tuner.args.epochs)
    if tuner.ranks.is_first:
        print(f"resumed from {found[-1]} at step {start}" + "".join(f"; {note}" for note in notes), flush=True)
    return start


def closing_lines(records: list[Record], replayed: bool) -> list[str]:
    """How the reward went, what the two routers disagreed in, and memory if it was taken."""
    means = [sum(record["reward"] for record in part) / len(part) for part in (records[:10], records[-10:])]
    apart = sum(record["disagreement"] for record in records) / len(records)
    executed = 0.0 if replayed else apart
    lines = [
        f"routing: left to itself, training chooses other experts than the rollout in {apart:.3%} of selections; "
        f"with {'replay' if replayed else 'no replay'} it ran other experts in {executed:.3%}",
        f"reward: first 10 steps {means[0]:.3f}, last 10 {means[1]:.3f}, rising={means[1] > means[0]}",
    ]
    for name, record in (("first", records[0]), ("last", records[-1])):
        if "memory_mib" in record:
            lines.insert(-1, f"memory, {name} step: {record['memory_mib']} MiB")
    return lines


def finetune(args: argparse.Namespace, ranks: Ranks) -> None:
    """The whole run. Collective over the group."""
    tuner = Finetuner(args, ranks)
    start = done = begin(tuner, args.out, args.resume)
    last = min(args.steps, args.stop_at or args.steps)
    log = StepLog(args.out / "log.jsonl", start=start, steps=args.steps, active=ranks.is_first, describe=step_text)
    with log, StopRequest().listening() as request:
        stopped = False
        while done < last and not stopped:
            record = tuner.step(done + 1, request.requested)
            stopped = record.pop("stop")
            log.add(record)
            done += 1
            if stopped or done == last or (args.save_every and done % args.save_every == 0):
                checkpointing.save(
                    args.out / "checkpoints", done, tuner.model, tuner.optimizer, tuner.description, keep=2
                )
    if ranks.is_first and log.records:
        if not args.no_plots:
            print("picture: " + (", ".join(map(str, rl_plots.draw(log.records, args.out))) or "none, no matplotlib"))
        print("\n".join(closing_lines(log.records, args.routing_replay)), flush=True)


def main() -> None:
    args = parse_arguments()
    require_writable("rl_finetune.py", [("--out", args.out / "log.jsonl")])
    ranks = parallel.start(args.device)
    try:
        finetune(args, ranks)
    except BaseException:
        close_buffers(abort=True)
        raise
    else:
        close_buffers(release_graphs=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
