"""What this package adds to DeepEP's own calls in the expert layout: part of ``gpu_layouts``.

The step beside the same four calls made on DeepEP directly, with and without the least autograd functions that can make
them; and the host's time for each call.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_times import Step, back_to_back, elapsed, kernels, medians, say
from torch import Tensor

from megatron_moe_v2 import fused_combine, fused_dispatch

__all__ = ["host_profile", "overhead"]


def overhead(scene: Any, entry: Any, rounds: int) -> None:
    """Print both tables of a ``gpu_layouts.Scene``, whose buffer is ``entry``."""
    num_sms = entry.num_sms_for(scene.num_experts, scene.idx.shape[1], True)
    of_both = entry.tuned.get(True, (num_sms, num_sms))
    theirs = Direct(entry.buffer.raw, scene.idx, scene.num_experts, num_sms=of_both, ceiling=scene.tokens)
    steps: dict[str, Step] = {
        "ours": scene.flex("expert"),
        "bare autograd functions": lambda: scene.backward(*theirs.through_autograd(scene.x, scene.weights)),
        "DeepEP alone": lambda: theirs.step(scene.x.detach(), scene.weights.detach(), scene.upstream),
    }
    times = medians(steps, rounds, elapsed)
    say("| | elapsed ms | back to back ms | GPU ms | kernels |\n" + "|---" * 5 + "|")
    for name, step in steps.items():
        gpu, count = kernels(step)
        say(f"| {name} | {times[name]:.3f} | {back_to_back(step):.3f} | {gpu:.3f} | {count} |")
    say("")
    for how in HOST_TIMES:
        say(f"host time a call, {HOST_TIMES[how]}: {host_times(scene, theirs, how)}")
    say("")


class Direct:
    """The four calls of a step of the expert layout made on DeepEP's own buffer.

    Args:
        num_sms: SM counts of dispatch and combine.
        ceiling: most tokens of a rank, as the buffer was built for.
    """

    def __init__(self, raw: Any, idx: Tensor, num_experts: int, *, num_sms: tuple[int, int], ceiling: int) -> None:
        self.raw, self.idx, self.num_sms = raw, idx, num_sms
        self.sizes = {
            "num_experts": num_experts,
            "num_max_tokens_per_rank": ceiling,
            "expert_alignment": 1,
            "num_sms": num_sms[0],
            "do_expand": True,
        }

    def dispatch(self, x: Tensor, weights: Tensor) -> Any:
        return self.raw.dispatch(x, topk_idx=self.idx, topk_weights=weights, **self.sizes)

    def again(self, x: Tensor, handle: Any) -> Tensor:
        return self.raw.dispatch(x, handle=handle, **self.sizes)[0]  # type: ignore[no-any-return]

    def combine(self, x: Tensor, handle: Any, weights: Tensor | None = None) -> Any:
        return self.raw.combine(x, handle, topk_weights=weights, num_sms=self.num_sms[1])

    def step(self, x: Tensor, weights: Tensor, upstream: Tensor) -> None:
        recv_x, _, recv_weights, handle, _ = self.dispatch(x, weights)
        self.combine(recv_x, handle)
        self.combine(self.again(upstream, handle), handle, recv_weights)

    def through_autograd(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        recv_x, recv_weights, handle = BareDispatch.apply(x, weights, self)
        return BareCombine.apply(recv_x, handle, self), recv_weights


def _keep(ctx: Any, handle: Any, direct: Direct) -> None:
    ctx.save_for_backward(*[one for one in vars(handle).values() if isinstance(one, Tensor)])
    ctx.handle, ctx.direct = handle, direct


class BareDispatch(torch.autograd.Function):
    """The least that a dispatch with gradients can cost: DeepEP's call, and its handle's tensors saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, direct: Direct) -> tuple[Any, ...]:
        recv_x, _, recv_weights, handle, _ = direct.dispatch(x, weights)
        _keep(ctx, handle, direct)
        return recv_x, recv_weights, handle

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor, _: None) -> tuple[Any, ...]:
        assert ctx.saved_tensors
        return (*ctx.direct.combine(grad_x, ctx.handle, grad_weights)[:2], None)


