"""Token layout with a permutation against expert layout without one, on the real DeepEP V2.

    python scripts/gpu_layouts.py                                 # one rank; prints Markdown
    python scripts/gpu_layouts.py --shapes 8192x2048,4096x7168
    torchrun --standalone --nproc-per-node 2 scripts/gpu_layouts.py  # two GPUs

Forward and backward of router output in, rows grouped by expert, identity experts, and back:

    (a) token layout, then multi-hot conversion, permute and un-permute as megatron-core does them unfused
    (b) the same fused: its Triton index conversion and Transformer Engine's permutation
    (c) token layout with this package's Triton permutation
    (d) expert layout, nothing to permute

    (e) no fused dispatch: every routed copy by NCCL all-to-all, permuted, sorted and un-permuted by Transformer Engine
    (f) as (b) on DeepEP V1, with several ranks; measured after the others

With ``MCORE_DEEPEP_V2_NUM_SMS=tune`` all use the SM counts that tuning found, and (b) is measured again at DeepEP's own
estimate, which is what whoever does not tune has.

(a), (b), (e) and (f) call megatron-core's own functions and are left out where it, or Transformer Engine, is missing.
Rounds are interleaved. "GPU ms" is the sum of kernel times from torch.profiler (with several ranks the least of several
rounds, for waiting counts), "elapsed ms" the median between CUDA events of one step begun with an idle device, "back to
back" that of a step among ten in a row, all of rank 0. A backward runs in the calling thread: what handing it over to
autograd's own costs is paid once a step in training, not once a layer (``--threads`` for that). All must give the same
output. Below it what ``gpu_overhead`` says of (d).
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpu_overhead import host_profile, overhead
from gpu_times import Step, at_estimate, back_to_back, elapsed, kernels, medians, say
from torch import Tensor

from megatron_moe_v2 import FlexTokenDispatcher, close_buffers, fused_combine, fused_dispatch, prepare_buffer

NUM_TOPK, NUM_EXPERTS, ROUNDS = 8, 128, 20


class Scene:
    """One shape: inputs with gradients, and what comes from above."""

    def __init__(self, tokens: int, hidden: int) -> None:
        self.tokens, self.hidden, self.num_experts = tokens, hidden, NUM_EXPERTS
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_local_experts = NUM_EXPERTS // self.num_ranks
        draw = torch.Generator("cuda").manual_seed(self.rank)
        self.x = torch.randn(tokens, hidden, device="cuda", generator=draw).bfloat16().requires_grad_()
        weights, self.idx = torch.rand(tokens, NUM_EXPERTS, device="cuda", generator=draw).topk(NUM_TOPK)
        self.weights = weights.softmax(-1).requires_grad_()
        self.upstream = torch.randn(tokens, hidden, device="cuda", generator=draw).bfloat16()
        self.copies = torch.ones(self.num_ranks * tokens * NUM_TOPK, device="cuda")
        self.y: Tensor | None = None

    def backward(self, y: Tensor, weights: Tensor) -> None:
        self.y = y.detach()
        torch.autograd.backward([y, weights], [self.upstream, self.copies[: weights.numel()].view_as(weights)])
        self.x.grad = self.weights.grad = None

    def flex(self, layout: Any) -> Step:
        dispatcher = FlexTokenDispatcher(num_experts=NUM_EXPERTS, layout=layout)

        def step() -> None:
            sent = dispatcher.dispatch(self.x, self.idx, self.weights)
            self.backward(dispatcher.combine(sent.tokens, sent, apply_weights=False), sent.weights)

        return step

    def megatron(self, fused: bool) -> Step:
        from megatron.core.fusions.fused_indices_converter import fused_indices_to_multihot
        from megatron.core.transformer.moe.moe_utils import permute, unpermute
        from megatron.core.transformer.moe.token_dispatcher import _DeepepManager

        manager = SimpleNamespace(num_local_experts=self.num_local_experts)

        def step() -> None:
            recv_x, idx, probs, counts, handle = fused_dispatch(self.x, self.idx, self.weights, NUM_EXPERTS, None)
            if fused:
                routing, dense = fused_indices_to_multihot(idx, probs, self.num_local_experts)
            else:
                routing, dense = _DeepepManager._indices_to_multihot(manager, idx, probs)
            rows, weights, order, *_ = permute(
                recv_x, routing, probs=dense, num_out_tokens=int(counts.sum()), fused=fused, tokens_per_expert=counts
            )
            back = unpermute(rows, order, restore_shape=recv_x.shape, routing_map=routing, fused=fused)
            self.backward(fused_combine(back.to(recv_x.dtype), None, handle)[0], weights)

        return step

    def plain(self) -> Step:
        from megatron.core.tensor_parallel import all_to_all
        from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute

        group, num_local = dist.group.WORLD, self.num_local_experts
        chunk = torch.arange(NUM_EXPERTS, device="cuda").view(self.num_ranks, num_local)
        by_expert, by_source = chunk.T.ravel(), chunk.view(num_local, self.num_ranks).T.ravel()

        def step() -> None:
            routing = torch.zeros(self.tokens, NUM_EXPERTS, dtype=torch.bool, device="cuda").scatter(1, self.idx, True)
            dense = torch.zeros(self.tokens, NUM_EXPERTS, device="cuda").scatter(1, self.idx, self.weights)
            every = torch.empty(self.num_ranks, NUM_EXPERTS, dtype=torch.int64, device="cuda")
            dist.all_gather_into_tensor(every, routing.sum(0))
            mine = every[:, self.rank * num_local : (self.rank + 1) * num_local]
            sent = every[self.rank].view(self.num_ranks, num_local).sum(1).tolist()
            received = mine.sum(1).tolist()
            rows, weights, order, *_ = permute(
                self.x, routing, probs=dense, num_out_tokens=self.tokens * NUM_TOPK, fused=True
            )
            rows, weights = (all_to_all(group, one, received, sent) for one in (rows, weights))
            if self.num_ranks > 1:
                rows, weights = sort_chunks_by_idxs(rows, mine.ravel(), by_expert, probs=weights, fused=True)
                rows, _ = sort_chunks_by_idxs(rows, mine.T.ravel(), by_source, fused=True)
            rows = all_to_all(group, rows, sent, received)
            back = unpermute(rows, order, restore_shape=self.x.shape, routing_map=routing, fused=True)
            self.backward(back.to(self.x.dtype), weights)

        return step


def copy_gbs(nbytes: int = 2**30) -> float:
    """What a device-to-device copy moves, bytes read and written, in GB/s."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * nbytes / statistics.median(elapsed(lambda: target.copy_(source)) for _ in range(9)) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8192x2048,4096x7168", help="tokens x hidden, comma separated")
    parser.add_argument("--profile", action="store_true", help="where the host's time goes in our calls, at one rank")
    parser.add_argument("--threads", action="store_true", help="let a backward run in autograd's own thread")
    args = parser.parse_args()
    torch.autograd.set_multithreading_enabled(args.threads)
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    where = {} if "RANK" in os.environ else {"init_method": "tcp://127.0.0.1:29611", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", **where)
    bandwidth = copy_gbs()
    say(
        f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} "
        f"GB/s, median of {ROUNDS}\n"
    )
    for tokens, hidden in shapes:
        entry = prepare(tokens, hidden)
        scene = Scene(tokens, hidden)
        steps: dict[str, Step] = {"(c) token + our Triton": scene.flex("token"), "(d) expert": scene.flex("expert")}
        for name, make in {
            "(a) token + megatron-core unfused": lambda: scene.megatron(False),  # noqa: B023
            "(b) token + megatron-core and TE": lambda: scene.megatron(True),  # noqa: B023
            "(e) all-to-all + TE": scene.plain,
        }.items():
            add(steps, name, make)
        fused = steps.get("(b) token + megatron-core and TE")
        if entry.tuned and fused is not None:
            steps["(b) at DeepEP's SM estimate"] = at_estimate(entry, fused)
        say(f"T {tokens} x H {hidden} a rank, K {NUM_TOPK}, E {NUM_EXPERTS}, forward and backward:\n")
        say("| | elapsed ms | back to back ms | GPU ms | kernels | copy floor ms | peak MiB |\n" + "|---" * 7 + "|")
        table(dict(sorted(steps.items())), scene, bandwidth)
        overhead(scene, entry, ROUNDS)
        if args.profile:
            host_profile(scene, entry.buffer.raw)
        close_buffers()
        if scene.num_ranks > 1:
            os.environ["MCORE_DEEPEP_V2_BACKEND"] = "deepep_v1"
            wanted = os.environ.pop("MCORE_DEEPEP_V2_NUM_SMS", None)
            prepare(tokens, hidden)
            steps = {}
            add(steps, "(f) V1, token + megatron-core and TE", lambda: scene.megatron(True))  # noqa: B023
            table(steps, scene, bandwidth)
            close_buffers()
            os.environ["MCORE_DEEPEP_V2_BACKEND"] = "auto"
            if wanted is not None:
                os.environ["MCORE_DEEPEP_V2_NUM_SMS"] = wanted
    dist.destroy_process_group()


