"""The rows of the embedded buffer: packed for the wire, and placed where the handle says.

Legend as in ``contract``. Rows *arrive* ordered by source rank, then source token. ``order`` (int64 ``[n]``) names the
arrived row that stands at each place of the receive order; None means that both orders are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import layout
from .adversary import Adversary, poison
from .checks import CombineRequest, DispatchRequest
from .contract import EPHandle, align
from .exchange import Exchange, Field, RowFormat

__all__ = [
    "arrives_in_place",
    "column_major",
    "dispatch_format",
    "make_handle",
    "pack_partials",
    "pack_tokens",
    "place",
]


def dispatch_format(request: DispatchRequest) -> RowFormat:
    """What a token carries to another rank: itself, and what the receiver cannot know yet."""
    num_topk = request.topk_idx.shape[1]
    fields = [Field(name="x", dtype=request.x.dtype, width=request.x.shape[1])]
    if request.scales is not None:
        fields.append(Field(name="scales", dtype=request.scales.dtype, width=request.scales.shape[1]))
    if request.handle is None or (not request.do_expand and request.handle.recv_topk_idx is None):
        fields.append(Field(name="topk_idx", dtype=torch.int32, width=num_topk))
    if request.weights is not None:
        fields.append(Field(name="weights", dtype=request.weights.dtype, width=num_topk))
    if request.handle is None:
        fields.append(Field(name="token", dtype=torch.int32, width=1))
    return RowFormat(tuple(fields))


def arrives_in_place(request: DispatchRequest, wire: RowFormat, num_rows: int) -> Tensor | None:
    """Where rows can be received as they are returned: a bare cached dispatch in the token layout. Else None."""
    handle = request.handle
    if handle is None or request.do_expand or len(wire.fields) > 1 or handle.num_recv_tokens != num_rows:
        return None
    return layout.empty_rows(num_rows, request.x.shape[1], request.x)


def pack_tokens(exchange: Exchange, request: DispatchRequest, wire: RowFormat, to: layout.Destinations) -> Tensor:
    """Byte rows ``[S, B]`` of a dispatch, ordered by destination."""
    sent = exchange.staging("sent", len(to.token), wire.row_bytes, request.x.device)
    fields = wire.views(sent)
    layout.gather_rows(request.x, to.token, out=fields["x"])
    if request.scales is not None:
        fields["scales"].copy_(request.scales[to.token])
    if "topk_idx" in fields:
        torch.index_select(request.topk_idx.clamp_min(-1).int(), 0, to.token, out=fields["topk_idx"])
    if request.weights is not None:
        torch.index_select(request.weights, 0, to.token, out=fields["weights"])
    if "token" in fields:
        fields["token"].copy_(to.token[:, None])
    return sent


def make_handle(
    request: DispatchRequest,
    to: layout.Destinations,
    counts_in: list[int],
    arrived: dict[str, Tensor],
    order: Tensor | None,
    adversary: Adversary | None,
    *,
    rank: int,
    num_sms: int,
    origin: tuple[int, int],
) -> EPHandle:
    """Lay out what arrived: counts, prefix sums, and where each row came from. ``topk_idx`` is the caller's own."""
    num_ranks, ceiling, alignment = len(counts_in), request.num_max_tokens_per_rank, request.expert_alignment
    num_local_experts, num_topk = request.num_experts // num_ranks, request.topk_idx.shape[1]
    device, num_rows = request.x.device, sum(counts_in)
    local_idx, source = arrived["local_idx"], torch.arange(num_ranks, device=device)
    source = source.repeat_interleave(torch.tensor(counts_in, device=device))
    key = source * ceiling + arrived["token"].squeeze(1)
    if order is not None:
        local_idx, source, key = local_idx[order], source[order], key[order]
    slot_order = adversary.slot_order(local_idx.numel(), device) if adversary else None
    slots, counts, aligned = layout.expert_slots(local_idx, num_local_experts, alignment, slot_order)
    capacity, expanded = num_rows, int(aligned.sum())
    if not request.do_cpu_sync:
        capacity = num_ranks * ceiling
        per_token = min(num_topk, num_local_experts)
        expanded = align(capacity * per_token + (alignment - 1) * num_local_experts, alignment)
    lane = torch.arange(num_topk, device=device)
    metadata = torch.empty(capacity, num_topk + 2, dtype=torch.int32, device=device)
    metadata[:num_rows, 0] = key
    metadata[:num_rows, 1] = source * num_topk + torch.where(local_idx >= 0, lane, -1).amax(1)
    metadata[:num_rows, 2:] = slots
    if adversary:
        poison(metadata[num_rows:])
        if not request.do_expand:
            poison(metadata[:, 2:])
    sent_counts = torch.tensor(to.counts, device=device)
    slot_idx = torch.full_like(request.topk_idx, -1, dtype=torch.int32)
    running = torch.arange(len(to.token), device=device) - (sent_counts.cumsum(0) - sent_counts)[to.rank]
    slot_idx[to.token, to.lane] = (rank * ceiling + running).int()
    ends = aligned.cumsum(0)
    return EPHandle(
        do_expand=request.do_expand,
        num_experts=request.num_experts,
        expert_alignment=alignment,
        num_max_tokens_per_rank=ceiling,
        num_sms=num_sms,
        topk_idx=request.topk_idx,
        num_recv_tokens=capacity,
        num_expanded_tokens=expanded,
        num_recv_tokens_per_expert_list=aligned.tolist() if request.do_cpu_sync else [],
        psum_num_recv_tokens_per_scaleup_rank=torch.tensor(counts_in, device=device).cumsum(0).int(),
        psum_num_recv_tokens_per_expert=(ends - aligned + counts if request.do_expand else ends).int(),
        num_unaligned_recv_tokens_per_expert=counts.int(),
        recv_src_metadata=metadata,
        dst_buffer_slot_idx=slot_idx,
        origin=origin,
        sent=torch.stack([to.token, to.rank, to.lane]),
        sent_counts=to.counts,
    )


