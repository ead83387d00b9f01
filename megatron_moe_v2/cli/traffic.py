"""What a benchmarked call puts on the wire: bytes handed to ``torch.distributed`` collectives, and time inside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Clock", "Traffic", "counted"]

_SENT_ARGUMENT = {
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_reduce": 0,
    "all_to_all": 1,
    "all_to_all_single": 1,
    "broadcast": 0,
    "reduce_scatter_tensor": 1,
}
"""Collectives that are watched, and the position of what they send."""


class Clock:
    """Marks on the host, or on the current CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until everything before has run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @staticmethod
    def between(start: Any, end: Any) -> float:
        """Seconds between two marks that have been waited for."""
        return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1e3


class Traffic:
    """What went through collectives since the last :meth:`reset`: bytes, and pairs of marks around each."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.spans: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        self.sent_bytes = 0
        self.spans.clear()


class _Work:
    """What an asynchronous collective returns: the time in its ``wait`` counts too."""

    def __init__(self, work: Any, clock: Clock, traffic: Traffic) -> None:
        self._work, self._clock, self._traffic = work, clock, traffic

    def wait(self, *args: Any) -> Any:
        start = self._clock.mark()
        try:
            return self._work.wait(*args)
        finally:
            self._traffic.spans.append((start, self._clock.mark()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def counted(clock: Clock) -> Iterator[Traffic]:
    """Watch the collectives that are called as ``torch.distributed.NAME`` inside the block."""
    traffic = Traffic()

    def watch(function: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = [*args, *kwargs.values()][position]
            traffic.sent_bytes += sum(one.nbytes for one in ([sent] if isinstance(sent, Tensor) else sent))
            start = clock.mark()
            result = function(*args, **kwargs)
            traffic.spans.append((start, clock.mark()))
            return result if result is None else _Work(result, clock, traffic)

        return call

    watched: dict[str, Any] = {name: watch(getattr(dist, name), position) for name, position in _SENT_ARGUMENT.items()}
    with mock.patch.multiple(dist, **watched):
        yield traffic
