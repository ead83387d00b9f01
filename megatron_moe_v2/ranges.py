"""Named ranges around each phase, for ``torch.profiler`` and NVTX; nothing where neither asks for them.

Their names: ``moe dispatch``, ``moe repeated dispatch`` (of a ``RoutingLayout``), ``moe combine``;
``moe dispatch backward`` (a combine), ``moe combine backward`` (a cached dispatch); ``moe permute``, ``moe unpermute``,
``moe repack``, ``moe unrepack`` and the same with ``backward``.

A range covers what the host does to launch its phase; kernels belong to it by their launch. A running profiler sees it
always, and with ``MCORE_DEEPEP_V2_NVTX=1``, read when the first buffer is built, it is an NVTX range too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.autograd import profiler

__all__ = ["named", "profiler", "ranged", "ranges"]

_F = TypeVar("_F", bound=Callable[..., Any])


class _Ranges:
    """What the settings in force ask for.

    Attributes:
        nvtx: open NVTX ranges.
    """

    nvtx = False

    def use_nvtx(self, wanted: bool) -> None:
        """NVTX ranges from now on, where there is CUDA."""
        self.nvtx = wanted and torch.cuda.is_available()


ranges = _Ranges()
"""Those of this process. ``ranges.nvtx or profiler._is_profiler_enabled`` says whether :func:`named` does anything."""


@contextmanager
def named(phase: str) -> Iterator[None]:
    """The range ``moe PHASE`` around the block."""
    name = f"moe {phase}"
    with profiler.record_function(name):
        if not ranges.nvtx:
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def ranged(phase: str) -> Callable[[_F], _F]:
    """A function that runs in the range ``moe PHASE``."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (ranges.nvtx or profiler._is_profiler_enabled):
                return function(*args, **kwargs)
            with named(phase):
                return function(*args, **kwargs)

        return cast(_F, call)

    return decorate
