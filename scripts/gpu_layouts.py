"""Token layout with a permutation against expert layout without one, on the real DeepEP V2 at one rank.

    python scripts/gpu_layouts.py                                 # prints Markdown
    python scripts/gpu_layouts.py --shapes 8192x2048,4096x7168

Forward and backward of router output in, rows grouped by expert, identity experts, and back:

    (a) token layout, then multi-hot conversion, permute and un-permute as megatron-core does them unfused
    (b) the same fused: its Triton index conversion and Transformer Engine's permutation
    (c) token layout with this package's Triton permutation
    (d) expert layout, nothing to permute

(a) and (b) call megatron-core's own functions and are left out where it, or Transformer Engine, is missing. Rounds are
interleaved. "GPU ms" is the sum of kernel times from torch.profiler, "elapsed ms" the median between CUDA events.
Below it, (d) beside the same four calls made on DeepEP directly, and the host's time for each call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_moe_v2 import FlexTokenDispatcher, close_buffers, fused_combine, fused_dispatch, prepare_buffer

NUM_TOPK, NUM_EXPERTS, ROUNDS = 8, 128, 20

Step = Callable[[], object]


class Scene:
    """One shape: inputs with gradients, and what comes from above."""

    def __init__(self, tokens: int, hidden: int) -> None:
        self.tokens, self.hidden = tokens, hidden
        draw = torch.Generator("cuda").manual_seed(0)
        self.x = torch.randn(tokens, hidden, device="cuda", generator=draw).bfloat16().requires_grad_()
        weights, self.idx = torch.rand(tokens, NUM_EXPERTS, device="cuda", generator=draw).topk(NUM_TOPK)
        self.weights = weights.softmax(-1).requires_grad_()
        self.upstream = torch.randn(tokens, hidden, device="cuda", generator=draw).bfloat16()
        self.copies = torch.ones(tokens * NUM_TOPK, device="cuda")

    def backward(self, y: Tensor, weights: Tensor) -> None:
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

        manager = SimpleNamespace(num_local_experts=NUM_EXPERTS)

        def step() -> None:
            recv_x, idx, probs, counts, handle = fused_dispatch(self.x, self.idx, self.weights, NUM_EXPERTS, None)
            if fused:
                routing, dense = fused_indices_to_multihot(idx, probs, NUM_EXPERTS)
            else:
                routing, dense = _DeepepManager._indices_to_multihot(manager, idx, probs)
            rows, weights, order, *_ = permute(
                recv_x, routing, probs=dense, num_out_tokens=int(counts.sum()), fused=fused, tokens_per_expert=counts
            )
            back = unpermute(rows, order, restore_shape=recv_x.shape, routing_map=routing, fused=fused)
            self.backward(fused_combine(back.to(recv_x.dtype), None, handle)[0], weights)

        return step

    def raw(self, raw: Any, num_sms: int) -> Step:
        sizes = {"num_experts": NUM_EXPERTS, "num_max_tokens_per_rank": self.tokens, "expert_alignment": 1}
        x, weights = self.x.detach(), self.weights.detach()

        def step() -> None:
            recv_x, _, recv_w, handle, _ = raw.dispatch(
                x, topk_idx=self.idx, topk_weights=weights, num_sms=num_sms, do_expand=True, **sizes
            )
            raw.combine(recv_x, handle, num_sms=num_sms)
            grad, *_ = raw.dispatch(self.upstream, handle=handle, num_sms=num_sms, do_expand=True, **sizes)
            raw.combine(grad, handle, topk_weights=recv_w, num_sms=num_sms)

        return step


def elapsed(step: Step) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def kernels(step: Step, rounds: int = 5) -> tuple[float, int]:
    """Milliseconds in kernels and number of kernels, a step."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.device_time for event in events) / rounds / 1e3, len(events) // rounds