class BareCombine(torch.autograd.Function):
    """As :class:`BareDispatch`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any, direct: Direct) -> Tensor:
        _keep(ctx, handle, direct)
        return direct.combine(x, handle)[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        assert ctx.saved_tensors
        return ctx.direct.again(grad, ctx.handle), None, None


HOST_TIMES = {
    "alone": "500 of its kind back to back",
    "in turn": "back to back with the others in turn",
    "idle": "an idle device and cold caches before each",
}


def host_times(scene: Any, theirs: Direct, how: str) -> str:
    """Median microseconds of the Python call, ours less DeepEP's.

    Few tokens, so that a call back to back with others does not wait for the device; a dispatch always waits for its
    own counts. ``"idle"``: the device is waited for and the caches are filled with something else before each call.
    """
    tokens = 16
    x, weights, idx = scene.x.detach()[:tokens], scene.weights.detach()[:tokens], scene.idx[:tokens]
    leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    few = Direct(theirs.raw, idx, scene.num_experts, num_sms=theirs.num_sms, ceiling=scene.tokens)
    recv_x, _, _, _, handle = fused_dispatch(leaf, idx, leaf_weights, scene.num_experts, None, layout="expert")
    plain = recv_x.detach()
    kept = torch.ones(2**22), torch.ones(2**22)
    phases: dict[str, tuple[Step, ...]] = {
        "dispatch": (
            lambda: fused_dispatch(leaf, idx, leaf_weights, scene.num_experts, None, layout="expert"),
            lambda: few.dispatch(x, weights),
            lambda: BareDispatch.apply(leaf, leaf_weights, few),
        ),
        "combine": (
            lambda: fused_combine(recv_x, None, handle),
            lambda: few.combine(plain, handle.ep_handle),
            lambda: BareCombine.apply(recv_x, handle.ep_handle, few),
        ),
    }
    texts = []
    for name, sides in phases.items():
        times: list[list[float]] = [[] for _ in sides]
        order = sorted([0, 1, 2] * 500) if how == "alone" else [0, 1, 2] * (500 if how == "in turn" else 100)
        for side in order:
            if how == "idle":
                torch.cuda.synchronize()
                kept[0].copy_(kept[1])
            start = time.perf_counter()
            result = sides[side]()
            times[side].append(time.perf_counter() - start)
            del result
        mine, other, bare = (statistics.median(column) * 1e6 for column in times)
        texts.append(
            f"{name} {mine:.0f} µs, {mine - other:.0f} beyond DeepEP's {other:.0f}, a bare autograd function's "
            f"{bare - other:.0f}"
        )
    return "; ".join(texts)


def host_profile(scene: Any, raw: Any) -> None:
    """Microseconds before, in and after DeepEP's part of our calls, and the functions that take them."""
    x, weights, idx = scene.x.detach()[:16], scene.weights.detach()[:16], scene.idx[:16]
    leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    recv_x, *_, handle = fused_dispatch(leaf, idx, leaf_weights, scene.num_experts, None, layout="expert")
    for name, run in {
        "dispatch": lambda: fused_dispatch(leaf, idx, leaf_weights, scene.num_experts, None, layout="expert"),
        "combine": lambda: fused_combine(recv_x, None, handle),
    }.items():
        say(f"{name} {split(run, raw, name)}")
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(500):
            run()
        profiler.disable()
        if dist.get_rank() == 0:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def split(run: Step, raw: Any, name: str, rounds: int = 300) -> str:
    """Medians of the time before, in and after the call of ``raw``'s method, and without it."""
    theirs, marks = getattr(raw, name), []

    def marked(*args: Any, **more: Any) -> Any:
        marks.append(time.perf_counter())
        result = theirs(*args, **more)
        marks.append(time.perf_counter())
        return result

    setattr(raw, name, marked)
    parts: list[tuple[float, ...]] = []
    for _ in range(rounds):
        marks.clear()
        start = time.perf_counter()
        result = run()
        end = time.perf_counter()
        del result
        parts.append((marks[0] - start, marks[1] - marks[0], end - marks[1]))
    delattr(raw, name)
    torch.cuda.synchronize()
    before, inside, after = (statistics.median(column) * 1e6 for column in zip(*parts, strict=True))
    return f"before DeepEP {before:.0f} µs, in it {inside:.0f} µs, after {after:.0f} µs"
