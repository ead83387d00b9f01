"""The dispatcher that a script has without a fused one: every routed copy of a token travels by all-to-all.

Forward: permute (sort the copies by expert), exchange counts, all-to-all of rows and of their weights, sort what came
by expert; the experts run; and back: unsort, all-to-all, un-permute, which sums the copies of a token. Backward mirrors
it and reuses the counts. It is the benchmark's baseline and tuned like what it is compared with: rows move as 64-bit
lanes, all memory that does not leave a call is kept between calls, sums are in float32 with one rounding, and one rank
exchanges nothing.

Legend: T own tokens, H hidden, K top-k, R ranks, E experts, L = E / R local experts, C = T * K copies sent, P received.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..buffers.layout import gather_rows, invert, lanes

__all__ = ["PlainDispatched", "PlainDispatcher", "Routing"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """Where each copy goes.

    Attributes:
        selection: int64 ``[C]``, flat position in ``topk_idx`` of each copy; copies are ordered by expert.
        token: int64 ``[C]``, its row of ``x``.
        copies: int64 ``[T, K]``, the copy of each selection.
        rows_out, rows_in: R row counts of the all-to-all.
        by_expert: int64 ``[P]``, the received row at each place of the order by local expert; None if that is the order
            of arrival.
        by_source: its inverse.
        tokens_per_expert: int64 ``[L]`` on the CPU.
    """

    selection: Tensor
    token: Tensor
    copies: Tensor
    rows_out: list[int]
    rows_in: list[int]
    by_expert: Tensor | None
    by_source: Tensor | None
    tokens_per_expert: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainDispatched:
    """Copies at their experts: ``tokens`` ``[P, H]`` grouped by local expert, their ``weights`` ``[P]``, and how."""

    tokens: Tensor
    weights: Tensor
    routing: Routing


class PlainDispatcher:
    """Dispatches and combines; every entry of ``topk_idx`` must select an expert.

    Args:
        num_experts: E, a multiple of the ranks.
        group: the ranks that exchange tokens.
        keep_buffers: on the CPU keep the scratch memory between calls and put large tensors on huge pages, as this
            package's own buffer does; dispatchers in use allocate anew.
    """

    def __init__(self, *, num_experts: int, group: dist.ProcessGroup, keep_buffers: bool = False) -> None:
        self.group = group
        self.keep_buffers = keep_buffers
        self.num_experts = num_experts
        self.num_ranks = group.size()
        self._kept: dict[str, Tensor] = {}

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> PlainDispatched:
        """Send every copy to its expert. Collective over the group.

        Args:
            x: ``[T, H]``, contiguous.
            topk_idx: int64 ``[T, K]``, global experts.
            topk_weights: floating ``[T, K]``; travels as float32 (float64 with float64 tokens).
        """
        routing = self._route(topk_idx)
        tokens, weights = _Dispatch.apply(x, topk_weights, routing, self)  # type: ignore[no-untyped-call]
        return PlainDispatched(tokens=tokens, weights=weights, routing=routing)

    def combine(self, rows: Tensor, dispatched: PlainDispatched) -> Tensor:
        """Bring the experts' rows ``[P, H]`` back and sum each token's: ``[T, H]``. Collective over the group."""
        return _Combine.apply(rows, dispatched.routing, self)  # type: ignore[no-untyped-call, no-any-return]

    def _route(self, topk_idx: Tensor) -> Routing:
        expert, selection = torch.sort(topk_idx.reshape(-1), stable=True)
        counts = torch.bincount(expert, minlength=self.num_experts).view(self.num_ranks, -1)
        received = counts
        if self.num_ranks > 1:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts, group=self.group)
        rows_out, rows_in = torch.stack([counts.sum(1), received.sum(1)]).tolist()
        by_expert = self._by_expert(received, sum(rows_in)) if self.num_ranks > 1 else None
        return Routing(
            selection=selection,
            token=torch.div(selection, topk_idx.shape[1], rounding_mode="floor"),
            copies=invert(selection).view(topk_idx.shape),
            rows_out=rows_out,
            rows_in=rows_in,
            by_expert=by_expert,
            by_source=None if by_expert is None else invert(by_expert),
            tokens_per_expert=received.sum(0).cpu(),
        )

    @staticmethod
    def _by_expert(received: Tensor, num_rows: int) -> Tensor:
        """Order of the chunks ``[R, L]`` by expert, then source, as int64 ``[P]``."""
        sizes = received.t().reshape(-1)
        starts = (received.reshape(-1).cumsum(0).view_as(received) - received).t().reshape(-1)
        shift = starts - (sizes.cumsum(0) - sizes)
        return shift.repeat_interleave(sizes, output_size=num_rows) + torch.arange(num_rows, device=received.device)

    def forth(self, rows: Tensor, routing: Routing) -> Tensor:
        """``[P, H]``, a new tensor: copies of the tokens' rows ``[T, H]`` at their experts."""
        if routing.by_expert is None:
            return self._gather(rows, routing.token)
        sent = self._gather(rows, routing.token, "sent")
        got = self._exchange(sent, routing.rows_out, routing.rows_in)
        return self._gather(got, routing.by_expert)

    def back(self, rows: Tensor, routing: Routing) -> Tensor:
        """``[T, H]``, a new tensor: the sum over k of the experts' rows ``[P, H]``."""
        if routing.by_source is None:
            return self._sum_copies(rows, routing.copies)
        sent = self._gather(rows, routing.by_source, "sent")
        return self._sum_copies(self._exchange(sent, routing.rows_in, routing.rows_out), routing.copies)

    def values_forth(self, values: Tensor, routing: Routing) -> Tensor:
        """``[P]``: one value ``[T, K]`` for each copy, as :meth:`forth`."""
        sent = values.reshape(-1)[routing.selection]
        if routing.by_expert is None:
            return sent
        got = sent.new_empty(sum(routing.rows_in))
        dist.all_to_all_single(got, sent, routing.rows_in, routing.rows_out, group=self.group)
        return got[routing.by_expert]

    def values_back(self, values: Tensor, routing: Routing) -> Tensor:
        """``[T, K]``: inverse of :meth:`values_forth`."""
        got = values
        if routing.by_source is not None:
            sent = values[routing.by_source]
            got = sent.new_empty(len(routing.token))
            dist.all_to_all_single(got, sent, routing.rows_out, routing.rows_in, group=self.group)
        return got[routing.copies]

    def _exchange(self, sent: Tensor, rows_out: list[int], rows_in: list[int]) -> Tensor:
        got = self._staging("received", sent, sum(rows_in))
        dist.all_to_all_single(lanes(got), lanes(sent), rows_in, rows_out, group=self.group)
        return got

    @staticmethod
    def _sum_copies(rows: Tensor, copies: Tensor) -> Tensor:
        """``[T, H]``: rows named by each line of ``copies`` ``[T, K]``, added in float32 in the order of k."""
        num_tokens, num_topk = copies.shape
        if rows.is_cuda:
            total = rows.new_zeros(num_tokens, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
            for copy in copies.unbind(1):
                total += rows[copy]
            return total.to(rows.dtype)
        ends, ones = torch.arange(0, copies.numel() + 1, num_topk), rows.new_ones(copies.numel())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR", UserWarning)
            size = (num_tokens, len(rows))
            named = torch.sparse_csr_tensor(ends, copies.reshape(-1), ones, size, check_invariants=False)
        summed: Tensor = torch.sparse.mm(named, rows, "sum")  # one pass, line by line, float32 inside
        return summed

    def _gather(self, rows: Tensor, index: Tensor, name: str = "") -> Tensor:
        """``rows[index]``: with a name into scratch, else a new tensor."""
        if not self.keep_buffers:
            return lanes(rows).index_select(0, index).view(rows.dtype)
        return gather_rows(rows, index, out=self._staging(name, rows, len(index)) if name else None)

    def _staging(self, name: str, like: Tensor, num_rows: int) -> Tensor:
        """Scratch ``[num_rows, H]``; CUDA's allocator keeps its own."""
        hidden = like.shape[1]
        if like.is_cuda or not self.keep_buffers:
            return like.new_empty(num_rows, hidden)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < num_rows * hidden or kept.dtype != like.dtype:
            kept = self._kept[name] = like.new_empty(num_rows * hidden)
        return kept[: num_rows * hidden].view(num_rows, hidden)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_weights: Tensor, routing: Routing, plain: PlainDispatcher
    ) -> tuple[Tensor, Tensor]:
        ctx.routing, ctx.plain, ctx.weights_dtype = routing, plain, topk_weights.dtype
        travels = torch.float64 if x.dtype == torch.float64 else torch.float32
        return plain.forth(x, routing), plain.values_forth(topk_weights.to(travels), routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.plain.back(grad_x.contiguous(), ctx.routing)
        weights = ctx.plain.values_back(grad_weights.contiguous(), ctx.routing).to(ctx.weights_dtype)
        return rows, weights, None, None  # x, topk_weights, routing, plain


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routing: Routing, plain: PlainDispatcher) -> Tensor:
        ctx.routing, ctx.plain = routing, plain
        return plain.back(rows.contiguous(), routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.plain.forth(grad.contiguous(), ctx.routing), None, None  # rows, routing, plain
