"""What tokens cost on their way to Megatron's experts and back: alltoall, our token layout, our expert layout.

    python scripts/gpu_megatron.py                                                  # one rank, prints Markdown
    torchrun --standalone --nproc-per-node 2 scripts/gpu_megatron.py                # EP 2, a GPU for each rank
    python scripts/gpu_megatron.py --device cpu                                     # a tiny shape, only to see it run

Everything of Megatron's is fused (``moe_permute_fusion``, its experimental Triton conversion, Transformer Engine), the
experts are Transformer Engine's grouped MLP, the router's result is given. One process holds the three dispatchers and
runs them in turn, forward and backward. Megatron's flex dispatcher refuses a single rank; that check alone is left out.

With ``MCORE_DEEPEP_V2_NUM_SMS=tune`` both layouts use the SM counts that tuning found, and the token layout is measured
again at DeepEP's own estimate, which is what whoever does not tune has.

"travel" is the time without experts: rows go back as they came. GPU ms is the sum of kernel times from torch.profiler
(with several ranks the least of several rounds, for waiting counts), wall ms the median between CUDA events, peak what
one step with experts allocates beyond what lives between steps.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import math
import os
import re
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_times import Step, at_estimate, kernels_of, milliseconds
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|cublas", re.IGNORECASE)
PATHS = ("alltoall", "flex/token", "flex/expert")
ESTIMATE = "flex/token at DeepEP's SM estimate"
WARM_UP, ROUNDS, PROFILED = 3, 20, 7


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Tokens of a rank, model width, experts over all ranks and their width."""

    tokens: int
    hidden: int
    experts: int
    ffn: int
    topk: int = 8

    def sent_bytes(self, ranks: int) -> dict[str, float]:
        """Bytes that a rank sends to others in a step, if routing is even: four passes of bf16 rows.

        alltoall sends a row for each selection, T * K * (R - 1) / R rows. DeepEP sends one to each rank that owns a
        selected expert, in either layout, and adds the rows of one rank before they go back: with L = E / R experts a
        rank, T * (R - 1) * (1 - C(E - L, K) / C(E, K)) rows.
        """
        local = self.experts // ranks
        missed = math.comb(self.experts - local, self.topk) / math.comb(self.experts, self.topk)
        row = 4 * 2 * self.hidden * self.tokens * (ranks - 1)
        once = row * (1 - missed)
        return {"alltoall": row * self.topk / ranks, "flex/token": once, "flex/expert": once}


SHAPES = (
    Shape(tokens=8192, hidden=2048, experts=128, ffn=768),
    Shape(tokens=4096, hidden=7168, experts=64, ffn=2048),
)
TINY = (Shape(tokens=64, hidden=64, experts=16, ffn=32), Shape(tokens=32, hidden=32, experts=16, ffn=32))


