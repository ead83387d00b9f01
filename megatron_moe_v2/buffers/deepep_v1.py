"""``LegacyElasticBuffer``: DeepEP V1's ``Buffer`` under V2's contract, as far as V1 can honour it.

The token layout is V1's own, argument for argument, so it equals megatron-core's V1 path bit for bit. The expert layout
is made from it by our own permutation. Not to be had: ``do_cpu_sync=False``, FP8 rows, determinism, SM counts per call
(V1's is a process-global default), ``previous_event_before_epilogue``; time-outs are fixed in V1. Legend as in
``contract``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BufferClosedError, InputError, LimitError
from ..probe import probe
from . import layout
from .checks import check_combine_rows, check_num_experts, check_rows
from .contract import BuiltBuffer, EPHandle
from .deepep import bring_up, check_cached, check_dtype, check_event

__all__ = ["LegacyElasticBuffer", "LegacyHandle", "build", "precheck"]

HIDDEN_MULTIPLE = 8
"""V1 moves rows in 16-byte pieces."""


class LegacyHandle(EPHandle):
    """An ``EPHandle`` that also holds V1's own handle, as attributes ``v1_0``, ``v1_1``, …, and ``recv_topk_idx``."""

    num_parts: int
    recv_topk_idx: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        """V1's handle."""
        return tuple(vars(self)[f"v1_{index}"] for index in range(self.num_parts))


def precheck(**sizes: Any) -> None:
    """What V1 cannot honour of a spec.

    Raises:
        LimitError: FP8 or determinism.
    """
    if sizes["use_fp8_dispatch"] or sizes["deterministic"]:
        raise LimitError("FP8 dispatch or determinism on DeepEP V1", fix="Use DeepEP V2, or the embedded buffer.")


def build(group: dist.ProcessGroup, *, num_sms: int = 0, **sizes: Any) -> BuiltBuffer:
    """Build V1's buffer from ``BufferSpec`` fields. Collective over the group.

    Args:
        num_sms: the most SMs of a call, which V1's buffers are sized by; 0 is V1's own count.

    Raises:
        LimitError: V1 has no configuration for this number of ranks, or ``num_sms`` is odd.
    """
    found = probe()
    assert found.Buffer is not None
    if num_sms % 2:
        raise LimitError("num_sms on DeepEP V1", got=num_sms, expected="an even number")
    bring_up(group)
    num_sms = num_sms or int(found.Buffer.num_sms)
    with _at(found.Buffer, num_sms):
        raw = _sized(found.Buffer, group, 2 * sizes["hidden"])
    return BuiltBuffer(LegacyElasticBuffer(raw, group, sizes["num_max_tokens_per_rank"], num_sms), None, found.Buffer)


@contextlib.contextmanager
def _at(kind: Any, num_sms: int) -> Iterator[None]:
    """V1's ``Buffer`` reads one SM count of the whole process in each call; others may have set it to theirs."""
    usual = kind.num_sms
    kind.set_num_sms(num_sms)
    try:
        yield
    finally:
        kind.set_num_sms(usual)


def _sized(kind: Any, group: dist.ProcessGroup, row_bytes: int) -> Any:
    """A buffer for rows of so many bytes at V1's present SM count."""
    num_ranks = group.size()
    try:
        configs = [kind.get_dispatch_config(num_ranks), kind.get_combine_config(num_ranks)]
    except AssertionError as error:
        raise LimitError(f"ranks on DeepEP V1: {error}", got=num_ranks, fix="Use DeepEP V2.") from error
    return kind(
        group,
        max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs) if num_ranks > 8 else 0,
        explicitly_destroy=True,
    )


