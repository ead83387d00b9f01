"""Pretrain a mixture-of-experts GPT with megatron-core, its flex token dispatcher on this package.

    torchrun --standalone --nproc-per-node 2 examples/megatron_pretrain.py --dispatcher flex --layout expert

Model, gradient reduction, optimizer and schedule are megatron-core's own. What is ours is two calls:
``install()`` before the model is built and ``prepare()`` before step 0. On a CPU the ranks are gloo's and the layers
Megatron's local ones; on a GPU with Transformer Engine its layers and its grouped GEMM. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import parallel
import plots
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_cpu import make_cpu_capable
from parallel import Ranks
from records import Record, StepLog, require_writable, trajectory_line
from text_data import Batch, Windows, read_text, standard_library
from torch import Tensor, nn

from megatron_moe_v2 import close_buffers
from megatron_moe_v2.megatron import install, prepare

VOCAB = 256


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=int, default=128)
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--experts", type=int, default=8)
    model.add_argument("--topk", type=int, default=2)
    model.add_argument("--expert-ffn", type=int, default=128)
    model.add_argument("--shared-ffn", type=int, default=0, help="width of the shared expert; 0: none")
    model.add_argument("--shared-overlap", action="store_true", help="shared expert while tokens travel")
    moe = parser.add_argument_group("dispatch of tokens")
    moe.add_argument("--dispatcher", choices=("alltoall", "flex"), default="flex")
    moe.add_argument("--layout", choices=("token", "expert"), default="token", help="of the flex dispatcher")
    moe.add_argument("--no-permute-fusion", action="store_true", help="Megatron's permutation without its fusion")
    moe.add_argument("--capacity-factor", type=float, help="drop tokens beyond this share of an expert's even load")
    moe.add_argument("--recompute", action="store_true", help="recompute the MoE layers in backward")
    run = parser.add_argument_group("training")
    run.add_argument("--steps", type=int, default=50)
    run.add_argument("--seq-len", type=int, default=128)
    run.add_argument("--micro-batch", type=int, default=4, help="windows in one pass of a rank")
    run.add_argument("--global-batch", type=int, default=16, help="windows a step over all ranks")
    run.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    run.add_argument("--warmup", type=int, default=5, help="steps of linear warm-up")
    run.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    run.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm")
    run.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data")
    run.add_argument("--data", type=Path, help="file or directory; default: the Python standard library's sources")
    where = parser.add_argument_group("parallelism and device")
    where.add_argument("--tp", type=int, default=1, help="tensor parallel ranks, with sequence parallelism above 1")
    where.add_argument("--etp", type=int, help="tensor parallel ranks of an expert; default: --tp")
    where.add_argument("--ep", type=int, help="expert parallel ranks; default: all that --etp leaves")
    where.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    where.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="auto: fp32 on CPU, else bf16")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("out/megatron"), help="log and pictures")
    output.add_argument("--no-plots", action="store_true", help="draw no pictures")
    return parser.parse_args(argv)


def has_transformer_engine() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE) and torch.cuda.is_available()


def build_config(args: argparse.Namespace, *, bf16: bool, te: bool) -> Any:
    """Megatron's configuration of the model."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        ffn_hidden_size=args.expert_ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=te,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=te,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=args.tp,
        sequence_parallel=args.tp > 1,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=args.etp,
        num_moe_experts=args.experts,
        moe_router_topk=args.topk,
        moe_ffn_hidden_size=args.expert_ffn,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=args.balance,
        moe_expert_capacity_factor=args.capacity_factor,
        moe_shared_expert_intermediate_size=args.shared_ffn or None,
        moe_shared_expert_overlap=args.shared_overlap,
        moe_grouped_gemm=te,
        moe_permute_fusion=te and not args.no_permute_fusion,
        moe_token_dispatcher_type=args.dispatcher,
        moe_flex_dispatcher_backend="deepep",
        recompute_granularity="selective" if args.recompute else None,
        recompute_modules=["moe"] if args.recompute else None,
    )


