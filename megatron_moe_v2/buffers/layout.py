"""Permutation arithmetic: which row goes where, and the sums that bring rows back.

Pure functions on tensors of any device, without a loop over tokens or experts. Legend as in ``contract``; S is the
number of (token, destination rank) pairs that this rank sends, P the number of (row, local expert) pairs it received.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Destinations",
    "ExpertSlots",
    "align_counts",
    "destinations",
    "expert_slots",
    "gather_rows",
    "invert",
    "kernels_for",
    "lanes",
    "owners",
    "pick",
    "pick_lanes",
    "rows_of_slots",
    "selections",
    "sum_rows",
]


def kernels_for(tensor: Tensor) -> Any:
    """The module of Triton kernels if they can run on ``tensor``, else None."""
    return _kernels() if tensor.is_cuda else None


@functools.cache
def _kernels() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(".kernels", __package__)


_BLOCK = 128
"""Tokens summed at a time on the CPU, so that the accumulators stay in its second-level cache."""


class Destinations(NamedTuple):
    """Rows to send, ordered by destination rank, then by token (then by lane, when lanes are sent one by one).

    Attributes:
        token: int64 ``[S]``, the row of ``x``.
        rank: int64 ``[S]``, where it goes.
        lane: int64 ``[S]``, the lane that tags it when it comes back.
        counts: int64 ``[R]``, rows for each rank.
    """

    token: Tensor
    rank: Tensor
    lane: Tensor
    counts: Tensor

    def table(self, num_tokens: int, num_topk: int) -> Tensor:
        """int64 ``[T, K]``: number of the row that a token gets back at each lane, or -1."""
        table = self.token.new_full((num_tokens, num_topk), -1)
        table[self.token, self.lane] = torch.arange(len(self.token), device=table.device)
        return table

    def row_from_rank(self, num_tokens: int, num_ranks: int) -> Tensor:
        """int64 ``[T, R + 1]``: number of the row that a token sent to each rank, or -1; the last column is -1."""
        rows = self.token.new_full((num_tokens, num_ranks + 1), -1)
        rows[self.token, self.rank] = torch.arange(len(self.token), device=rows.device)
        return rows


def owners(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """int64 ``[T, K]``: rank that owns each selected expert, ``num_ranks`` where nothing is selected."""
    num_local_experts = num_experts // num_ranks
    owner = torch.div(topk_idx, num_local_experts, rounding_mode="floor")
    return owner.masked_fill_(topk_idx < 0, num_ranks).long()


def destinations(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Destinations:
    """Each token once for every rank that owns one of its experts, tagged with its master lane there."""
    num_tokens, num_topk = topk_idx.shape
    lane = torch.arange(num_topk, device=topk_idx.device).expand(num_tokens, num_topk)
    master = lane.new_full((num_tokens, num_ranks + 1), -1)
    master.scatter_reduce_(1, owners(topk_idx, num_experts, num_ranks), lane, "amax")
    master = master[:, :num_ranks]
    sent = master >= 0
    rank, token = sent.t().nonzero().unbind(1)
    return Destinations(token, rank, master[token, rank], sent.sum(0))


def selections(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Destinations:
    """Each selection on its own, ordered by rank, token, lane: what travels back when nothing is reduced before."""
    owner = owners(topk_idx, num_experts, num_ranks)
    token, lane = (owner < num_ranks).nonzero().unbind(1)
    rank, order = torch.sort(owner[token, lane], stable=True)
    return Destinations(token[order], rank, lane[order], torch.bincount(rank, minlength=num_ranks))


def align_counts(counts: Tensor, alignment: int) -> Tensor:
    """Each count rounded up to a multiple of ``alignment``."""
    return (counts + (alignment - 1)) // alignment * alignment


class ExpertSlots(NamedTuple):
    """Where each (row, local expert) pair stands in the expert layout.

    Attributes:
        slots: int64 ``[n, K]``, slot of each selection, -1 where it is not on this rank.
        counts: int64 ``[L]``, exact rows of each expert.
        aligned: int64 ``[L]``, rows of each expert with its padding.
    """

    slots: Tensor
    counts: Tensor
    aligned: Tensor


def expert_slots(local_idx: Tensor, num_local_experts: int, alignment: int, order: Tensor | None = None) -> ExpertSlots:
    """Group the selections ``local_idx`` ``[n, K]`` (local expert or -1) by expert.

    Inside an expert slots ascend with the row, or with ``order`` ``[n * K]`` when another legal order is wanted.
    """
    flat = local_idx.reshape(-1)
    picked = (flat >= 0).nonzero().squeeze(1) if order is None else order[flat[order] >= 0]
    expert, by_expert = torch.sort(flat[picked].long(), stable=True)
    counts = torch.bincount(expert, minlength=num_local_experts)
    aligned = align_counts(counts, alignment)
    shift = (aligned.cumsum(0) - aligned) - (counts.cumsum(0) - counts)
    slots = flat.new_full(flat.shape, -1, dtype=torch.int64)
    slots[picked[by_expert]] = torch.arange(len(expert), device=flat.device) + shift[expert]
    return ExpertSlots(slots.view(local_idx.shape), counts, aligned)


def rows_of_slots(slots: Tensor, num_slots: int) -> Tensor:
    """int64 ``[num_slots]``: flat position in ``slots`` ``[n, K]`` that fills each slot, -1 for padding."""
    flat = slots.reshape(-1)
    filled = (flat >= 0).nonzero().squeeze(1)
    positions = flat.new_full((num_slots,), -1, dtype=torch.int64)
    positions[flat[filled].long()] = filled
    return positions


def invert(permutation: Tensor) -> Tensor:
    """The permutation that undoes ``permutation`` (int64 ``[n]``)."""
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse


def lanes(rows: Tensor) -> Tensor:
    """The same rows as the widest integers that divide them: moved bit for bit, whatever the dtype."""
    size = rows.element_size()
    spans = (rows.shape[1] * size, rows.stride(0) * size, rows.storage_offset() * size)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if dtype.itemsize >= size and not any(span % dtype.itemsize for span in spans):
            return rows.view(dtype)
    return rows.view(torch.uint8)


def gather_rows(rows: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """``rows[index]`` bit for bit, for any dtype; ``index`` int64 ``[m]``, ``out`` ``[m, H]`` of any row stride."""
    if out is None:
        return lanes(rows).index_select(0, index).view(rows.dtype)
    source, target = lanes(rows), lanes(out)
    if source.dtype != target.dtype:
        source, target = rows.view(torch.uint8), out.view(torch.uint8)
    torch.index_select(source, 0, index, out=target)
    return out


def pick(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` of ``values`` ``[m]``, zero where ``index`` (int64, any shape) is negative."""
    if not len(values):
        return values.new_zeros(index.shape)
    return values[index.clamp_min(0)].masked_fill_(index < 0, 0)


