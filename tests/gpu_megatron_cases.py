"""What each rank does in the Megatron tests on a GPU: one MoE layer under three dispatchers, same weights and tokens.

The same functions run on a CPU, with gloo, the embedded buffer and Megatron's local experts: only :class:`Place`
differs. One shape throughout, since DeepEP compiles every new combination for seconds.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_cases import ENVIRONMENT as GPU_ENVIRONMENT
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

PATHS = ("alltoall", "token", "expert")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the cases run, and how large.

    Attributes:
        cuda: NCCL, DeepEP V2 and Transformer Engine's grouped MLP; else gloo, embedded and local experts.
        tokens: of a rank, in two sequences.
        bounds: largest relative difference to the alltoall dispatcher of a whole tensor, and of one of its rows.
    """

    cuda: bool
    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    dtype: torch.dtype
    bounds: tuple[float, float]


# The dispatchers add the same bf16 rows in another order and grouping: alltoall adds K rows at their source, the token
# layout first those of one rank, with bf16 rounded (relative 2**-9) after each. Four roundings bound a whole tensor;
# a single row may be a sum that nearly cancels, and gets sixteen.
BF16_BOUNDS = (2.0**-7, 2.0**-5)
GPU = Place(cuda=True, tokens=512, hidden=1024, ffn=512, experts=32, topk=4, dtype=torch.bfloat16, bounds=BF16_BOUNDS)
_SMALL = {"cuda": False, "tokens": 64, "hidden": 64, "ffn": 32, "experts": 16, "topk": 4}
CPU_FP32 = Place(**_SMALL, dtype=torch.float32, bounds=(1e-5, 1e-4))  # type: ignore[arg-type]
CPU_BF16 = Place(**_SMALL, dtype=torch.bfloat16, bounds=BF16_BOUNDS)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Sizes of Megatron's groups; tensor parallel experts where ``tensor`` is above 1."""

    world: int
    tensor: int = 1

    @property
    def expert(self) -> int:
        return self.world // self.tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of the layer.

    Attributes:
        config: fields of ``TransformerConfig`` that differ.
        idle: of this many last ranks no expert is selected; one expert of every other rank is not either.
        steps: forward and backward passes in a row, gradients added up.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    idle: int = 0
    steps: int = 1