class Trainer:
    """Model, data and optimizer of one rank."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.args, self.ranks = args, ranks
        args.etp = args.etp or args.tp
        args.ep = args.ep or ranks.world // args.etp
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tp,
            expert_model_parallel_size=args.ep,
            expert_tensor_parallel_size=args.etp,
        )
        torch.manual_seed(args.seed + 1)  # Megatron draws the router's weight on the CPU
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed + 1)
        self.data_group = parallel_state.get_data_parallel_group()
        self.rows = Rows(args, rank=parallel_state.get_data_parallel_rank(), world=self.data_group.size())
        parallel.require_equal("the text (its CRC-32)", self.rows.windows.digest, ranks)

        self.te = has_transformer_engine()
        self.bf16 = args.dtype == "bf16" or (args.dtype == "auto" and ranks.device.type == "cuda")
        self.config = build_config(args, bf16=self.bf16, te=self.te)
        self.model = build_model(self.config, args, device=ranks.device, te=self.te)
        self.load = ExpertLoad(self.model, args.experts)
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.lr / 10,
            weight_decay=0.1,
            adam_beta2=0.95,
            clip_grad=args.clip,
            bf16=self.bf16,
            params_dtype=self.config.params_dtype,
        )
        self.optimizer = get_megatron_optimizer(optimizer, [self.model])
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=args.lr,
            min_lr=args.lr / 10,
            lr_warmup_steps=args.warmup,
            lr_decay_steps=max(args.steps, args.warmup + 1),
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.forward_backward = get_forward_backward_func()

    def step(self, number: int) -> Record:
        """Take step ``number`` (from 1). Collective over the world."""
        started = time.perf_counter()
        self.schedule.step(increment=1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=self.rows.micro_batches(number - 1, self.ranks.device),
            model=[self.model],
            num_microbatches=self.rows.num_micro_batches,
            seq_length=self.args.seq_len,
            micro_batch_size=self.args.micro_batch,
        )
        _, grad_norm, _ = self.optimizer.step()
        loss = torch.stack([one["lm loss"] for one in losses]).mean()
        dist.all_reduce(loss, group=self.data_group)
        seconds = time.perf_counter() - started
        return {
            "step": number,
            "loss": float(loss) / self.data_group.size(),
            "load": self.load.take(),
            "grad_norm": float(grad_norm),
            "tokens_per_s": round(self.args.global_batch * self.args.seq_len / seconds, 1),
            "lr": self.optimizer.param_groups[0]["lr"],
            "ranks": self.ranks.world,
        }


def build_model(config: Any, args: argparse.Namespace, *, device: torch.device, te: bool) -> Any:
    """GPTModel in Megatron's own data-parallel wrapper."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.module import Float16Module

    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=te),
        vocab_size=VOCAB,
        max_sequence_length=args.seq_len,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device)
    if config.bf16:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


class Rows:
    """Micro-batches of one data-parallel rank; a short batch at the end of a pass over the text is left out."""

    def __init__(self, args: argparse.Namespace, *, rank: int, world: int) -> None:
        if args.global_batch % (world * args.micro_batch):
            raise ValueError(
                f"--global-batch: got {args.global_batch}, expected a multiple of {world} data-parallel ranks "
                f"x --micro-batch {args.micro_batch}"
            )
        self.windows = Windows(
            read_text(args.data),
            seq_len=args.seq_len,
            global_batch=args.global_batch,
            rank=rank,
            world=world,
            seed=args.seed,
        )
        self.micro_batch = args.micro_batch
        self.num_micro_batches = args.global_batch // (world * args.micro_batch)
        self._full = self.windows.num_windows // args.global_batch
        if not self._full:
            raise ValueError(f"--data: got {self.windows.num_windows} windows, expected a --global-batch at least")

    def micro_batches(self, number: int, device: torch.device) -> Iterator[Batch]:
        """Those of batch ``number`` (from 0)."""
        which_pass, place = divmod(number, self._full)
        whole = self.windows.batch(which_pass * self.windows.batches_per_pass + place)
        inputs, targets = whole.inputs.to(device), whole.targets.to(device)
        for first in range(0, len(inputs), self.micro_batch):
            part = slice(first, first + self.micro_batch)
            yield Batch(inputs=inputs[part], targets=targets[part], global_tokens=whole.global_tokens)


