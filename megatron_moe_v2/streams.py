"""Event and stream rules of the contract.

``previous_event`` is a raw event handle and goes only with comm-stream allocation. An event is waited for and dropped
at once, never stored: it may hold the outputs, and output → graph → context → event → output would never die. After
any exception the caller's current stream is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["finish", "launch_arguments", "restored_on_error"]


def launch_arguments(buffer: Any, *, async_finish: bool, allocate_on_comm_stream: bool) -> dict[str, Any]:
    """The stream arguments of a dispatch or combine of ``buffer``."""
    return {
        "previous_event": buffer.capture() if allocate_on_comm_stream else None,
        "async_with_compute_stream": async_finish,
        "allocate_on_comm_stream": allocate_on_comm_stream,
    }


def finish(event: Any) -> None:
    """Let the current stream wait for an ``EventOverlap`` if it holds an event, and drop the event."""
    if event.event is not None:
        event.current_stream_wait(release_handle=True)


@contextmanager
def restored_on_error() -> Iterator[None]:
    """Set the current CUDA stream back if the block raises: DeepEP leaves its own stream current then."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    try:
        yield
    except BaseException:
        if stream is not None:
            torch.cuda.set_stream(stream)
        raise
