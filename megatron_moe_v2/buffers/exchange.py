"""Two collectives under every embedded dispatch and combine: fixed-size headers, then one byte payload.

A header carries magic, status, sequence number, digest of the call and row count to each peer. It is sent even when the
local call failed, so that every rank sees the failure and raises, and payload sizes always match. At one rank nothing
is exchanged.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import sys
import time
import weakref
import zlib
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError, RankMismatchError, from_wire, rank_table, to_wire
from ..settings import agreement_timeout
from .layout import empty_rows, lanes

__all__ = ["Exchange", "Field", "RowFormat"]

_MAGIC = 0x4D6F4532
_TEXT_BYTES = 2048

_sequences: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Calls so far by group: one count for all its buffers, so that ranks stay in step with different ones too."""

_unanswered: list[tuple[object, Tensor, Tensor]] = []
"""Collectives that were given up, or are waited for: gloo may still write into their tensors."""

_left_alone: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""Groups on which this rank left a call before its end, and why: what it sends next nobody expects."""

_LOOK_SECS = 1.0
"""How often a rank that waits for its peers looks whether one of them closed its buffer."""

_EXIT_SECS = 0.1


@functools.cache
def _at_exit() -> None:
    """Let gloo's threads run before the interpreter ends.

    One of them may hold the last reference to the tensors of a finished collective, which it drops under the
    interpreter's lock: once the interpreter is ending, waiting for that lock aborts the process.
    """
    atexit.register(time.sleep, _EXIT_SECS)


@dataclass(frozen=True, kw_only=True)
class Field:
    """One column block of a payload row: ``width`` elements of ``dtype``."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def nbytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class RowFormat:
    """How a payload row is laid out in bytes; each field starts at a multiple of eight, rows are multiples of 16."""

    fields: tuple[Field, ...]

    @property
    def row_bytes(self) -> int:
        if len(self.fields) == 1:
            return self.fields[0].nbytes
        return -(-sum(-(-field.nbytes // 8) * 8 for field in self.fields) // 16) * 16

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The fields of byte rows ``[n, row_bytes]`` as ``[n, width]`` tensors on the same memory, by name."""
        views, offset = {}, 0
        for field in self.fields:
            views[field.name] = rows[:, offset : offset + field.nbytes].view(field.dtype)
            offset += -(-field.nbytes // 8) * 8
        return views


class Exchange:
    """The transport of one embedded buffer. Collective over the group in the same order on all ranks.

    Attributes:
        name: under which all ranks know the buffer in the store; None keeps a close to this rank.
    """

    name: str | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()
        self.rank = group.rank()
        self._host = torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")
        self._sequence = _sequences.setdefault(group, itertools.count(1))
        self._calls = 0
        self._ranks = dist.get_process_group_ranks(group)
        self._staging: dict[str, Tensor] = {}
        if self.num_ranks > 1:
            _at_exit()

    def headers(self, call: str, rows: list[int], failure: Exception | None = None) -> list[int]:
        """Tell each peer how many rows follow, and learn how many come from each.

        Args:
            call: what this rank is about to do, in words; must be the same on all ranks.
            rows: rows for each peer, R of them; ignored with ``failure``.
            failure: the error of the local checks; raised here after the peers have been told.

        Raises:
            MoEError: ``failure``, or another rank's error under its own type.
            RankMismatchError: ranks make different calls; holds a table.
            CommunicationError: the collective itself failed, or a peer closed its buffer and does not come.
        """
        if self.num_ranks == 1:
            if failure is not None:
                raise failure
            return list(rows)
        if self.group in _left_alone:
            self.close()  # so that nobody waits for this rank
            raise failure or CommunicationError(
                f"the group is out of step since {_left_alone[self.group]}", fix="Use another group, or leave."
            )
        self._calls = sequence = next(self._sequence)
        call = f"call {sequence}: {call}"
        same = [_MAGIC if failure is None else -_MAGIC, sequence, zlib.crc32(call.encode())]
        counts = rows if failure is None else [0] * self.num_ranks
        sent = torch.tensor([[*same, count] for count in counts], device=self._host)
        try:
            got = self._all_to_all(sent, call, None if failure is None else agreement_timeout()).tolist()
        except CommunicationError:
            if failure is None:
                raise
            self._leave(call, failure)
            raise failure from None  # nobody waited for this rank
        if failure is not None or any(header[:3] != same for header in got):
            self._raise_together(call, failure)
        return [header[3] for header in got]

    def _raise_together(self, call: str, failure: Exception | None) -> None:
        try:
            got = self._all_to_all(self._texts(call, failure), call, agreement_timeout())
        except CommunicationError as error:
            raise failure or RankMismatchError(
                "a call failed on another rank, which did not stay to say why",
                fix="Look for the first error in the other ranks' logs.",
            ) from error
        texts = [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in got]
        if failure is not None:
            raise failure
        for rank, received in enumerate(texts):
            if received.startswith("E"):
                raise from_wire(received[1:], rank)
        calls = rank_table({rank: received[1:] for rank, received in enumerate(texts)})
        raise RankMismatchError(
            f"ranks make different calls:\n{calls}",
            fix="Make the same calls in the same order on every rank, with the same options.",
        )

    def _texts(self, call: str, failure: Exception | None) -> Tensor:
        """What this rank tells each other one, its failure or the call it is in: bytes ``[R, _TEXT_BYTES]``."""
        text = ("E" + to_wire(failure) if failure is not None else "C" + call).encode()[:_TEXT_BYTES]
        line = torch.frombuffer(bytearray(text.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
        return line.repeat(self.num_ranks, 1)

    def _leave(self, call: str, failure: Exception) -> None:
        """Take part in the exchange of texts without waiting: who comes late then hears why, and stays in step."""
        sent = self._texts(call, failure).to(self._host)
        got = torch.empty_like(sent)
        with contextlib.suppress(RuntimeError):  # the peers are gone, not late
            work = dist.all_to_all_single(got, sent, group=self.group, async_op=True)
            _unanswered.append((work, got, sent))

    def _all_to_all(self, sent: Tensor, call: str, timeout: float | None = None) -> Tensor:
        sent = sent.to(self._host)
        got = torch.empty_like(sent)
        self._run(got, sent, None, None, call, timeout)
        return got.cpu()

    def payload(self, sent: Tensor, rows_out: list[int], rows_in: list[int], into: Tensor | None = None) -> Tensor:
        """Exchange byte rows ``[sum(rows_out), B]``, ordered by destination; returns ``[sum(rows_in), B]`` by source.

        Without ``into``, which receives the rows, what is returned may be overwritten by the next call.
        """
        if self.num_ranks == 1:
            return sent if into is None else into.copy_(sent)
        got = self.staging("received", sum(rows_in), sent.shape[1], sent.device) if into is None else into
        self._run(lanes(got), lanes(sent), rows_in, rows_out, "the payload")
        return got

    def _closed_key(self, rank: int) -> str:
        return f"{self.name}/closed/{rank}"

    def _look_for_closed(self, call: str) -> None:
        """Raise if a peer closed its buffer before this call, to which it therefore does not come."""
        try:
            store = dist.distributed_c10d._get_default_store()
            keys = {rank: self._closed_key(rank) for rank in self._ranks}
            closed = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        except (RuntimeError, ValueError):  # the store is gone: the collective will fail too
            return
        for rank, (_, finished, why) in sorted(closed.items(), key=lambda one: one[1]):
            if finished < self._calls:
                found = f"rank {rank} closed its buffer after call {finished}{why}, and does not come to {call}"
                _left_alone[self.group] = found
                raise CommunicationError(found, fix="Close on all ranks, after the last call of each.")

    def _wait(self, work: dist.Work, call: str) -> None:
        """Until it is done, looking for peers that closed."""
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_SECS))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._look_for_closed(call)

    def _run(
        self,
        got: Tensor,
        sent: Tensor,
        rows_in: list[int] | None,
        rows_out: list[int] | None,
        call: str,
        timeout: float | None = None,
    ) -> None:
        """All-to-all, of at most ``timeout`` seconds where the peers may not come."""
        may_stay = timeout is not None or (self.name is not None and got.device.type == "cpu")
        try:
            work = dist.all_to_all_single(got, sent, rows_in, rows_out, group=self.group, async_op=may_stay)
            if work is not None and may_stay:
                pending = (work, got, sent)
                _unanswered.append(pending)  # gloo may still write there after the time-out
                if timeout is None:
                    self._wait(work, call)
                else:
                    work.wait(timedelta(seconds=timeout))
                _unanswered.remove(pending)
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank} of {self.num_ranks} lost its peers in {call}",
                got=str(error).splitlines()[0],
                fix="Another rank died, left or timed out: look for the first error in its log. If it ended well, its "
                "loss may not depend on this layer's output: add 0 * y.sum() to it.",
            ) from error
        except BaseException as error:
            _left_alone[self.group] = f"{type(error).__name__} interrupted {call}"
            raise

    def staging(self, name: str, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """Scratch of ``[rows, row_bytes]`` bytes; kept between calls on the CPU, where fresh pages are dear."""
        if device.type != "cpu":
            return torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)
        kept = self._staging.get(name)
        if kept is None or kept.numel() < rows * row_bytes:
            kept = empty_rows(1, rows * row_bytes, torch.empty(0, dtype=torch.uint8, device=device)).view(-1)
            self._staging[name] = kept
        return kept[: rows * row_bytes].view(rows, row_bytes)

    def close(self) -> None:
        """Drop the scratch memory, and leave word of it for peers that will wait for this rank. Waits for nobody."""
        self._staging.clear()
        if self.num_ranks > 1 and self.name is not None:
            error = sys.exc_info()[1]
            why = "" if error is None else f" while it handled {type(error).__name__}: {error}"[:_TEXT_BYTES]
            with contextlib.suppress(RuntimeError, ValueError):  # the store is gone, and with it the peers
                store = dist.distributed_c10d._get_default_store()
                left = self.group in _left_alone  # in mid-call, maybe as another one had closed: that is to be named
                store.set(self._closed_key(self._ranks[self.rank]), json.dumps([left, self._calls - left, why]))