def forward_step(batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Any]:
    """One micro-batch through the model, in the form that Megatron's schedules ask for."""
    batch = next(batches)
    positions = torch.arange(batch.inputs.shape[1], device=batch.inputs.device).expand_as(batch.inputs)
    per_token = model(batch.inputs, positions, None, labels=batch.targets)
    return per_token, partial(mean_loss)


def mean_loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = per_token.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


class ExpertLoad:
    """Each MoE layer's selections by expert, counted at its router."""

    def __init__(self, model: nn.Module, experts: int) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        device = next(model.parameters()).device
        self.counts = torch.zeros(len(routers), experts, dtype=torch.int64, device=device)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._count, layer))

    def _count(self, layer: int, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        routing_map = output[1]
        self.counts[layer] += routing_map.reshape(-1, self.counts.shape[1]).sum(0)

    def take(self) -> list[list[float]]:
        """Share of each expert over all ranks since the last call. Collective over the world."""
        dist.all_reduce(self.counts)
        shares = self.counts / self.counts.sum(1, keepdim=True).clamp(min=1)
        self.counts.zero_()
        return [[round(share, 5) for share in layer] for layer in shares.tolist()]


def describe(trainer: Trainer, buffers: list[str]) -> None:
    """What runs here."""
    import megatron.core
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer

    args, model = trainer.args, trainer.model
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "_DeepepManager"):
        bound = getattr(token_dispatcher, name)
        origin = f"{bound.__module__}.{bound.__qualname__}" if bound is not None else "None"
        print(f"binding: token_dispatcher.{name} = {origin}")
    for buffer in buffers or ["none, tokens travel in Megatron's own all-to-all"]:
        print(f"buffer: {buffer}")
    layer = next(module for module in model.modules() if isinstance(module, MoELayer))
    flex = f"{args.layout} layout, " if args.dispatcher == "flex" else ""
    print(
        f"megatron-core {megatron.core.__version__}: {type(layer.token_dispatcher).__name__}, {flex}"
        f"{type(layer.experts).__name__}, {'bf16' if trainer.bf16 else 'fp32'}"
    )
    print(
        f"ranks: {trainer.ranks.world} on {trainer.ranks.device.type}, TP {args.tp}, EP {args.ep}, expert TP {args.etp}"
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"model: {parameters:,} parameters a rank, {args.experts} experts, top-{args.topk}")
    source = args.data or f"the standard library's sources in {standard_library()}"
    print(f"text: {trainer.rows.windows.num_windows:,} windows, {source}", flush=True)


def train(args: argparse.Namespace, ranks: Ranks) -> None:
    """The whole run. Collective over the world."""
    if args.dispatcher == "flex":
        install(layout=args.layout)  # before the model is built
    trainer = Trainer(args, ranks)
    buffers = []
    if args.dispatcher == "flex":
        entries = prepare(trainer.model, seq_length=args.seq_len, micro_batch_size=args.micro_batch)
        buffers = [entry.describe() for entry in entries]
    if ranks.is_first:
        describe(trainer, buffers)
    with StepLog(args.out / "log.jsonl", start=0, steps=args.steps, active=ranks.is_first) as log:
        for number in range(1, args.steps + 1):
            log.add(trainer.step(number))
    if ranks.is_first:
        pictures = [] if args.no_plots else plots.draw(log.records, args.out, vocab=VOCAB)
        print(f"wrote {', '.join(map(str, [args.out / 'log.jsonl', *pictures]))}")
        print(trajectory_line(log.records), flush=True)


def main() -> None:
    args = parse_arguments()
    require_writable("megatron_pretrain.py", [("--out", args.out / "log.jsonl")])
    make_cpu_capable()
    ranks = parallel.start(args.device)
    try:
        train(args, ranks)
    finally:
        close_buffers()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
