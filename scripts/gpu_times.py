"""Milliseconds on a device, and what rank 0 prints, as the measuring scripts of this folder share them."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

__all__ = ["Step", "at_estimate", "back_to_back", "elapsed", "kernels", "kernels_of", "medians", "milliseconds", "say"]

Step = Callable[[], object]


def at_estimate(entry: Any, step: Step) -> Step:
    """``step`` with the token layout at DeepEP's own SM estimate, whatever tuning found for the buffer ``entry``."""

    def run() -> None:
        found = entry.tuned.pop(False)
        try:
            step()
        finally:
            entry.tuned[False] = found

    return run


def milliseconds(run: Step, device: str = "cuda") -> float:
    """Between CUDA events around ``run``; on a CPU, of the clock."""
    if device == "cpu":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def kernels_of(run: Step, together: Step | None = None) -> dict[str, list[float]]:
    """Each kernel, copy and fill of ``run``, by name, from torch.profiler.

    ``together`` lets ranks start at once: a kernel that waits for another rank counts its wait. It launches nothing.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        if together is not None:
            together()
        run()
        torch.cuda.synchronize()
    found: defaultdict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        annotation = getattr(event, "is_user_annotation", False) or event.name.startswith(("nccl:", "c10d::"))
        if event.device_type == torch.autograd.DeviceType.CUDA and not annotation:
            found[event.name].append(event.device_time / 1e3)
    return found


def medians(runs: dict[str, Step], rounds: int, measure: Callable[[Step], float]) -> dict[str, float]:
    """Interleaved, so that a machine that slows down does so for all."""
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(measure(run))
    return {name: statistics.median(spent) for name, spent in times.items()}


def elapsed(step: Step) -> float:
    """Milliseconds of a step that all ranks begin together."""
    if dist.get_world_size() > 1:
        dist.barrier()
    return milliseconds(step)


def back_to_back(step: Step, rounds: int = 10) -> float:
    """Median milliseconds of a step among others of its kind, as in training: the host may run ahead."""

    def several() -> None:
        for _ in range(rounds):
            step()

    return statistics.median(elapsed(several) for _ in range(5)) / rounds


def kernels(step: Step, rounds: int = 7) -> tuple[float, int]:
    """Milliseconds in kernels and number of kernels, a step.

    The median of several steps, with several ranks the least of each kernel: one that waits for another GPU counts its
    wait.
    """
    found = [_kernels_of_one(step) for _ in range(rounds)]
    typical = min if dist.get_world_size() > 1 else statistics.median
    times = [typical(sum(one[name]) for one in found if name in one) for name in set().union(*found)]
    return sum(times), sum(len(times) for times in found[0].values())


def _kernels_of_one(step: Step) -> dict[str, list[float]]:
    if dist.get_world_size() > 1:
        torch.cuda.synchronize()
        dist.barrier()
    return kernels_of(step)


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)
