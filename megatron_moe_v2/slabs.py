"""What grouped GEMMs take, made from the expert layout without asking the host: masked slabs, and an expert per row.

Shapes depend on sizes that the host knows (A, M) and never on what was received; the counts stay on the device; no call
waits for it, so each can be captured in a CUDA graph. :func:`repack` moves rows ``[A, H]``, grouped by expert, into
slabs ``[L, M, H]`` with ``masked_m`` counts, as masked grouped GEMMs (DeepGEMM's among them) take them;
:func:`unrepack` moves a GEMM's result back and can fold the top-k weights in; both have gradients.
:func:`row_experts` gives contiguous grouped GEMMs the expert of each row.

What unread rows hold. A masked GEMM computes rows below ``masked_m`` and may load the rest of the last tile. ``repack``
fills the rows from ``masked_m`` to the end of the slab with zeros, or with ``tile=`` only to the end of that tile and
leaves the others uninitialised. ``unrepack`` reads no row from ``masked_m`` on; it fills alignment gaps with zeros and
leaves the rows past the last expert uninitialised, as dispatch does. Gradients follow the same rules, with ``tile``
ignored.

An expert that received more than M rows does not fit: the rows from M on are left out, come back as zeros, have no
gradient, and the :class:`OverflowFlag` of the call is raised on the device. Nothing else reports it: check the flag
wherever the host waits anyway.

Legend: L local experts, A rows of the expert layout (the worst case without CPU sync), M rows of a slab, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from .buffers.layout import gather_rows, kernels_for
from .communication import first_order
from .errors import CapacityError, InputError
from .fp8 import QuantizedRows, ScaleFormat
from .ranges import ranged

__all__ = ["ExpertSegments", "OverflowFlag", "repack", "row_experts", "unrepack"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertSegments:
    """Where each local expert's rows stand in the expert layout.

    Attributes:
        psum: int32 ``[L]`` on the device, aligned start of each expert plus its exact count.
        counts: int32 ``[L]`` on the device, exact counts.
        num_rows: A.
        alignment: each expert's rows are padded to a multiple of this.

    Raises:
        InputError: a dtype, shape, device or number is wrong.
    """

    psum: Tensor
    counts: Tensor
    num_rows: int
    alignment: int = 1

    def __post_init__(self) -> None:
        for name in ("psum", "counts"):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not len(tensor) or not tensor.is_contiguous():
                raise InputError(
                    f"{name} of expert segments",
                    got=f"{tensor.dtype} {tuple(tensor.shape)}",
                    expected="contiguous int32 [local experts]",
                )
        if self.psum.shape != self.counts.shape or self.psum.device != self.counts.device:
            raise InputError(
                "counts of expert segments",
                got=f"{tuple(self.counts.shape)} on {self.counts.device}",
                expected=f"{tuple(self.psum.shape)} on {self.psum.device}, as psum",
            )
        if self.alignment < 1 or self.num_rows < 0:
            raise InputError(
                "alignment and num_rows of expert segments",
                got=f"{self.alignment} and {self.num_rows}",
                expected="at least 1 and 0",
            )

    @classmethod
    def of_handle(cls, handle: Any) -> ExpertSegments:
        """Those of an :class:`~.buffers.contract.EPHandle` whose dispatch used the expert layout.

        Raises:
            InputError: the handle is of the token layout.
        """
        if not handle.do_expand:
            raise InputError("handle of the token layout", fix='Dispatch with layout="expert".')
        return cls(
            psum=handle.psum_num_recv_tokens_per_expert,
            counts=handle.num_unaligned_recv_tokens_per_expert,
            num_rows=handle.num_expanded_tokens,
            alignment=handle.expert_alignment,
        )


class OverflowFlag:
    """Remembers on the device that an expert received more rows than its slab holds.

    Raised by any number of calls and captured replays, lowered only by :meth:`reset`. Only reading it waits for the
    device.

    Attributes:
        value: int32 ``[1]``, the most rows that any expert had where they did not fit, else 0.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.value = torch.zeros(1, dtype=torch.int32, device=device)

    def check(self) -> None:
        """Wait for the device, and report an overflow.

        Raises:
            CapacityError: rows were left out since the flag was made or reset.
        """
        if most := int(self.value):
            raise CapacityError(
                "rows of one expert exceeded its slab and were left out",
                got=f"{most} rows",
                expected="at most max_rows of the repack",
                fix=f"Repack with max_rows of at least {most}, or send fewer tokens at a time.",
            )

    def reset(self) -> None:
        """Lower the flag, in stream order, without waiting."""
        self.value.zero_()


