"""Milliseconds on a device, as the measuring scripts of this folder take them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["kernels_of", "milliseconds"]


def milliseconds(run: Callable[[], object], device: str = "cuda") -> float:
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


def kernels_of(run: Callable[[], object], together: Callable[[], object] | None = None) -> dict[str, list[float]]:
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