def pick_lanes(values: Tensor, row: Tensor) -> Tensor:
    """``[T, K]``: ``values[row[t, k], k]`` of ``values`` ``[m, K]``, zero where ``row`` is negative."""
    if not len(values):
        return values.new_zeros(row.shape)
    return values.gather(0, row.clamp_min(0)).masked_fill_(row < 0, 0)


def sum_rows(rows: Tensor, table: Tensor, *, bias: tuple[Tensor, ...] = (), out: Tensor | None = None) -> Tensor:
    """Sum the rows that each line of ``table`` names.

    Numbers are added in float32 (float64 for float64 rows) from +0: first the biases, then the named rows in the order
    of the line's columns; the result is rounded once.

    Args:
        rows: ``[r, H]``, any row stride.
        table: int64 ``[T, C]``, row numbers; negative entries are skipped.
        bias: each ``[T, H]``.
        out: ``[T, H]`` of the dtype of ``rows``, any row stride, fully written.
    """
    num_tokens, hidden = table.shape[0], rows.shape[1]
    out = rows.new_empty(num_tokens, hidden) if out is None else out
    if not bias and (kernels := kernels_for(rows)):
        return kernels.ungroup(rows, table, out)  # type: ignore[no-any-return]
    valid = table >= 0
    packed = table.gather(1, (~valid).to(torch.int8).argsort(dim=1, stable=True))
    count = valid.sum(1)
    if rows.is_cuda:
        return _sum_rows_at_once(rows, packed, count, bias, out)
    by_count = count.argsort(descending=True, stable=True)
    packed = packed[by_count].t().contiguous()
    named = (count[:, None] > torch.arange(table.shape[1])).sum(0).tolist()
    accumulator = torch.empty(min(_BLOCK, num_tokens), hidden, dtype=_sum_dtype(rows.dtype))
    for start in range(0, num_tokens, _BLOCK):
        tokens = by_count[start : start + _BLOCK]
        total = accumulator[: len(tokens)].zero_()
        for one in bias:
            total += one.index_select(0, tokens)
        for column, filled in zip(packed, named, strict=True):
            active = min(filled - start, len(tokens))
            if active <= 0:
                break
            total[:active] += rows.index_select(0, column[start : start + active])
        out.index_copy_(0, tokens, total.to(out.dtype))
    return out


def _sum_rows_at_once(rows: Tensor, packed: Tensor, count: Tensor, bias: tuple[Tensor, ...], out: Tensor) -> Tensor:
    total = torch.zeros(out.shape, dtype=_sum_dtype(rows.dtype), device=rows.device)
    for one in bias:
        total += one
    if len(rows):
        for column in range(packed.shape[1]):
            chosen = rows.index_select(0, packed[:, column].clamp_min(0))
            total += torch.where((count > column)[:, None], chosen, chosen.new_zeros(()))
    return out.copy_(total)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