@overload
def repack(
    rows: Tensor, segments: ExpertSegments, *, max_rows: int, overflow: OverflowFlag, tile: int | None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def repack(
    rows: QuantizedRows,
    segments: ExpertSegments,
    *,
    max_rows: int,
    overflow: OverflowFlag,
    tile: int | None = None,
    column_major: bool | None = None,
) -> tuple[QuantizedRows, Tensor]: ...
@ranged("repack")
def repack(
    rows: Tensor | QuantizedRows,
    segments: ExpertSegments,
    *,
    max_rows: int,
    overflow: OverflowFlag,
    tile: int | None = None,
    column_major: bool | None = None,
) -> tuple[Tensor | QuantizedRows, Tensor]:
    """Copy each expert's rows to a slab of its own.

    Args:
        rows: ``[A, H]`` of any floating dtype, with gradient; or FP8 rows with their scales, without.
        segments: where the experts' rows stand.
        max_rows: M.
        overflow: raised if an expert has more than M rows.
        tile: fill with zeros only to the next multiple of this, at most to M; else all unread rows.
        column_major: layout of the slabs' scales; that of ``rows`` unless given.

    Returns:
        ``[L, M, H]`` (FP8: :class:`QuantizedRows` of slabs, scales of zeroed rows zero), and ``masked_m``, int32
        ``[L]``: the rows of each slab that count.

    Raises:
        InputError: wrong shape, device or number.
    """
    if max_rows < 1 or (tile is not None and tile < 1):
        raise InputError("max_rows and tile", got=f"{max_rows} and {tile}", expected="at least 1")
    if overflow.value.device != segments.psum.device:
        raise InputError("device of the overflow flag", got=overflow.value.device, expected=segments.psum.device)
    if isinstance(rows, Tensor):
        if column_major is not None:
            raise InputError("column_major", got=column_major, expected="None: rows without scales")
        _check_rows(rows, segments)
        slab, masked_m = _Repack.apply(  # type: ignore[no-untyped-call]
            rows, segments.psum, segments.counts, overflow.value, max_rows, segments.alignment, tile
        )
        return slab, masked_m
    _check_rows(rows.data, segments)
    order = rows.format.column_major if column_major is None else column_major
    target = ScaleFormat(kind=rows.format.kind, column_major=order)
    num_slabs, device = len(segments.counts), rows.data.device
    data = torch.empty(num_slabs, max_rows, rows.data.shape[1], dtype=torch.uint8, device=device)
    scales = target.empty(num_slabs, max_rows, hidden=rows.hidden, device=device)
    masked_m = _to_slabs(rows.data.view(torch.uint8), segments, data, overflow.value, tile)
    _to_slabs(rows.scales, segments, scales, None, tile)
    slabs = QuantizedRows(data=data.view(torch.float8_e4m3fn), scales=scales, format=target, hidden=rows.hidden)
    return slabs, masked_m


@overload
def unrepack(slabs: Tensor, segments: ExpertSegments, weights: Tensor | None = None) -> Tensor: ...
@overload
def unrepack(slabs: QuantizedRows, segments: ExpertSegments, *, column_major: bool | None = None) -> QuantizedRows: ...
@ranged("unrepack")
def unrepack(
    slabs: Tensor | QuantizedRows,
    segments: ExpertSegments,
    weights: Tensor | None = None,
    *,
    column_major: bool | None = None,
) -> Tensor | QuantizedRows:
    """Copy the slabs' rows back to the expert layout, each times its weight if weights are given.

    Args:
        slabs: ``[L, M, H]`` of any floating dtype, with gradient; or FP8 slabs with their scales, without.
        segments: those of the repack.
        weights: float32 ``[A]`` (float64 with float64 slabs), with gradient: a product is taken in that precision and
            rounded once, and a weight's gradient is summed in it.
        column_major: layout of the rows' scales; that of ``slabs`` unless given.

    Returns:
        ``[A, H]``; gaps and rows that did not fit are zero, rows past the last expert uninitialised.

    Raises:
        InputError: wrong shape, dtype or device; weights with FP8.
    """
    if isinstance(slabs, Tensor):
        if column_major is not None:
            raise InputError("column_major", got=column_major, expected="None: slabs without scales")
        _check_slabs(slabs, segments)
        if weights is not None:
            _check_weights(weights, slabs, segments)
        return _Unrepack.apply(  # type: ignore[no-untyped-call, no-any-return]
            slabs, weights, segments.psum, segments.counts, segments.num_rows, segments.alignment
        )
    if weights is not None:
        raise InputError("weights with FP8 slabs", fix="De-quantise first: a weighted FP8 row would be rounded twice.")
    _check_slabs(slabs.data, segments)
    order = slabs.format.column_major if column_major is None else column_major
    target = ScaleFormat(kind=slabs.format.kind, column_major=order)
    device, num_rows = slabs.data.device, segments.num_rows
    data = torch.empty(num_rows, slabs.data.shape[2], dtype=torch.uint8, device=device)
    scales = target.empty(num_rows, hidden=slabs.hidden, device=device)
    _from_slabs(slabs.data.view(torch.uint8), segments, data)
    _from_slabs(slabs.scales, segments, scales)
    return QuantizedRows(data=data.view(torch.float8_e4m3fn), scales=scales, format=target, hidden=slabs.hidden)


def row_experts(segments: ExpertSegments) -> Tensor:
    """int32 ``[A]``: the local expert of each row, -1 in alignment gaps and past the last expert."""
    if kernels := _kernels(segments.psum):
        return kernels.row_experts(segments.psum, segments.counts, segments.num_rows)  # type: ignore[no-any-return]
    return _places(segments)[0].int()


class _Repack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        psum: Tensor,
        counts: Tensor,
        flag: Tensor,
        max_rows: int,
        alignment: int,
        tile: int | None,
    ) -> tuple[Tensor, Tensor]:
        segments = ExpertSegments(psum=psum, counts=counts, num_rows=len(rows), alignment=alignment)
        slab = rows.new_empty(len(counts), max_rows, rows.shape[1])
        masked_m = _to_slabs(rows, segments, slab, flag, tile)
        ctx.save_for_backward(psum, counts)
        ctx.num_rows, ctx.alignment = len(rows), alignment
        ctx.mark_non_differentiable(masked_m)
        return slab, masked_m

    @staticmethod
    @first_order
    @ranged("repack backward")
    def backward(ctx: Any, grad: Tensor, _masked_m: None) -> tuple[Tensor | None, ...]:
        psum, counts = ctx.saved_tensors
        segments = ExpertSegments(psum=psum, counts=counts, num_rows=ctx.num_rows, alignment=ctx.alignment)
        grad_rows = grad.new_empty(ctx.num_rows, grad.shape[2])
        _from_slabs(grad.contiguous(), segments, grad_rows)
        return grad_rows, None, None, None, None, None, None  # rows, psum, counts, flag, max_rows, alignment, tile


