"""Permutation arithmetic: which row goes where, and the sums that bring rows back.

Pure functions on tensors of any device, without a loop over tokens or experts. Legend as in ``contract``; S is the
number of (token, destination rank) pairs that this rank sends, P the number of (row, local expert) pairs it received.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import mmap
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Destinations",
    "ExpertSlots",
    "align_counts",
    "as_bytes",
    "destinations",
    "empty_rows",
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


_HUGE_BYTES = 8 * 1024 * 1024
"""CPU tensors from this size are put on huge pages where the kernel allows it: touching fresh small ones costs more
than the copy."""

_MADV_HUGEPAGE = 14


class Destinations(NamedTuple):
    """Rows to send, ordered by destination rank, then by token (then by lane, when lanes are sent one by one).

    Attributes:
        token: int64 ``[S]``, the row of ``x``.
        rank: int64 ``[S]``, where it goes.
        lane: int64 ``[S]``, the lane that tags it when it comes back.
        counts: rows for each rank.
    """

    token: Tensor
    rank: Tensor
    lane: Tensor
    counts: list[int]

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
    return Destinations(token, rank, master[token, rank], sent.sum(0).tolist())


def selections(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Destinations:
    """Each selection on its own, ordered by rank, token, lane: what travels back when nothing is reduced before."""
    owner = owners(topk_idx, num_experts, num_ranks)
    token, lane = (owner < num_ranks).nonzero().unbind(1)
    rank, order = torch.sort(owner[token, lane], stable=True)
    return Destinations(token[order], rank, lane[order], torch.bincount(rank, minlength=num_ranks).tolist())


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
    """The same rows as the widest numbers that divide them: moved bit for bit, whatever the dtype.

    Pairs of bytes as bfloat16: gloo has no 16-bit integers.
    """
    rows = _viewable(rows)
    size = rows.element_size()
    spans = (rows.shape[1] * size, rows.stride(0) * size, rows.storage_offset() * size)
    for dtype in (torch.int64, torch.int32, torch.bfloat16):
        if dtype.itemsize >= size and not any(span % dtype.itemsize for span in spans):
            return rows.view(dtype)
    return rows.view(torch.uint8)


def as_bytes(rows: Tensor) -> Tensor:
    """``[n, H]`` contiguous rows as ``[n, B]`` bytes."""
    return _viewable(rows).view(torch.uint8)


def _viewable(rows: Tensor) -> Tensor:
    """No rows that are expanded, as the gradient of a sum is, count as contiguous and have no strides to view."""
    return rows if rows.numel() else rows.new_empty(rows.shape)


def empty_rows(num_rows: int, width: int, like: Tensor) -> Tensor:
    """Uninitialised ``[num_rows, width]`` of the dtype and device of ``like``."""
    rows = like.new_empty(num_rows, width)
    nbytes = num_rows * width * like.element_size()
    if nbytes >= _HUGE_BYTES and not rows.is_cuda and (advise := _madvise()) is not None:
        page = mmap.PAGESIZE
        first = -(-rows.data_ptr() // page) * page
        advise(first, (rows.data_ptr() + nbytes) // page * page - first, _MADV_HUGEPAGE)  # a hint: failing is harmless
    return rows


@functools.cache
def _madvise() -> Any:
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def gather_rows(rows: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """``rows[index]`` bit for bit, for any dtype; ``index`` int64 ``[m]``, ``out`` ``[m, H]`` of any row stride."""
    if out is None:
        out = empty_rows(len(index), rows.shape[1], rows)
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
        table: integer ``[T, C]``, row numbers; negative entries are skipped.
        bias: each ``[T, H]``.
        out: ``[T, H]`` of the dtype of ``rows``, any row stride, fully written; by default a fresh contiguous tensor.
    """
    if not bias and (kernels := kernels_for(rows)):
        target = rows.new_empty(table.shape[0], rows.shape[1]) if out is None else out
        return kernels.ungroup(rows, table, target)[0]  # type: ignore[no-any-return]
    if bias or rows.is_cuda or not len(rows):
        summed = _sum_rows_by_column(rows, table, bias)
    else:
        summed = _sum_rows_by_line(rows, table)
    return summed if out is None else out.copy_(summed)


def _sum_rows_by_line(rows: Tensor, table: Tensor) -> Tensor:
    """On the CPU: a product with a sparse matrix of ones adds in the order of the line, and rounds once."""
    valid = table >= 0
    first = torch.zeros(table.shape[0] + 1, dtype=torch.int64, device=table.device)
    torch.cumsum(valid.sum(1), 0, out=first[1:])
    column = table[valid].long()
    _expect_sparse_warning()
    size = (table.shape[0], rows.shape[0])
    ones = rows.new_ones(len(column))
    matrix = torch.sparse_csr_tensor(first, column, ones, size, device=rows.device, check_invariants=False)
    return torch.sparse.mm(matrix, rows, "sum")  # type: ignore[no-any-return]


@functools.cache
def _expect_sparse_warning() -> None:
    """PyTorch says once a process that sparse CSR tensors are in beta; take that here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        torch.sparse_csr_tensor(none.new_zeros(2), none, none.float(), device="cpu")


def _sum_rows_by_column(rows: Tensor, table: Tensor, bias: tuple[Tensor, ...]) -> Tensor:
    """Anywhere: one column of the table after the other."""
    total = torch.zeros(
        table.shape[0],
        rows.shape[1],
        dtype=torch.float64 if rows.dtype == torch.float64 else torch.float32,
        device=rows.device,
    )
    for one in bias:
        total += one
    if len(rows):
        for column in table.unbind(1):
            chosen = rows.index_select(0, column.clamp_min(0).long())
            total += torch.where((column >= 0)[:, None], chosen, chosen.new_zeros(()))
    return total.to(rows.dtype)