def copy_gbs(nbytes: int = 2**30) -> float:
    """What a device-to-device copy moves, bytes read and written, in GB/s."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * nbytes / statistics.median(elapsed(lambda: target.copy_(source)) for _ in range(9)) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8192x2048,4096x7168", help="tokens x hidden, comma separated")
    shapes = [tuple(map(int, shape.split("x"))) for shape in parser.parse_args().shapes.split(",")]
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29611", rank=0, world_size=1)
    bandwidth = copy_gbs()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s, median of {ROUNDS}\n")
    for tokens, hidden in shapes:
        entry = prepare_buffer(hidden=hidden, num_topk=NUM_TOPK, num_max_tokens_per_rank=tokens)
        print(entry.describe(), "\n")
        scene = Scene(tokens, hidden)
        steps: dict[str, Step] = {"(c) token + our Triton": scene.flex("token"), "(d) expert": scene.flex("expert")}
        for name, fused in (("(a) token + megatron-core unfused", False), ("(b) token + megatron-core and TE", True)):
            try:
                step = scene.megatron(fused)
                step()
                steps[name] = step
            except (ImportError, ValueError) as error:
                print(f"{name} left out: {error}\n")
        table(dict(sorted(steps.items())), tokens, hidden, bandwidth)
        overhead(scene, entry)
        close_buffers()
    dist.destroy_process_group()


def table(steps: dict[str, Step], tokens: int, hidden: int, bandwidth: float) -> None:
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(elapsed(step))
    row = 2 * hidden
    # Rows read and written forward; backward is the same again. Token layout: dispatch and combine move each token once
    # in and out, permute and un-permute read or write each copy once more.
    once, copy = tokens * row, tokens * NUM_TOPK * row
    floors = {"token": 2 * (2 * 2 * once + 2 * (once + copy)), "expert": 2 * 2 * (once + copy)}
    print(f"T {tokens} x H {hidden}, K {NUM_TOPK}, E {NUM_EXPERTS}, forward and backward:\n")
    print("| | elapsed ms | GPU ms | kernels | copy floor ms | peak MiB |\n|---|---|---|---|---|---|")
    for name, step in steps.items():
        gpu, count = kernels(step)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        floor = floors["expert" if name.startswith("(d)") else "token"] / bandwidth / 1e6
        print(
            f"| {name} | {statistics.median(times[name]):.3f} | {gpu:.3f} | {count} | {floor:.3f} | {peak:.0f} |",
            flush=True,
        )
    print()


def overhead(scene: Scene, entry: Any) -> None:
    raw = entry.buffer.raw
    num_sms = entry.num_sms_for(NUM_EXPERTS, NUM_TOPK, True)
    ours, theirs = scene.flex("expert"), scene.raw(raw, num_sms)
    for step in (ours, theirs):
        step()
    gpu = {"ours": [], "raw": []}  # type: dict[str, list[float]]
    for _ in range(3):
        gpu["ours"].append(kernels(ours)[0])
        gpu["raw"].append(kernels(theirs)[0])
    mine, other = statistics.median(gpu["ours"]), statistics.median(gpu["raw"])
    print(f"GPU time of four calls, expert layout: ours {mine:.3f} ms, DeepEP alone {other:.3f} ms, {mine / other:.3f}")
    print(f"kernels: ours {kernels(ours)[1]}, DeepEP alone {kernels(theirs)[1]} (of ours 2 fill gradients in the test)")
    print(f"host time a call beyond DeepEP's: {host_times(scene, entry, num_sms)}\n", flush=True)


def host_times(scene: Scene, entry: Any, num_sms: int) -> str:
    """Median microseconds of the Python call, ours less DeepEP's; the device is idle before each."""
    raw = entry.buffer.raw
    sizes = {"num_experts": NUM_EXPERTS, "num_max_tokens_per_rank": scene.tokens, "expert_alignment": 1}
    x, weights = scene.x.detach(), scene.weights.detach()
    recv_x, _, _, _, handle = fused_dispatch(x, scene.idx, weights, NUM_EXPERTS, None, layout="expert")
    pairs: dict[str, tuple[Step, Step]] = {
        "dispatch": (
            lambda: fused_dispatch(scene.x, scene.idx, scene.weights, NUM_EXPERTS, None, layout="expert"),
            lambda: (
                raw.dispatch(x, topk_idx=scene.idx, topk_weights=weights, num_sms=num_sms, do_expand=True, **sizes)
                and None
            ),
        ),
        "combine": (
            lambda: fused_combine(recv_x, None, handle),
            lambda: raw.combine(recv_x, handle.ep_handle, num_sms=num_sms),
        ),
    }
    texts = []
    for name, (ours, theirs) in pairs.items():
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(200):
            for side, run in zip(times, (ours, theirs), strict=True):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                side.append(time.perf_counter() - start)
        mine, other = (statistics.median(side) * 1e6 for side in times)
        texts.append(f"{name} {mine - other:.0f} µs ({mine:.0f} against {other:.0f})")
    return ", ".join(texts)


if __name__ == "__main__":
    main()