class LegacyElasticBuffer:
    """V1's ``Buffer`` spoken to as V2's.

    Args:
        raw: the buffer.
        group: its ranks.
        num_max_tokens_per_rank: M, the default ceiling of a call.
        num_sms: most SMs of a call, which the buffer is sized for, and the count of a call that names none.
    """

    def __init__(self, raw: Any, group: dist.ProcessGroup, num_max_tokens_per_rank: int, num_sms: int) -> None:
        self.raw: Any = raw
        self._num_sms = num_sms
        self.rank_idx, self.num_ranks = group.rank(), group.size()
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self._overlap: Any = probe().EventOverlap
        self._handle: Any = probe().EventHandle

    def capture(self) -> Any:
        """A raw event handle recorded on the current stream."""
        return self._handle()

    def destroy(self) -> None:
        """Free everything. Collective over the group."""
        if self.raw is not None:
            raw, self.raw = self.raw, None
            raw.destroy()

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: LegacyHandle | None = None,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, LegacyHandle, Any]:
        """As ``ElasticBuffer.dispatch``; FP8 pairs are refused. Collective over the group."""
        self._check_tokens(x)
        num_sms = self._num_sms_of(num_sms)
        check_event(previous_event, self._handle, allocate_on_comm_stream)
        if do_cpu_sync is False and handle is None:
            raise LimitError("do_cpu_sync=False on DeepEP V1", fix="Use DeepEP V2, or the embedded buffer.")
        alignment = (expert_alignment or 1) if handle is None else handle.expert_alignment
        # Our own work on what was received runs on the current stream: only a bare token dispatch stays asynchronous.
        bare = not do_expand and alignment == 1 and (handle is None or topk_weights is None)
        asynchronous = async_with_compute_stream and bare
        # V1 allocates on its own stream only in an asynchronous call.
        streams = {
            "previous_event": self._overlap(previous_event) if previous_event is not None and asynchronous else None,
            "async_finish": asynchronous,
            "allocate_on_comm_stream": allocate_on_comm_stream and asynchronous,
        }
        if handle is not None:
            return self._cached(x, topk_weights, handle, streams, do_expand, do_zero_padding)
        if topk_idx is None:
            raise InputError("topk_idx", got=None, expected="[T, K] where no handle is given")
        ceiling = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        check_rows(x.shape[0], ceiling)
        num_local_experts = check_num_experts(num_experts, self.num_ranks) // self.num_ranks
        per_rank, per_rdma_rank, per_expert, in_rank, event = self._call(
            num_sms, self.raw.get_dispatch_layout, topk_idx, num_experts, **streams
        )
        streams["previous_event"] = event if event.event is not None else streams["previous_event"]
        recv_x, recv_idx, recv_weights, counts, parts, event = self._call(
            num_sms,
            self.raw.dispatch,
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_idx.new_zeros(topk_idx.shape, dtype=torch.float32)
            if topk_weights is None
            else topk_weights,
            expert_alignment=alignment,
            **streams,
        )
        made = self._make_handle(
            topk_idx,
            recv_idx,
            parts,
            counts,
            slots=None if bare else layout.expert_slots(recv_idx.long(), num_local_experts, alignment),
            num_experts=num_local_experts * self.num_ranks,
            alignment=alignment,
            ceiling=ceiling,
            num_sms=num_sms,
            do_expand=do_expand,
            arrived=not asynchronous,
        )
        if cumulative_local_expert_recv_stats is not None:  # V1 has no such counter
            cumulative_local_expert_recv_stats += made.num_unaligned_recv_tokens_per_expert
        if topk_weights is None:
            recv_weights = None
        if not do_expand:
            return recv_x, recv_idx, recv_weights, made, event
        return self._expand(recv_x, recv_weights, made, do_zero_padding, event)

    def _cached(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        handle: LegacyHandle,
        streams: dict[str, Any],
        do_expand: bool,
        do_zero_padding: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, LegacyHandle, Any]:
        """V1's cached dispatch carries no indices and no weights: the handle has the ones, a second call the others."""
        check_cached(x, handle, do_expand)
        again = functools.partial(self._call, handle.num_sms, self.raw.dispatch, handle=handle.parts())
        recv_x, _, _, _, _, event = again(x, **streams)
        recv_weights = None
        if topk_weights is not None:
            padded = torch.nn.functional.pad(topk_weights, (0, -topk_weights.shape[1] % 4))
            received, _, _, _, _, event = again(padded.view(torch.bfloat16), async_finish=False)
            recv_weights = received.view(torch.float32)[:, : topk_weights.shape[1]].contiguous()
        if do_expand:
            return self._expand(recv_x, recv_weights, handle, do_zero_padding, event)
        return recv_x, handle.recv_topk_idx.clone(), recv_weights, handle, event

    def _make_handle(
        self,
        topk_idx: Tensor,
        recv_idx: Tensor,
        parts: tuple[Tensor, ...],
        counts: list[int],
        *,
        slots: layout.ExpertSlots | None,
        num_experts: int,
        alignment: int,
        ceiling: int,
        num_sms: int,
        do_expand: bool,
        arrived: bool,
    ) -> LegacyHandle:
        """Unless ``arrived``, nothing received is read here, and the handle does not tell where rows came from."""
        num_rows, num_topk, device = len(recv_idx), topk_idx.shape[1], recv_idx.device
        metadata = torch.full((num_rows, num_topk + 2), -1, dtype=torch.int32, device=device)
        received = torch.tensor([num_rows], dtype=torch.int32, device=device)
        if slots is None:
            exact = torch.tensor(counts, device=device)
            ends = exact.cumsum(0)
        else:
            exact, ends = slots.counts, slots.aligned.cumsum(0)
            if do_expand:
                metadata[:, 2:] = slots.slots
                ends = ends - slots.aligned + exact
        if arrived and len(parts) == 6:  # V1 tells only within a node
            received = parts[0][:, self.rank_idx].contiguous()
            source = torch.bucketize(torch.arange(num_rows, device=device), received, right=True)
            metadata[:, 0] = source * ceiling + parts[3]
        handle = LegacyHandle(
            do_expand=do_expand,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=ceiling,
            num_sms=num_sms,
            topk_idx=topk_idx.clone(),
            num_recv_tokens=len(recv_idx),
            num_expanded_tokens=sum(counts),
            num_recv_tokens_per_expert_list=list(counts),
            psum_num_recv_tokens_per_scaleup_rank=received,
            psum_num_recv_tokens_per_expert=ends.int(),
            num_unaligned_recv_tokens_per_expert=exact.int(),
            recv_src_metadata=metadata,
            dst_buffer_slot_idx=None,
        )
        handle.num_parts, handle.recv_topk_idx = len(parts), recv_idx
        vars(handle).update({f"v1_{index}": part for index, part in enumerate(parts)})
        return handle

    def _expand(
        self, recv_x: Tensor, recv_weights: Tensor | None, handle: LegacyHandle, do_zero_padding: bool, event: Any
    ) -> tuple[Tensor, None, Tensor | None, LegacyHandle, Any]:
        num_topk = handle.topk_idx.shape[1]
        position = layout.rows_of_slots(handle.recv_src_metadata[:, 2:], handle.num_expanded_tokens)
        row = torch.div(position.clamp_min(0), num_topk, rounding_mode="floor")
        expanded = layout.gather_rows(recv_x, row) if len(recv_x) else recv_x.new_zeros(len(row), recv_x.shape[1])
        if do_zero_padding:
            expanded.masked_fill_((position < 0)[:, None], 0)
        weights = None if recv_weights is None else layout.pick(recv_weights.reshape(-1), position)
        return expanded, None, weights, handle, event

    def combine(
        self,
        x: Tensor,
        handle: LegacyHandle,
        topk_weights: Tensor | None = None,
        num_sms: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """As ``ElasticBuffer.combine``, without bias. Collective over the group."""
        self._check_tokens(x)
        self._num_sms_of(num_sms)  # checked; what is used is the dispatch's, whose channels the handle holds
        check_event(previous_event, self._handle, allocate_on_comm_stream)
        check_combine_rows(x.shape[0], handle, handle.num_expanded_tokens)
        ours = handle.do_expand or topk_weights is not None
        if handle.do_expand:
            slots = handle.recv_src_metadata[:, 2:].long()
            x = layout.sum_rows(x, slots)
            topk_weights = None if topk_weights is None else layout.pick(topk_weights, slots)
        elif topk_weights is not None:
            # V1 sums what every rank returns, so a rank must return only its own experts' weights.
            topk_weights = topk_weights.masked_fill(handle.recv_topk_idx < 0, 0)
        if ours and previous_event is not None:
            previous_event = self.capture()
        combined, weights, event = self._call(
            handle.num_sms,
            self.raw.combine,
            x,
            handle.parts(),
            topk_weights=topk_weights,
            previous_event=self._overlap(previous_event)
            if previous_event is not None and async_with_compute_stream
            else None,
            async_finish=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream and async_with_compute_stream,
        )
        return combined, weights, event

    def _call(self, num_sms: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        with _at(type(self.raw), num_sms):
            return function(*args, **kwargs)

    def _num_sms_of(self, wish: int) -> int:
        """SM count of a call. More than the buffer is sized for would be an assertion."""
        if wish % 2 or wish > self._num_sms:
            raise LimitError(
                "num_sms on DeepEP V1", got=wish, expected=f"an even number up to the buffer's {self._num_sms}"
            )
        return wish or self._num_sms

    def _check_tokens(self, x: Any) -> None:
        if self.raw is None:
            raise BufferClosedError("a call on a destroyed buffer", fix="Build a new buffer.")
        if isinstance(x, tuple):
            raise LimitError("FP8 rows on DeepEP V1", fix="Use DeepEP V2, or the embedded buffer.")
        check_dtype(x, torch.bfloat16, "V1")
        if x.shape[1] % HIDDEN_MULTIPLE:
            raise LimitError("hidden on DeepEP V1", got=x.shape[1], expected=f"a multiple of {HIDDEN_MULTIPLE}")