class Scene:
    """One shape: experts, three dispatchers, inputs with gradients, and what comes from above.

    Args:
        managers: by path of the flex dispatcher, what it hands its tokens to.
    """

    def __init__(self, shape: Shape, device: torch.device, managers: dict[str, Any]) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.spec_utils import build_module

        self.shape, self.device, self.ranks = shape, device, dist.get_world_size()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        cuda = device.type == "cuda"
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        config = self._config("alltoall")
        spec: Any = get_moe_module_spec(use_te=cuda, num_experts=shape.experts, moe_grouped_gemm=cuda)
        layer = build_module(spec, config) if hasattr(spec, "module") else spec(config)
        self.experts = layer.experts
        self.dispatchers = {"alltoall": layer.token_dispatcher}
        self.dispatchers |= {path: self._flex(manager) for path, manager in managers.items()}
        draw = torch.Generator(device).manual_seed(dist.get_rank())
        normal = {"device": device, "generator": draw}
        self.x = torch.randn(shape.tokens, 1, shape.hidden, **normal).to(self.dtype).requires_grad_()
        self.upstream = torch.randn(shape.tokens, 1, shape.hidden, **normal).to(self.dtype)
        scores, chosen = torch.rand(shape.tokens, shape.experts, **normal).topk(shape.topk)
        dense = torch.zeros(shape.tokens, shape.experts, device=device).scatter(1, chosen, scores.softmax(-1))
        self.routing_map, self.probs = dense > 0, dense.requires_grad_()
        self.of_weights = torch.ones(self.ranks * shape.tokens * shape.topk, device=device)

    def _config(self, dispatcher: str) -> Any:
        from megatron.core.transformer.transformer_config import TransformerConfig

        cuda, shape = self.device.type == "cuda", self.shape
        return TransformerConfig(
            num_layers=1,
            hidden_size=shape.hidden,
            num_attention_heads=8,
            ffn_hidden_size=shape.ffn,
            gated_linear_unit=True,
            activation_func=F.silu,
            bias_activation_fusion=cuda,
            add_bias_linear=False,
            bf16=cuda,
            params_dtype=self.dtype,
            expert_model_parallel_size=self.ranks,
            num_moe_experts=shape.experts,
            moe_router_topk=shape.topk,
            moe_ffn_hidden_size=shape.ffn,
            moe_router_dtype="fp32",
            moe_grouped_gemm=cuda,
            moe_permute_fusion=cuda,
            moe_token_dispatcher_type=dispatcher,
            moe_flex_dispatcher_backend="deepep",
        )

    def _flex(self, manager: Any) -> Any:
        """Megatron's flex dispatcher around ``manager``, also where there is one rank."""
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher, MoETokenDispatcher

        flex = object.__new__(MoEFlexTokenDispatcher)
        MoETokenDispatcher.__init__(flex, config=self._config("flex"), pg_collection=get_default_pg_collection())
        local = self.shape.experts // self.ranks
        flex.num_local_experts = local
        flex.local_expert_indices = list(range(dist.get_rank() * local, (dist.get_rank() + 1) * local))
        flex._comm_manager = manager(
            group=flex.tp_ep_group,
            num_local_experts=local,
            router_topk=self.shape.topk,
            num_experts=self.shape.experts,
            config=flex.config,
        )
        return flex

    def forward(self, path: str, *, experts: bool) -> tuple[Tensor, Tensor]:
        """The layer's output, and the weights of the rows at the experts."""
        dispatcher = self.dispatchers[path]
        x, probs = dispatcher.dispatch_preprocess(self.x, self.routing_map, self.probs)
        x, probs = dispatcher.token_dispatch(x, probs)
        rows, counts, weights = dispatcher.dispatch_postprocess(x, probs)
        rows = self.experts(rows, counts, weights)[0] if experts else rows
        x = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return dispatcher.combine_postprocess(x), weights

    def step(self, path: str, *, experts: bool) -> Step:
        def run() -> None:
            y, weights = self.forward(path, experts=experts)
            outputs, gradients = [y], [self.upstream]
            if not experts:
                outputs.append(weights)
                gradients.append(self.of_weights[: weights.numel()].view_as(weights).to(weights.dtype))
            torch.autograd.backward(outputs, gradients)
            self._forget()

        return run

    def experts_alone(self) -> Step:
        """Forward and backward of the experts on the rows that alltoall brings them."""
        dispatcher = self.dispatchers["alltoall"]
        with torch.no_grad():
            x, probs = dispatcher.dispatch_preprocess(self.x, self.routing_map, self.probs)
            rows, counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(x, probs))
        rows, weights = rows.detach().requires_grad_(), weights.detach().requires_grad_()
        upstream = torch.ones_like(rows)

        def run() -> None:
            torch.autograd.backward([self.experts(rows, counts, weights)[0]], [upstream])
            rows.grad = weights.grad = None
            self._forget()

        return run

    def _forget(self) -> None:
        self.x.grad = self.probs.grad = None
        for parameter in self.experts.parameters():
            parameter.grad = None

    def check(self) -> None:
        """All paths compute the same.

        Raises:
            RuntimeError: an output or an input gradient is further from alltoall's than four bf16 roundings.
        """
        found: dict[str, tuple[Tensor, ...]] = {}
        for path in PATHS:
            y, _ = self.forward(path, experts=True)
            y.backward(self.upstream)
            assert self.x.grad is not None
            assert self.probs.grad is not None
            found[path] = y.detach(), self.x.grad, torch.where(self.routing_map, self.probs.grad, 0)
            self._forget()
        for path, (one, two) in itertools.product(PATHS[1:], enumerate(zip(*found.values(), strict=True))):
            wanted, got = two[0].float(), two[PATHS.index(path)].float()
            far = float((got - wanted).norm() / wanted.norm())
            if not far <= 2.0**-7:
                what = ("output", "input gradient", "gradient of the weights")[one]
                raise RuntimeError(f"{path}: {what} is {far:.1e} from alltoall's")


