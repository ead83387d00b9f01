"""Event and stream rules of the contract.

``previous_event`` is a raw event handle and goes only with comm-stream allocation. An event is waited for and dropped
at once, never stored: it may hold the outputs, and output → graph → context → event → output would never die.
"""

from __future__ import annotations

from typing import Any

__all__ = ["finish", "finish_if_any", "launch_arguments"]


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


def finish_if_any(event: Any) -> None:
    """:func:`finish`, where there is an ``EventOverlap``."""
    if event is not None:
        finish(event)
