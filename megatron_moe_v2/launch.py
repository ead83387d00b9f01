"""One call of a buffer, from the preparation of its arguments on, with all that must happen around it."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .agreement import post_failure, posted_failure
from .buffers.deepep import explained
from .errors import CaptureError, CommunicationError
from .heartbeat import heartbeat
from .pool import typed
from .ranges import named, profiler, ranges

if TYPE_CHECKING:
    from .communication import Call

__all__ = ["Launch"]


class Launch:
    """``with Launch(...) as launch:`` around a call of the buffer and the preparation of its arguments.

    Whatever fails is explained, remembered and told to the ranks that wait; the stream is then what it was. Where
    somebody looks, the range of ``phase`` is around it.

    Attributes:
        reached: all is prepared, and what fails from here on fails in the buffer; the block sets it.
    """

    __slots__ = ("_call", "_operation", "_undo", "reached")

    def __init__(self, call: Call, operation: str, x: Tensor, phase: str) -> None:
        entry = call.entry
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            _refuse_in_capture(call, operation)
            entry.note_capture()
        self._call, self._operation, self.reached = call, operation, False
        self._undo = None
        if call.allocate_on_comm_stream or ranges.nvtx or profiler._is_profiler_enabled:
            self._undo = _undo(call, phase)
        entry.operations.note(operation, x.shape)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raise what ``error`` means, if that is something else."""
        entry = self._call.entry
        entry.operations.since = None
        if self._undo is not None:
            self._undo.close()
        if error is None:
            entry.broken = False  # all ranks are in step
            return
        if not self.reached and isinstance(error, Exception):
            entry.fail(
                self._operation, error if isinstance(error, torch.OutOfMemoryError) else typed(error, self._operation)
            )
        if entry.backend.name == "embedded":  # which told them itself
            entry.broken = entry.broken or isinstance(error, CommunicationError)
            return
        meant = explained(error, entry.group.rank(), entry.group.size())
        if isinstance(meant, CommunicationError):
            entry.broken = True
            posted = posted_failure(entry.group, entry.operations.name, entry.operations.number - 1)
            raise posted or CommunicationError(f"{meant}\n{heartbeat.report(entry.group)}") from error
        if isinstance(meant, Exception):
            entry.broken = True  # the others will time out, and then make no collective with this rank
            post_failure(entry.group, entry.operations.name, entry.operations.number, meant)
        if meant is not error:
            raise meant from error


def _undo(call: Call, phase: str) -> ExitStack:
    """The range, and the way back to the stream: DeepEP leaves its own current where a call fails."""
    undo = ExitStack()
    if ranges.nvtx or profiler._is_profiler_enabled:
        undo.enter_context(named(phase))
    if call.allocate_on_comm_stream and torch.cuda.is_initialized():
        undo.callback(torch.cuda.set_stream, torch.cuda.current_stream())
    return undo


def _refuse_in_capture(call: Call, operation: str) -> None:
    """A call that synchronises the host cannot be captured."""
    entry, reason = call.entry, None
    if entry.backend.name != "deepep_v2":
        reason = f"{entry.backend.class_name} synchronises the host in every call"
    elif operation == "dispatch" and not call.static_shapes:
        reason = "the host waits for the counts: pass static_shapes=True"
    elif operation == "dispatch" and call.expert_layout and entry.spec.deterministic:
        reason = "sorting the expert layout, which DETERMINISTIC=1 asks for, synchronises the host"
    if reason is not None:
        raise CaptureError(f"{operation} inside a CUDA graph capture", fix=f"Keep it outside: {reason}.")