def prepare(tokens: int, hidden: int) -> Any:
    """The buffer, warmed up, and tuned where the environment asks for it."""
    entry = prepare_buffer(
        hidden=hidden, num_topk=NUM_TOPK, num_max_tokens_per_rank=tokens, num_experts=NUM_EXPERTS, warmup=True
    )
    say(f"{entry.describe()}; SM counts tuned for (dispatch, combine) by layout: {entry.tuned or 'none'}\n")
    return entry


def add(steps: dict[str, Step], name: str, make: Callable[[], Step]) -> None:
    """The step, unless what it needs is not installed."""
    try:
        step = make()
        step()
        steps[name] = step
    except (ImportError, ValueError) as error:
        say(f"{name} left out: {error}\n")


def table(steps: dict[str, Step], scene: Scene, bandwidth: float) -> None:
    for name, step in steps.items():
        for _ in range(3):
            step()
        assert scene.y is not None
        if not torch.allclose(scene.y, scene.x.detach() * NUM_TOPK, rtol=2e-2, atol=1e-2):
            say(f"{name}: wrong values")
    times = medians(steps, ROUNDS, elapsed)
    row = 2 * scene.hidden
    # At one rank, rows read and written forward; backward is the same again. Token layout: dispatch and combine move
    # each token once in and out, permute and un-permute read or write each copy once more.
    once, copy = scene.tokens * row, scene.tokens * NUM_TOPK * row
    floors = {"token": 2 * (2 * 2 * once + 2 * (once + copy)), "expert": 2 * 2 * (once + copy)}
    for name, step in steps.items():
        gpu, count = kernels(step)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        floor = floors["expert" if name.startswith(("(d)", "(e)")) else "token"] / bandwidth / 1e6
        least = f"{floor:.3f}" if scene.num_ranks == 1 else ""
        row = f"{times[name]:.3f} | {back_to_back(step):.3f} | {gpu:.3f} | {count} | {least}"
        say(f"| {name} | {row} | {peak:.0f} |")
    say("")


if __name__ == "__main__":
    main()