class Clock:
    """Times of steps on a device, ranks started together."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None

    def together(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        if self.group is not None:
            dist.barrier(self.group)

    def wall(self, step: Step) -> float:
        """Milliseconds."""
        self.together()
        return milliseconds(step, "cuda" if self.cuda else "cpu")

    def kernels(self, step: Step) -> Counter[str]:
        """Milliseconds a step by kernel, copies and fills included; empty on a CPU.

        The median of several steps, with several ranks the least: a kernel that waits for another GPU counts its wait.
        """
        found = [self._kernels_of_one(step) for _ in range(PROFILED)]
        typical = min if self.group is not None else statistics.median
        return Counter({name: typical(one[name] for one in found if name in one) for name in set().union(*found)})

    def _kernels_of_one(self, step: Step) -> Counter[str]:
        self.together()
        if self.cuda:
            return Counter({name: sum(times) for name, times in kernels_of(step, self.together).items()})
        step()
        return Counter()

    def peak(self, step: Step) -> float:
        """MiB allocated at most during a step, beyond what is before it."""
        if not self.cuda:
            return 0.0
        self.together()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(scene: Scene, entry: Any, clock: Clock, rounds: int, names: bool) -> list[str]:
    """Markdown of one shape, whose buffer is ``entry``. Collective over the world."""
    steps = {(path, experts): scene.step(path, experts=experts) for path in PATHS for experts in (False, True)}
    if entry.tuned:
        steps |= {(ESTIMATE, experts): at_estimate(entry, steps["flex/token", experts]) for experts in (False, True)}
    paths = list(dict.fromkeys(path for path, _ in steps))
    alone = scene.experts_alone()
    for step, _ in itertools.product((*steps.values(), alone), range(WARM_UP)):
        step()
    walls: dict[Any, list[float]] = {key: [] for key in steps}
    for _, (key, step) in itertools.product(range(rounds), steps.items()):
        walls[key].append(clock.wall(step))
    gpu = {path: clock.kernels(steps[path, False]) for path in paths}
    whole = {path: clock.kernels(steps[path, True]).total() for path in paths}
    of_experts = clock.kernels(alone)
    rest = sum(spent for name, spent in of_experts.items() if not GEMM.search(name))
    peaks = {path: clock.peak(steps[path, True]) for path in paths}
    sent = scene.shape.sent_bytes(8)
    sent[ESTIMATE] = sent["flex/token"]
    travel = {path: gpu[path].total() for path in paths}
    columns: dict[str, dict[str, float]] = {
        "travel, GPU ms": travel,
        "+ experts that are no GEMM": {path: travel[path] + rest for path in paths},
        "whole - experts alone": {path: whole[path] - of_experts.total() for path in paths},
        "travel, wall ms": {path: statistics.median(walls[path, False]) for path in paths},
        "whole, wall ms": {path: statistics.median(walls[path, True]) for path in paths},
        "peak MiB": peaks,
        "sent at EP 8, MB": {path: sent[path] / 1e6 for path in paths},
    }
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for path in paths:
        lines.append(f"| {path} | {' | '.join(_number(values[path]) for values in columns.values())} |")
    for other in paths:
        if other == "flex/expert":
            continue
        shares = [
            _number(values["flex/expert"] / values[other] if values[other] else 0.0) for values in columns.values()
        ]
        lines.append(f"| flex/expert over {other} | {' | '.join(shares)} |")
    lines += ["", f"Experts alone: {of_experts.total():.3f} GPU ms, of which {rest:.3f} are no GEMM."]
    for title, kernels in (("experts alone", of_experts), *gpu.items()) if names else ():
        lines += ["", f"{title}:", "", *(f"    {spent:8.3f} {name[:100]}" for name, spent in kernels.most_common(12))]
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def start(device: str) -> torch.device:
    """Default group and Megatron's groups, all ranks expert parallel."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    where = {"rank": rank, "world_size": world}
    if "RANK" not in os.environ:
        where["init_method"] = "tcp://127.0.0.1:29613"  # type: ignore[assignment]
    chosen = torch.device("cpu")
    if device == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
        dist.init_process_group("nccl", **where)  # type: ignore[arg-type]
    else:
        from megatron_cpu import make_cpu_capable

        make_cpu_capable()
        dist.init_process_group("gloo", **where)  # type: ignore[arg-type]
    from megatron.core import parallel_state
    from megatron.core.config import set_experimental_flag

    set_experimental_flag(device == "cuda")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world, expert_tensor_parallel_size=1)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", type=int, choices=(0, 1), help="only this one")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kernels", action="store_true", help="list the longest kernels")
    parser.add_argument("--seconds", type=int, default=170, help="give up after this long, with all stacks")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    device = start(args.device)
    import megatron.core
    from megatron.core.transformer.moe import token_dispatcher

    from megatron_moe_v2 import close_buffers, prepare_buffer
    from megatron_moe_v2.megatron import install

    managers = {"flex/token": token_dispatcher._DeepepManager}
    install(layout="expert")  # its functions serve Megatron's own manager as well
    managers["flex/expert"] = token_dispatcher._DeepepManager

    first = dist.get_rank() == 0
    shapes = TINY if device.type == "cpu" else SHAPES if args.shape is None else (SHAPES[args.shape],)
    if first:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        versions = f"torch {torch.__version__}, megatron-core {megatron.core.__version__}"
        print(f"{name}, {versions}, {dist.get_world_size()} ranks, median of {args.rounds}", flush=True)
    clock = Clock(device)
    for shape in shapes:
        install(layout="expert", max_tokens_per_rank=shape.tokens)
        scene = Scene(shape, device, managers)
        entry = prepare_buffer(
            scene.dispatchers["flex/expert"].tp_ep_group,
            hidden=shape.hidden,
            num_topk=shape.topk,
            num_max_tokens_per_rank=shape.tokens,
            num_experts=shape.experts,
            warmup=True,
        )
        scene.check()
        lines = measure(scene, entry, clock, args.rounds, args.kernels)
        if first:
            kind = type(scene.experts).__name__
            print(
                f"\n{entry.describe()}\n\nT {shape.tokens} x H {shape.hidden}, K {shape.topk}, {shape.experts} experts "
                f"of ffn {shape.ffn}, {kind}, forward and backward:\n"
            )
            print("\n".join(lines), flush=True)
        del scene
        close_buffers()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