CASES = (
    Case(name="plain"),
    Case(name="permute fusion off", config={"moe_permute_fusion": False}),
    Case(name="two micro-batches", steps=2),
    Case(name="capacity factor", config={"moe_expert_capacity_factor": 0.5}),
    Case(name="shared experts", config={"moe_shared_expert_intermediate_size": 256}),
    Case(
        name="shared experts, overlap",
        config={"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True},
    ),
    Case(name="recompute", config={"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    Case(name="an expert and a rank without tokens", idle=1),
)


def environment(place: Place) -> dict[str, str]:
    """Of the processes that run the cases."""
    if place.cuda:
        return GPU_ENVIRONMENT | {"MCORE_DEEPEP_V2_BACKEND": "deepep_v2"}
    return {"MCORE_DEEPEP_V2_BACKEND": "embedded", "MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK": str(place.tokens)}


def layers(rank: int, world: int, place: Place, topology: Topology) -> dict[str, Any]:
    """Run all cases under all dispatchers.

    Returns:
        ``differences``: ``"case: path: quantity"`` to the relative difference to alltoall (whole tensor, worst row);
        ``used``: path to what carried the tokens and what the experts are; ``facts``: case to what its router selects.
    """
    _join(rank, world, place, topology)
    from megatron_moe_v2 import close_buffers
    from megatron_moe_v2.megatron import install, prepare, uninstall

    results: dict[str, dict[str, dict[str, Tensor]]] = {}
    used: dict[str, str] = {}
    facts: dict[str, Any] = {}
    for path in PATHS:
        if path != "alltoall":
            install(layout=path)  # type: ignore[arg-type]
        for case in CASES:
            layer = build_layer(place, topology, case, path)
            if path != "alltoall":
                (entry,) = prepare(layer)
                used[path] = f"{entry.describe()}; {type(layer.experts).__name__}"
            results.setdefault(case.name, {})[path] = _run(layer, place, case)
            if path == "alltoall":
                facts[case.name] = _facts(layer, place)
            del layer
        torch.compiler.reset()  # compiled functions of Megatron's hold the dispatchers they were compiled for,
        gc.collect()  # and install() refuses while dispatchers of the other layout exist
    close_buffers()
    uninstall()
    differences = {
        f"{case}: {path}: {what}": _difference(got, by_path["alltoall"][what])
        for case, by_path in results.items()
        for path in PATHS[1:]
        for what, got in by_path[path].items()
    }
    dist.barrier()
    dist.destroy_process_group()
    return {"differences": differences, "used": used, "facts": facts}


def _join(rank: int, world: int, place: Place, topology: Topology) -> None:
    if place.cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group("nccl", rank=rank, world_size=world)
    else:
        from megatron_cpu import make_cpu_capable

        make_cpu_capable()
        dist.init_process_group("gloo", rank=rank, world_size=world)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tensor,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=topology.tensor,
    )


def build_layer(place: Place, topology: Topology, case: Case, path: str) -> Any:
    """A ``MoELayer`` with the weights that every path gets, in training mode."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": place.hidden,
        "num_attention_heads": 8,
        "ffn_hidden_size": place.ffn,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": place.cuda,
        "add_bias_linear": False,
        "bf16": place.dtype == torch.bfloat16,
        "params_dtype": place.dtype,
        "tensor_model_parallel_size": topology.tensor,
        "sequence_parallel": topology.tensor > 1,
        "expert_model_parallel_size": topology.expert,
        "expert_tensor_parallel_size": topology.tensor,
        "num_moe_experts": place.experts,
        "moe_router_topk": place.topk,
        "moe_ffn_hidden_size": place.ffn,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_grouped_gemm": place.cuda,
        "moe_permute_fusion": place.cuda,
        "moe_token_dispatcher_type": "alltoall" if path == "alltoall" else "flex",
        "moe_flex_dispatcher_backend": "deepep",
    }
    config = TransformerConfig(**(settings | case.config))
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)  # the router's weight is built on the CPU, from its generator
    spec: Any = get_moe_module_spec(use_te=place.cuda, num_experts=place.experts, moe_grouped_gemm=place.cuda)
    layer = build_module(spec, config) if hasattr(spec, "module") else spec(config)
    layer.set_layer_number(1)
    if place.cuda:
        layer.cuda()
    if case.idle:
        _idle(layer.router.weight, case.idle, topology.expert)
    return layer.train()


def _idle(router: Tensor, ranks: int, expert_ranks: int) -> None:
    """Router weights that never select the experts of the last ``ranks``, and one of every other rank's.

    :func:`_inputs` puts a large number into the first feature of every token.
    """
    local = router.shape[0] // expert_ranks
    with torch.no_grad():
        router[:, 0] = 0.0
        router[-ranks * local :, 0] = -10.0
        router[::local, 0] = -10.0


def idle_experts(place: Place, topology: Topology, ranks: int) -> list[int]:
    """The experts that :func:`_idle` leaves without tokens."""
    local = place.experts // topology.expert
    return sorted({*range(0, place.experts, local), *range(place.experts - ranks * local, place.experts)})


def _inputs(place: Place, rank: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[S, 2, H]`` tokens of this rank, and the gradient that comes from above."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    shape = (place.tokens // 2, 2, place.hidden)
    tokens, upstream = (torch.randn(shape, generator=draw).to(device, place.dtype) for _ in range(2))
    tokens[..., 0] = 8.0
    return tokens, upstream


def _run(layer: Any, place: Place, case: Case) -> dict[str, Tensor]:
    """Outputs, input gradients and the gradients of router, experts and shared experts, on the CPU."""
    found: dict[str, Tensor] = {}
    device = next(layer.parameters()).device
    for step in range(case.steps):
        tokens, upstream = _inputs(place, dist.get_rank(), step, device)
        tokens.requires_grad_()
        output = layer(tokens)[0]
        output.backward(upstream)
        assert tokens.grad is not None
        found[f"output {step}"], found[f"input gradient {step}"] = output.detach(), tokens.grad
    for name, parameter in layer.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[f"gradient of {name}"] = gradient
    return {what: value.detach().float().cpu() for what, value in found.items()}


def _facts(layer: Any, place: Place) -> dict[str, Any]:
    """What the router selects: ``selections`` of this rank, ``idle`` experts of all ranks."""
    tokens, _ = _inputs(place, dist.get_rank(), 0, next(layer.parameters()).device)
    with torch.no_grad():
        selected = layer.eval().router(tokens)[1].sum(0)
    everywhere = selected.clone()
    dist.all_reduce(everywhere)
    return {"selections": int(selected.sum()), "idle": (everywhere == 0).nonzero().flatten().tolist()}


def _difference(got: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Norm of the difference over that of ``wanted``: of the whole, and of the worst row over the typical row.

    Infinite where only one of the two is zero, or anything is not a number.
    """
    rows, wanted_rows = ((got - wanted).flatten(end_dim=-2), wanted.flatten(end_dim=-2))
    whole = wanted_rows.norm()
    if whole == 0:
        return (0.0, 0.0) if bool((got == 0).all()) else (torch.inf, torch.inf)
    typical = whole / wanted_rows.shape[0] ** 0.5
    values = float(rows.norm() / whole), float(rows.norm(dim=1).max() / typical)
    return tuple(value if value == value else torch.inf for value in values)  # type: ignore[return-value]
