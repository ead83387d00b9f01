"""The contract that every buffer honours: DeepEP V2's ``ElasticBuffer``, its expert-parallel part.

Legend: T own tokens, H hidden, K top-k, R ranks, E experts, L = E / R local experts, M the ceiling
``num_max_tokens_per_rank``, n received tokens (each counted once), A rows of the expert layout, a expert alignment.
Rank r of the group owns experts ``[r * L, (r + 1) * L)``. The *master lane* of a token for a rank is the highest k
whose expert lives there.

Two layouts of what is received. Token layout: ``[n, H]``, a row per token. Expert layout (``do_expand``): ``[A, H]``,
a row per (token, local expert), grouped by expert, each group padded to a multiple of a.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

__all__ = [
    "BuiltBuffer",
    "EPHandle",
    "ElasticBufferLike",
    "EventHandle",
    "EventOverlap",
    "HandleSkeleton",
    "align",
    "buffer_bytes",
    "flatten_handle",
    "rebuild_handle",
]

BUFFER_GRANULE = 2 * 1024 * 1024
"""Buffers are sized in multiples of this many bytes."""

LARGEST_NUM_TOPK = 32
"""DeepEP's largest top-k, which a buffer is sized for when the top-k is unknown."""


def align(value: int, alignment: int) -> int:
    """``value`` rounded up to a multiple of ``alignment``."""
    return -(-value // alignment) * alignment


def buffer_bytes(
    *,
    num_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int = 0,
    use_fp8_dispatch: bool = False,
    allow_multiple_reduction: bool = True,
) -> int:
    """Bytes of a buffer whose ranks all share one NVLink domain, as DeepEP V2 counts them; top-k 0 counts as 32."""
    num_topk = num_topk or LARGEST_NUM_TOPK
    scales = align(4 * align(hidden, 32) // 32, 32) if use_fp8_dispatch else 0
    dispatch_row = hidden * (1 if use_fp8_dispatch else 2) + scales + align(12 * num_topk + 4, 32)
    partials = min(num_ranks, num_topk) if allow_multiple_reduction else num_topk
    combine_row = 2 * hidden + align(8 * num_topk, 32)
    rows = max(num_ranks * dispatch_row, partials * combine_row)
    return align(rows * num_max_tokens_per_rank, BUFFER_GRANULE)


@dataclass(eq=False)
class EPHandle:
    """What a dispatch leaves behind for its combine and for cached dispatches; fields and order are DeepEP V2's.

    Attributes:
        do_expand: expert layout.
        num_experts: E.
        expert_alignment: a.
        num_max_tokens_per_rank: M.
        num_sms: SM count of the dispatch, the default of its combine.
        topk_idx: ``[T, K]`` int64, the sender's selections.
        num_recv_tokens: n, or ``R * M`` without CPU sync.
        num_expanded_tokens: A, or its worst case without CPU sync.
        num_recv_tokens_per_expert_list: L aligned counts; empty without CPU sync.
        psum_num_recv_tokens_per_scaleup_rank: int32 ``[R]``, inclusive prefix sum of tokens received per source.
        psum_num_recv_tokens_per_expert: int32 ``[L]``. Token layout: inclusive prefix sum of aligned counts. Expert
            layout: aligned start of the expert plus its own exact count, so plain differences are not counts.
        num_unaligned_recv_tokens_per_expert: int32 ``[L]``, exact counts.
        recv_src_metadata: int32 ``[num_recv_tokens, K + 2]``: ``source rank * M + source token``,
            ``source rank * K + master lane``, then the slot of each selection in the expert layout or -1.
        dst_buffer_slot_idx: int32 ``[T, K]``: at master lanes ``own rank * M + running number``, else -1.
        token_metadata_at_forward: hybrid topologies of DeepEP only.
        channel_linked_list: hybrid topologies of DeepEP only.
        origin: numbers of the embedded buffer and of the dispatch that made the handle.
        recv_topk_idx: what the embedded buffer's token layout received, for its cached dispatches.
        sent: int64 ``[3, S]``, token, destination rank and lane of each row that the embedded buffer sent.
        sent_counts: its rows for each rank.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor | None
    token_metadata_at_forward: Tensor | None = None
    channel_linked_list: Tensor | None = None
    origin: tuple[int, int] = field(default=(-1, -1), kw_only=True)
    recv_topk_idx: Tensor | None = field(default=None, kw_only=True)
    sent: Tensor | None = field(default=None, kw_only=True)
    sent_counts: list[int] = field(default_factory=list, kw_only=True)


class HandleFields(NamedTuple):
    """Which fields a class of handles has.

    Attributes:
        kind: the class.
        names: first of those that hold a tensor or None, then of the others.
        num_tensors: how many hold a tensor or None.
        values_of: their values, from ``vars`` of a handle.
    """

    kind: type
    names: tuple[str, ...]
    num_tensors: int
    values_of: Callable[[dict[str, Any]], tuple[Any, ...]]


HandleSkeleton = tuple[HandleFields, tuple[Any, ...]]
"""A handle without its tensors: which fields it has, and the plain ones' values."""


def flatten_handle(handle: Any) -> tuple[tuple[Tensor | None, ...], HandleSkeleton]:
    """Take a handle of any backend apart into its tensors, None for those that are not there, and a skeleton."""
    by_name = vars(handle)
    fields = _fields.get((type(handle), len(by_name))) or _look_at(handle)
    values = fields.values_of(by_name)
    return values[: fields.num_tensors], (fields, values[fields.num_tensors :])


_fields: dict[tuple[type, int], HandleFields] = {}
"""By class and number of fields. Which of them hold tensors, a class does not change."""


def _look_at(handle: Any) -> HandleFields:
    by_name = vars(handle)
    tensors = [name for name, value in by_name.items() if value is None or isinstance(value, Tensor)]
    names = (*tensors, *(name for name in by_name if name not in tensors))
    fields = HandleFields(type(handle), names, len(tensors), itemgetter(*names))
    _fields[type(handle), len(by_name)] = fields
    return fields


def rebuild_handle(skeleton: HandleSkeleton, tensors: tuple[Tensor | None, ...]) -> Any:
    """Inverse of :func:`flatten_handle`, without running the handle class's constructor."""
    fields, plain = skeleton
    handle: Any = object.__new__(fields.kind)
    vars(handle).update(zip(fields.names, (*tensors, *plain), strict=True))
    return handle


class EventHandle:
    """A point on the current CUDA stream; on a machine without CUDA a point that is always reached."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the point; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """What dispatch and combine return as their event; ``event`` is None when the work was not asynchronous."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event
        self._hook: Callable[[], None] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait, run the hook once, and drop the event if ``release_handle``."""
        assert self.event is not None, "nothing to wait for: the call was not asynchronous"
        self.event.current_stream_wait()
        if self._hook is not None:
            hook, self._hook = self._hook, None
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook: Callable[[], None]) -> None:
        """Run ``hook`` at the first wait; only one can be registered."""
        assert self._hook is None, "a hook is already registered"
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release)
        self._release = False


class ElasticBufferLike(Protocol):
    """The methods that dispatch and combine need; arguments and results as in DeepEP V2."""

    @property
    def dispatch(self) -> Callable[..., tuple[Any, Tensor | None, Tensor | None, Any, Any]]:
        """Collective over the group: ``(recv_x, recv_topk_idx, recv_topk_weights, handle, event)``."""
        ...

    @property
    def combine(self) -> Callable[..., tuple[Tensor, Tensor | None, Any]]:
        """Collective over the group: ``(combined_x, combined_topk_weights, event)``."""
        ...

    def capture(self) -> Any:
        """An event handle recorded on the current stream."""
        ...

    def destroy(self) -> None:
        """Collective over the group: free everything."""
        ...


class BuiltBuffer(NamedTuple):
    """A constructed buffer.

    Attributes:
        buffer: what dispatches and combines.
        report_failure: tells the ranks that are in a call that this rank's call failed before it reached the buffer,
            then raises; None where the buffer has no channel for it.
        kind: the class that does the work.
        announce: compares a text between all ranks before something else than a call of the buffer; None as above.
        beneath: what ``buffer`` passes calls on to, after checks that need not be made twice; None: it is that itself.
        passes_on: whether it changes nothing of a dispatch of such a hidden size.
    """

    buffer: ElasticBufferLike
    report_failure: Callable[[str, Exception], NoReturn] | None
    kind: type
    announce: Callable[[str], None] | None = None
    beneath: Any = None
    passes_on: Callable[[int], bool] | None = None