class _Unrepack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slabs: Tensor, weights: Tensor | None, psum: Tensor, counts: Tensor, num_rows: int, alignment: int
    ) -> Tensor:
        segments = ExpertSegments(psum=psum, counts=counts, num_rows=num_rows, alignment=alignment)
        slabs = slabs.contiguous()
        rows = slabs.new_empty(num_rows, slabs.shape[2])
        _from_slabs(slabs, segments, rows, None if weights is None else weights.contiguous())
        kept = (weights, slabs if ctx.needs_input_grad[1] else None)
        ctx.save_for_backward(psum, counts, *kept)
        ctx.max_rows, ctx.alignment = slabs.shape[1], alignment
        return rows

    @staticmethod
    @first_order
    @ranged("unrepack backward")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        psum, counts, weights, slabs = ctx.saved_tensors
        segments = ExpertSegments(psum=psum, counts=counts, num_rows=len(grad), alignment=ctx.alignment)
        grad, grad_weights = grad.contiguous(), None
        grad_slabs = grad.new_empty(len(counts), ctx.max_rows, grad.shape[1])
        if weights is None:
            _to_slabs(grad, segments, grad_slabs, None, None)
        else:
            grad_weights = _weighted_backward(grad, segments, weights.contiguous(), slabs, grad_slabs)
        return grad_slabs, grad_weights, None, None, None, None  # slabs, weights, psum, counts, num_rows, alignment


def _to_slabs(rows: Tensor, segments: ExpertSegments, slabs: Tensor, flag: Tensor | None, tile: int | None) -> Tensor:
    """Fill ``slabs`` ``[L, M, C]`` from ``rows`` ``[A, C]``, bit for bit, of any strides; returns ``masked_m``."""
    if kernels := _kernels(rows):
        return kernels.to_slabs(rows, segments.psum, segments.counts, slabs, flag, tile)  # type: ignore[no-any-return]
    counts, max_rows = segments.counts, slabs.shape[1]
    if flag is not None:
        torch.maximum(flag, counts.amax(0, keepdim=True).masked_fill(counts.amax() <= max_rows, 0), out=flag)
    if rows.numel():
        index, unread = _sources(segments, max_rows)
        gathered = gather_rows(rows.contiguous(), index).masked_fill_(unread[:, None], 0)
        slabs.copy_(gathered.view(slabs.shape))
    else:
        slabs.zero_()
    return counts.clamp_max(max_rows)


