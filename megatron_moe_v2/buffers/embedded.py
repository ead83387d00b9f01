"""``EmbeddedElasticBuffer``: DeepEP V2's contract over plain ``torch.distributed``.

Runs on a CPU with gloo and on GPUs with NCCL, at any number of ranks. A token travels once to each rank that needs it,
never once per expert. Each direction is one exchange of headers and one all-to-all of one packed byte payload; at one
rank there is none. Every call synchronises the host, so none can be captured in a CUDA graph. The receive order is
always the deterministic one: source rank, then source token.

Legend as in ``contract``. Numbers combine exactly as DeepEP V2 combines them: partial sums of a rank in ascending k,
then the partials in ascending lane, each step in float32 from +0 (float64 for float64 tokens) and rounded once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..agreement import agreed_name
from ..errors import BufferClosedError, InputError
from . import checks, layout, rows
from .adversary import Adversary
from .contract import BuiltBuffer, EPHandle, EventHandle, EventOverlap, buffer_bytes
from .exchange import Exchange

__all__ = ["EmbeddedElasticBuffer", "build", "precheck"]

_NUM_SMS = 4
"""What the SM queries answer: the least that the contract allows, since no kernel here is told an SM count."""

_numbers = itertools.count()

_F = TypeVar("_F", bound=Callable[..., Any])


def _without_autocast(method: _F) -> _F:
    """The sums here choose their own dtypes."""

    @functools.wraps(method)
    def call(self: EmbeddedElasticBuffer, x: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = x[0] if isinstance(x, tuple) and x else x
        on_cuda = isinstance(tokens, Tensor) and tokens.is_cuda  # what else it may be, the checks will say
        kind = "cuda" if on_cuda else "cpu"
        if not torch.is_autocast_enabled(kind):
            return method(self, x, *args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return method(self, x, *args, **kwargs)

    return cast(_F, call)


class EmbeddedElasticBuffer:
    """A buffer of ``torch.distributed`` calls. Every rank of the group must construct its own; nothing is exchanged.

    Args:
        group: the ranks that exchange tokens.
        num_bytes: size to report instead of the computed one; a positive multiple of 2 MiB.
        num_max_tokens_per_rank: M, the default ceiling of a call.
        hidden, num_topk: what the size is computed for; top-k 0 counts as 32.
        use_fp8_dispatch: compute the size for FP8 rows with scales.
        allow_multiple_reduction: in the expert layout, add a rank's rows of a token before they travel.
        explicitly_destroy: allow :meth:`destroy`.
        adversary: test only. A seed; each call then draws a new legal receive and slot order, and everything that the
            contract leaves undefined is filled with NaN (integers with -2**30).

    The other arguments are DeepEP V2's; they are kept as attributes and change nothing here.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        adversary: int | None = None,
    ) -> None:
        checks.check_constructor(num_bytes, num_max_tokens_per_rank, hidden)
        self.group = group
        self.rank_idx = group.rank()
        self.num_ranks = group.size()
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or (129 if allow_hybrid_mode else 17)
        self.explicitly_destroy = explicitly_destroy
        self.num_bytes = num_bytes or self.get_buffer_size_hint(
            group,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_hybrid_mode,
            allow_multiple_reduction,
        )
        self.num_scaleout_ranks = self.num_rdma_ranks = 1
        self.num_scaleup_ranks = self.num_nvlink_ranks = self.num_ranks
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.nccl_comm_handle = None
        self.runtime: Exchange | None = Exchange(group)
        self._number = next(_numbers)
        self._dispatches = itertools.count()
        self._adversary = (
            None if adversary is None else Adversary(adversary, self.rank_idx, deterministic=deterministic)
        )

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that DeepEP V2 would reserve on one NVLink domain, a multiple of 2 MiB."""
        return buffer_bytes(
            num_ranks=group.size(),
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            allow_multiple_reduction=allow_multiple_reduction,
        )

    @staticmethod
    def capture() -> EventHandle:
        """An event handle recorded on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """The stream that communication runs on: the current one, or None without CUDA."""
        return torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def get_physical_domain_size(self) -> tuple[int, int]:
        """``(RDMA ranks, NVLink ranks)``."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """``(scale-out ranks, scale-up ranks)``."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0) -> int:
        """The contract's least, 4: nothing here takes an SM count."""
        checks.check_num_experts(num_experts, self.num_ranks)
        return _NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """What DeepEP V2 would use, never more than ``num_allocated_qps``."""
        return min(16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Collective over the group: wait for all ranks."""
        self._open("barrier").headers("barrier", [0] * self.num_ranks)

    def destroy(self) -> None:
        """Free everything; a second call does nothing. Every later dispatch or combine raises. Waits for nobody."""
        if not self.explicitly_destroy:
            raise InputError("destroy()", expected="a buffer built with explicitly_destroy=True")
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()

    def report_failure(self, operation: str, failure: Exception) -> NoReturn:
        """Collective over the group: tell the peers, who are in a call, that this rank's call failed; then raise it."""
        self._open(operation).headers(operation, [], failure)
        raise AssertionError("unreachable")

    def announce(self, text: str) -> None:
        """Collective over the group: raise on all ranks unless all announce the same and none is in another call."""
        self._open(text).headers(text, [0] * self.num_ranks)

    def _open(self, operation: str) -> Exchange:
        if self.runtime is None:
            raise BufferClosedError(f"{operation} on a destroyed buffer", fix="Build a new buffer.")
        return self.runtime

    @_without_autocast
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send each token to the ranks of its experts. Collective over the group.

        Args:
            x: ``[T, H]`` of any dtype, or a tuple with scales ``[T, S]`` of a 4-byte dtype and any strides.
            topk_idx: int64 ``[T, K]``, global expert indices, negative for none; None with ``handle``.
            topk_weights: ``[T, K]`` float32 (float64 with float64 tokens).
            cumulative_local_expert_recv_stats: int32 ``[L]``, exact counts are added in place; not with ``handle``.
            handle: repeat the routing of an earlier dispatch: rows land where they landed then.
            do_cpu_sync: False gives worst-case row counts that depend on no data; default True without ``handle``.
            do_zero_padding: zero the alignment gaps of the expert layout, and their weights.
            use_tma_aligned_col_major_sf: received scales column-major, columns padded to a multiple of 4 rows.

        Returns:
            ``(recv_x, recv_topk_idx, recv_topk_weights, handle, event)``. Token layout: ``[n, H]``, local expert or -1
            ``[n, K]``, the whole unmasked source row of weights ``[n, K]``. Expert layout: ``[A, H]``, None, ``[A]``.

        Raises:
            InputError, LimitError, CapacityError, HandleError: on every rank, if the call is wrong on any.
            RankMismatchError: ranks make different calls.
            BufferClosedError: after :meth:`destroy`.
        """
        exchange = self._open("dispatch")
        failure: Exception | None = None
        call, counts = "dispatch", [0] * self.num_ranks
        try:
            request = checks.check_dispatch(
                self,
                self._number,
                x,
                topk_idx,
                topk_weights,
                stats=cumulative_local_expert_recv_stats,
                num_experts=num_experts,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                expert_alignment=expert_alignment,
                num_sms=num_sms,
                num_qps=num_qps,
                previous_event=previous_event,
                allocate_on_comm_stream=allocate_on_comm_stream,
                handle=handle,
                do_cpu_sync=do_cpu_sync,
                do_expand=do_expand,
                do_zero_padding=do_zero_padding,
            )
            wire = rows.dispatch_format(request)
            call = request.describe(wire.row_bytes)
            to = (
                layout.destinations(request.topk_idx, request.num_experts, self.num_ranks)
                if handle is None
                else _sent(handle)
            )
            counts = to.counts
            if previous_event is not None:
                previous_event.current_stream_wait()
            sent = rows.pack_tokens(exchange, request, wire, to)
        except Exception as error:  # whatever it is, the peers are waiting to hear of it
            failure = error
        counts_in = exchange.headers(call, counts, failure)
        in_place = None if self._adversary else rows.arrives_in_place(request, wire, sum(counts_in))
        into = None if in_place is None else in_place.view(torch.uint8)
        arrived = wire.views(exchange.payload(sent, counts, counts_in, into))
        if "topk_idx" in arrived:
            arrived["local_idx"] = self._local_idx(arrived["topk_idx"], request.num_experts)
        if handle is None:
            order = self._adversary.receive_order(counts_in, request.x.device) if self._adversary else None
            handle = rows.make_handle(
                request,
                to,
                counts_in,
                arrived,
                order,
                self._adversary,
                rank=self.rank_idx,
                num_sms=request.num_sms or _NUM_SMS,
                origin=(self._number, next(self._dispatches)),
            )
            if do_handle_copy:
                handle.topk_idx = handle.topk_idx.clone()
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats += handle.num_unaligned_recv_tokens_per_expert
        else:
            arrival = self._arrival_order(handle, sum(counts_in))
            order = None if arrival is None else layout.invert(arrival)
        if in_place is not None:
            placed = {"x": in_place}
        else:
            placed = rows.place(request, handle, arrived, order, self._adversary, do_zero_padding)
        if not do_expand:
            kept = placed.get("local_idx", handle.recv_topk_idx)
            assert kept is not None
            # What is returned is the caller's own; what the handle keeps stays as it is.
            recv_idx = kept.clone()
            if not handle.do_expand:
                handle.recv_topk_idx = kept
        else:
            recv_idx = None
        recv_x: Any = placed["x"]
        if request.scales is not None:
            recv_x = (recv_x, rows.column_major(placed["scales"]) if use_tma_aligned_col_major_sf else placed["scales"])
        return recv_x, recv_idx, placed.get("weights"), handle, _event(async_with_compute_stream)

    @_without_autocast
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Bring rows back to their tokens and sum them. Collective over the group.

        Args:
            x: ``[n, H]`` (token layout) or ``[A, H]`` (expert layout, more rows are allowed), floating point; rows that
                dispatch did not fill are ignored.
            handle: of a dispatch of this buffer; it may be combined any number of times.
            topk_weights: ``[n, K]`` or ``[A]``, carried back unsummed: value k comes from the owner of selection k.
            bias: one ``[T, H]`` tensor or a pair of them, added before the rows.

        Returns:
            ``(combined_x [T, H], combined_topk_weights [T, K] or None, event)``. Weights are not applied to ``x``.

        Raises:
            InputError, LimitError, HandleError: on every rank, if the call is wrong on any.
            RankMismatchError: ranks make different calls.
            BufferClosedError: after :meth:`destroy`.
        """
        exchange = self._open("combine")
        failure: Exception | None = None
        call, counts = "combine", [0] * self.num_ranks
        try:
            request = checks.check_combine(
                self,
                self._number,
                x,
                handle,
                topk_weights,
                bias,
                num_sms=num_sms,
                num_qps=num_qps,
                previous_event=previous_event,
                allocate_on_comm_stream=allocate_on_comm_stream,
            )
            call = request.describe(handle)
            order = self._arrival_order(handle, request.num_recv_tokens)
            if previous_event is not None:
                previous_event.current_stream_wait()
            sent, wire, counts = rows.pack_partials(exchange, request, handle, order)
        except Exception as error:  # whatever it is, the peers are waiting to hear of it
            failure = error
        counts_in = exchange.headers(call, counts, failure)
        back = wire.views(exchange.payload(sent, counts, counts_in))
        num_tokens, num_topk = handle.topk_idx.shape
        to = (
            _sent(handle)
            if request.reduce_first
            else layout.selections(handle.topk_idx, handle.num_experts, self.num_ranks)
        )
        combined = layout.sum_rows(back["x"], to.table(num_tokens, num_topk), bias=request.bias)
        weights = None
        if request.weights is not None:
            owner = layout.owners(handle.topk_idx, handle.num_experts, self.num_ranks)
            row = to.row_from_rank(num_tokens, self.num_ranks).gather(1, owner)
            weights = layout.pick_lanes(back["weights"], row)
        return combined, weights, _event(async_with_compute_stream)

    def _local_idx(self, topk_idx: Tensor, num_experts: int) -> Tensor:
        """int64 local expert of each global index, -1 for other ranks' experts."""
        num_local_experts = num_experts // self.num_ranks
        local = topk_idx.long() - self.rank_idx * num_local_experts
        return local.masked_fill_((local < 0) | (local >= num_local_experts) | (topk_idx < 0), -1)

    def _arrival_order(self, handle: EPHandle, num_rows: int) -> Tensor | None:
        """int64 ``[n]``: rows of the handle by source rank and token; None where they stand in that order already."""
        return handle.recv_src_metadata[:num_rows, 0].argsort() if self._adversary else None


def precheck(**sizes: Any) -> None:
    """Nothing can be wrong with one host alone."""


def build(group: dist.ProcessGroup, **sizes: Any) -> BuiltBuffer:
    """A buffer of the given ``BufferSpec`` fields. Collective over the group."""
    buffer = EmbeddedElasticBuffer(group, explicitly_destroy=True, **sizes)
    assert buffer.runtime is not None
    buffer.runtime.name = agreed_name(group)
    return BuiltBuffer(buffer, buffer.report_failure, EmbeddedElasticBuffer, buffer.announce)


def _sent(handle: EPHandle) -> layout.Destinations:
    assert handle.sent is not None
    token, rank, lane = handle.sent.unbind()
    return layout.Destinations(token, rank, lane, handle.sent_counts)


def _event(asynchronous: bool) -> EventOverlap:
    return EventOverlap(EventHandle() if asynchronous else None)
