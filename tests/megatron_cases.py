"""Megatron-core's own MoE layer on the CPU, in the ranks of a test: dispatchers beside each other on the same weights.

The functions here run in rank processes (see ``launch.py``). What of megatron-core is made CPU-capable, and why, is
listed in ``examples/megatron_cpu.py``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import RankPool
from scene import buffers
from torch import Tensor

EXAMPLES = str(Path(__file__).parent.parent / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)

OTHER_CORE = os.environ.get("MEGATRON_CORE_0_16", "")
"""Folder that holds megatron-core 0.16.1, to put first on the path of other processes."""

LAYOUTS = ("token", "expert")
HIDDEN, FFN = 16, 12

POOLS = {world: RankPool(world) for world in (2, 4)}
"""Ranks of their own: what :func:`megatron` does to a process is not undone."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An MoE layer and two micro-batches for it.

    Attributes:
        tensor: tensor parallelism, of the experts too; the other ranks are expert-parallel.
        config: fields of ``TransformerConfig``, beside the common ones.
        forced: fields set after the configuration was checked, where its check wants Transformer Engine.
        only_experts: route every token to these experts.
        whole_recompute: the layer under Megatron's ``checkpoint``, as full recompute calls it.
        adversary: seed of the embedded buffer's adversary.
    """

    tensor: int = 1
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] = field(default_factory=dict)
    forced: dict[str, Any] = field(default_factory=dict)
    only_experts: tuple[int, ...] = ()
    whole_recompute: bool = False
    adversary: int | None = None
    seq_length: int = 8
    micro_batch_size: int = 2
    local_experts: int = 2

    def ceiling(self) -> int:
        return self.seq_length * self.micro_batch_size


def megatron(tensor: int = 1) -> None:
    """Megatron on this CPU with its process groups. Collective over the world."""
    import megatron_cpu

    warnings.filterwarnings("ignore", category=UserWarning)
    megatron_cpu.make_cpu_capable()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None  # 0.16's overlap calls them always
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    expert = dist.get_world_size() // tensor
    running = parallel_state.model_parallel_is_initialized()
    if running and parallel_state.get_tensor_model_parallel_world_size() != tensor:
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        megatron_cpu.start_parallel(tensor=tensor, expert=expert, expert_tensor=tensor)
    model_parallel_cuda_manual_seed(1234)


def build_config(case: Case, dispatcher: str) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    bf16 = case.dtype == torch.bfloat16
    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": FFN,
        "moe_ffn_hidden_size": FFN,
        "num_moe_experts": case.local_experts * dist.get_world_size() // case.tensor,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": dispatcher,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.4,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "tensor_model_parallel_size": case.tensor,
        "expert_model_parallel_size": dist.get_world_size() // case.tensor,
        "expert_tensor_parallel_size": case.tensor,
        "sequence_parallel": case.tensor > 1,
        "params_dtype": case.dtype,
        "bf16": bf16,
    }
    if dispatcher == "flex":
        options["moe_flex_dispatcher_backend"] = "deepep"
    config = TransformerConfig(**{**options, **case.config})
    for name, value in case.forced.items():
        setattr(config, name, value)
    return config


def build_layer(case: Case, dispatcher: str) -> Any:
    """A Megatron MoE layer; the weights depend on the case and the rank alone."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module

    model_parallel_cuda_manual_seed(1234)
    config = build_config(case, dispatcher)
    spec = get_moe_module_spec_for_backend(backend=LocalSpecProvider(), num_experts=config.num_moe_experts)
    layer = build_module(spec, config=config) if not callable(spec) else spec(config=config)
    layer.set_layer_number(1)
    if case.only_experts:
        with torch.no_grad():
            layer.router.weight.fill_(-1.0)
            layer.router.weight[list(case.only_experts)] = 1.0
    return layer.to(case.dtype) if case.dtype != torch.float32 else layer


def inputs(case: Case, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[S, B, H]`` of this rank, and what the output is multiplied by in the loss."""
    draw = torch.Generator().manual_seed(100 * micro_batch + dist.get_rank())
    shape = (case.seq_length // (case.tensor if case.tensor > 1 else 1), case.micro_batch_size, HIDDEN)
    x, target = torch.randn(*shape, generator=draw), torch.randn(*shape, generator=draw)
    if case.only_experts:
        x = x.abs()
    return x.to(case.dtype).requires_grad_(), target.to(case.dtype)


def run_layer(case: Case, dispatcher: str, change: Callable[[Tensor], Tensor] = lambda y: y) -> dict[str, Tensor]:
    """Outputs and gradients of two micro-batches, both forward before the first backward. Collective over the world."""
    from megatron.core import tensor_parallel

    layer = build_layer(case, dispatcher)
    layer.train()
    batches = [inputs(case, number) for number in range(2)]
    outputs = []
    for x, _ in batches:
        y, _ = tensor_parallel.checkpoint(layer, False, x) if case.whole_recompute else layer(x)
        outputs.append(change(y))
    for (_, target), y in zip(batches, outputs, strict=True):
        (y.float() * target.float()).sum().backward()
    got = {f"output {number}": y.detach() for number, y in enumerate(outputs)}
    got |= {f"x.grad {number}": x.grad for number, (x, _) in enumerate(batches)}  # type: ignore[misc]
    got |= {f"{name}.grad": one.grad for name, one in layer.named_parameters() if one.grad is not None}  # type: ignore
    return got


def differences(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """What is off by more than the dtype allows, relative to the largest element; a line each."""
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    lines = [f"{name} is only on one side" for name in sorted(got.keys() ^ want.keys())]
    for name in sorted(got.keys() & want.keys()):
        one, other = got[name].double(), want[name].double()
        if one.shape != other.shape:
            lines.append(f"{name} has shape {list(one.shape)}, expected {list(other.shape)}")
            continue
        scale = float(other.abs().max()) if other.numel() else 0.0
        worst = float((one - other).abs().max()) if other.numel() else 0.0
        if not worst <= tolerance * scale:
            lines.append(f"{name} is off by {worst:.3g} of {scale:.3g}")
    return lines


@contextlib.contextmanager
def installed(layout: str, **options: Any) -> Iterator[None]:
    """Our functions under Megatron for a while. Local."""
    from megatron_moe_v2.megatron import install, uninstall

    gc.collect()
    install(layout, **options)  # type: ignore[arg-type]
    try:
        yield
    finally:
        uninstall()


def compare(rank: int, world: int, tensor: int, cases: dict[str, Case], layouts: Sequence[str]) -> list[str]:
    """Each case through the flex dispatcher in each layout against the alltoall dispatcher: what differs."""
    megatron(tensor)
    want = {name: run_layer(case, "alltoall") for name, case in cases.items()}
    lines = []
    for layout in layouts:
        with installed(layout):
            for name, case in cases.items():
                with buffers(adversary=case.adversary, MAX_TOKENS_PER_RANK=case.ceiling()) as built:
                    got = run_layer(case, "flex")
                if not built:
                    lines.append(f"{layout}, {name}: our buffer was not used")
                if float(want[name]["output 0"].abs().max()) == 0.0:
                    lines.append(f"{layout}, {name}: the case gives nothing to compare")
                lines += [f"{layout}, {name}: {line}" for line in differences(got, want[name], case.dtype)]
    return lines