def _from_slabs(slabs: Tensor, segments: ExpertSegments, rows: Tensor, weights: Tensor | None = None) -> None:
    """Fill ``rows`` ``[A, C]`` from ``slabs`` ``[L, M, C]``, of any strides, bit for bit or times ``weights``."""
    if kernels := _kernels(slabs):
        kernels.from_slabs(slabs, segments.psum, segments.counts, rows, weights, segments.alignment)
        return
    index, unfilled = _targets(segments, slabs.shape[1])
    gathered = gather_rows(slabs.reshape(-1, slabs.shape[2]).contiguous(), index)
    if weights is not None:
        gathered = gathered * weights[:, None]
    rows.copy_(gathered.masked_fill_(unfilled[:, None], 0))


def _weighted_backward(
    grad: Tensor, segments: ExpertSegments, weights: Tensor, slabs: Tensor | None, grad_slabs: Tensor
) -> Tensor | None:
    """Fill ``grad_slabs``; the weights' gradient ``[A]``, zero where no row is, if ``slabs`` are there for it."""
    grad_weights = None if slabs is None else torch.zeros_like(weights)
    if kernels := _kernels(grad):
        kernels.weighted_backward(grad, segments.psum, segments.counts, weights, slabs, grad_slabs, grad_weights)
        return grad_weights
    if not len(grad):
        grad_slabs.zero_()
        return grad_weights
    index, unread = _sources(segments, grad_slabs.shape[1])
    chosen = grad[index] * weights[index, None]
    grad_slabs.copy_(chosen.masked_fill_(unread[:, None], 0).view(grad_slabs.shape))
    if slabs is not None:
        index, unfilled = _targets(segments, slabs.shape[1])
        products = slabs.view(-1, slabs.shape[2])[index].to(weights.dtype) * grad
        grad_weights = products.sum(1).masked_fill_(unfilled, 0)
    return grad_weights


def _sources(segments: ExpertSegments, max_rows: int) -> tuple[Tensor, Tensor]:
    """int64 ``[L * M]`` row that fills each place of the slabs (any row where none does), and whether none does."""
    place = torch.arange(max_rows, device=segments.psum.device)
    start = segments.psum - segments.counts
    unread = (place >= segments.counts[:, None]).reshape(-1)
    return (start[:, None] + place).reshape(-1).clamp(0, segments.num_rows - 1), unread


def _targets(segments: ExpertSegments, max_rows: int) -> tuple[Tensor, Tensor]:
    """int64 ``[A]`` place in the slabs, flat, of each row (any place where it has none), and whether it has none."""
    expert, place = _places(segments)
    index = expert.clamp_min(0) * max_rows + place.clamp(0, max_rows - 1)
    return index, (expert < 0) | (place >= max_rows)


def _places(segments: ExpertSegments) -> tuple[Tensor, Tensor]:
    """int64 ``[A]`` each: the expert of each row, -1 for none, and the row's place among the expert's."""
    row = torch.arange(segments.num_rows, dtype=torch.int32, device=segments.psum.device)
    expert = torch.searchsorted(segments.psum, row, right=True)
    start = (segments.psum - segments.counts)[expert.clamp_max(len(segments.psum) - 1)]
    none = (expert == len(segments.psum)) | (row < start)
    return expert.masked_fill(none, -1), (row - start).long()


def _kernels(tensor: Tensor) -> Any:
    """The module of Triton kernels if they can run on ``tensor``, else None."""
    if kernels_for(tensor) is None:
        return None
    from .buffers import kernels_slabs

    return kernels_slabs


def _check_rows(rows: Tensor, segments: ExpertSegments) -> None:
    if rows.dim() != 2 or len(rows) != segments.num_rows or rows.device != segments.psum.device:
        raise InputError(
            "rows of the expert layout",
            got=f"{tuple(rows.shape)} on {rows.device}",
            expected=f"[{segments.num_rows}, H] on {segments.psum.device}",
        )


def _check_slabs(slabs: Tensor, segments: ExpertSegments) -> None:
    num_slabs = len(segments.psum)
    if slabs.dim() != 3 or len(slabs) != num_slabs or not slabs.shape[1] or slabs.device != segments.psum.device:
        raise InputError(
            "slabs",
            got=f"{tuple(slabs.shape)} on {slabs.device}",
            expected=f"[{num_slabs}, M, H] with M >= 1 on {segments.psum.device}",
        )


def _check_weights(weights: Tensor, slabs: Tensor, segments: ExpertSegments) -> None:
    dtype = torch.float64 if slabs.dtype == torch.float64 else torch.float32
    if weights.dtype != dtype or weights.shape != (segments.num_rows,) or weights.device != slabs.device:
        raise InputError(
            "weights of the rows",
            got=f"{weights.dtype} {tuple(weights.shape)} on {weights.device}",
            expected=f"{dtype} ({segments.num_rows},) on {slabs.device}",
        )