def place(
    request: DispatchRequest,
    handle: EPHandle,
    arrived: dict[str, Tensor],
    order: Tensor | None,
    adversary: Adversary | None,
    do_zero_padding: bool,
) -> dict[str, Tensor]:
    """Fresh contiguous tensors with each arrived field where the handle says: a row per token, or one per slot."""
    num_rows = len(arrived["x"])
    if not request.do_expand:
        return {
            name: _token_rows(rows, order, handle.num_recv_tokens, adversary)
            for name, rows in arrived.items()
            if name in ("x", "scales", "local_idx", "weights")
        }
    num_slots, num_topk = handle.num_expanded_tokens, request.topk_idx.shape[1]
    position = layout.rows_of_slots(handle.recv_src_metadata[:num_rows, 2:], num_slots)
    full = request.expert_alignment == 1 and len(handle.num_recv_tokens_per_expert_list) > 0
    unfilled = position[:0] if full else (position < 0).nonzero().squeeze(1)
    row, lane = torch.div(position.clamp_min(0), num_topk, rounding_mode="floor"), position.remainder(num_topk)
    if order is not None and num_rows:
        row = order[row]
    sources: dict[str, tuple[Tensor, Tensor]] = {
        name: (arrived[name], row) for name in ("x", "scales") if name in arrived
    }
    if "weights" in arrived:
        sources["weights"] = (arrived["weights"].reshape(-1, 1), row * num_topk + lane)
    gaps = unfilled
    if len(unfilled):
        counts = handle.num_unaligned_recv_tokens_per_expert
        gaps = unfilled[unfilled < layout.align_counts(counts, handle.expert_alignment).sum()]
    placed: dict[str, Tensor] = {}
    for name, (rows, index) in sources.items():
        slots = layout.gather_rows(rows, index) if num_rows else rows.new_zeros(num_slots, rows.shape[1])
        if adversary:
            poisoned = slots[unfilled]
            poison(poisoned)
            slots[unfilled] = poisoned
        if do_zero_padding and len(gaps):
            layout.lanes(slots).index_fill_(0, gaps, 0)
        placed[name] = slots.squeeze(1).clone() if name == "weights" else slots  # what is returned is no view
    return placed


def _token_rows(rows: Tensor, order: Tensor | None, capacity: int, adversary: Adversary | None) -> Tensor:
    placed = layout.empty_rows(capacity, rows.shape[1], rows)
    kept = placed[: len(rows)]
    if order is None:
        kept.copy_(rows)
    else:
        layout.gather_rows(rows, order, out=kept)
    if adversary:
        poison(placed[len(rows) :])
    return placed


def pack_partials(
    exchange: Exchange, request: CombineRequest, handle: EPHandle, order: Tensor | None
) -> tuple[Tensor, RowFormat, list[int]]:
    """Byte rows of a combine, ordered by the rank they return to, their format, and the rows for each rank.

    ``order`` names the row of the handle that stands at each place of the order by source rank and token.
    """
    num_rows, num_topk = request.num_recv_tokens, handle.topk_idx.shape[1]
    ends = handle.psum_num_recv_tokens_per_scaleup_rank.tolist()
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    fields = [Field(name="x", dtype=request.x.dtype, width=request.x.shape[1])]
    if request.weights is not None:
        fields.append(Field(name="weights", dtype=request.weights.dtype, width=num_topk))
    wire = RowFormat(tuple(fields))
    rows = slice(num_rows) if order is None else order
    slots = handle.recv_src_metadata[rows, 2:].long() if handle.do_expand else None
    if slots is not None and not request.reduce_first:
        filled = slots >= 0
        counts = [int(part.sum()) for part in torch.split(filled, counts)]
        return layout.as_bytes(layout.gather_rows(request.x, slots[filled])), wire, counts
    if slots is None and order is None and request.weights is None:
        return layout.as_bytes(request.x[:num_rows]), wire, counts
    if slots is not None and request.weights is None:
        return layout.as_bytes(layout.sum_rows(request.x, slots)), wire, counts
    sent = exchange.staging("sent", num_rows, wire.row_bytes, request.x.device)
    views: dict[str, Any] = wire.views(sent)
    if slots is not None:
        layout.sum_rows(request.x, slots, out=views["x"])
    elif order is not None:
        layout.gather_rows(request.x, order, out=views["x"])
    else:
        views["x"].copy_(request.x[:num_rows])
    if request.weights is not None:
        kept = request.weights[rows] if slots is None else layout.pick(request.weights, slots)
        views["weights"].copy_(kept)
    return sent, wire, counts


def column_major(scales: Tensor) -> Tensor:
    """``[A, S]`` with the strides that TMA wants: ``(1, A rounded up to 4)``."""
    num_rows, width = scales.shape
    columns = scales.new_empty(width, align(num_rows, 4))[:, :num_rows]
    return columns.copy_(scales.t()).t()
