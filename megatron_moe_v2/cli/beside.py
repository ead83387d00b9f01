"""What the benchmark can measure beside ours: the buffer's own calls without this package, and the embedded buffer.

Both run in the same processes and iterations as ours, on the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..autograd import FusedCombine, FusedDispatch
from ..buffers import Backend, constructor_of
from ..buffers.deepep_v2 import HIDDEN_MULTIPLE
from ..communication import Call, DispatchHandle
from ..errors import LimitError
from ..pool import PooledBuffer
from ..probe import probe
from .measure import Subject
from .verify import Inputs

__all__ = ["BESIDE", "chosen", "embedded_buffer", "embedded_subject", "raw_subjects"]

BESIDE = ("raw", "embedded")


def chosen(wanted: Sequence[str] | None, entry: PooledBuffer, hidden: int) -> list[str]:
    """Of :data:`BESIDE`: what was asked for, else what a real buffer is worth comparing with.

    Raises:
        LimitError: the calls of this buffer cannot be made without this package.
    """
    name = entry.backend.name
    reason = None
    if name == "deepep_v1":
        reason = "V1's calls are others than ElasticBuffer's"
    elif name == "deepep_v2" and hidden % HIDDEN_MULTIPLE:
        reason = f"DeepEP takes multiples of {HIDDEN_MULTIPLE}, this package pads"
    if wanted is None:
        wanted = () if name == "embedded" else ("embedded",) if reason else BESIDE
    if "raw" in wanted and reason is not None:
        raise LimitError("--beside raw", got=f"hidden {hidden} on {name}", fix=f"Leave it out: {reason}.")
    return [one for one in BESIDE if one in wanted]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Dispatched:
    """Token layout: ``[n, H]``, weights ``[n, K]``, local expert or -1 ``[n, K]``. Expert layout: ``[A, H]``, ``[A]``,
    None, and the exact counts ``[L]``."""

    tokens: Tensor
    weights: Tensor
    local_idx: Tensor | None
    tokens_per_expert: Tensor
    handle: Any


class _RawCalls:
    """The four calls of a training step, made on the buffer itself with the SM counts that ours would use."""

    def __init__(self, entry: PooledBuffer, num_experts: int, num_topk: int, *, expert_layout: bool) -> None:
        self.raw: Any = getattr(entry.buffer, "raw", entry.buffer)
        self.entry = entry
        self.topk_idx_dtype = probe().topk_idx_t or torch.int64
        self.sizes = {
            "num_experts": num_experts,
            "num_max_tokens_per_rank": entry.spec.num_max_tokens_per_rank,
            "expert_alignment": 1,
            "do_expand": expert_layout,
            "num_sms": entry.num_sms_for(num_experts, num_topk, expert_layout),
        }

    def dispatch(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> _Dispatched:
        x, weights = x.detach(), weights.detach()
        if x.dtype is torch.float64:
            weights = weights.double()
        tokens, local_idx, received, handle, _ = self.raw.dispatch(
            x, topk_idx=topk_idx.to(self.topk_idx_dtype), topk_weights=weights, **self.sizes
        )
        return _Dispatched(
            tokens=tokens,
            weights=received,
            local_idx=local_idx,
            tokens_per_expert=handle.num_unaligned_recv_tokens_per_expert,
            handle=handle,
        )

    def combine(self, rows: Tensor, dispatched: _Dispatched) -> Tensor:
        num_sms = self.entry.combine_num_sms(dispatched.handle)
        combined: Tensor = self.raw.combine(rows, dispatched.handle, num_sms=num_sms)[0]
        return combined

    def step(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Forward, and backward by a cached dispatch and a combine that carries the weights' gradients."""
        sent = self.dispatch(inputs.x, inputs.topk_idx, inputs.weights)
        combined = self.combine(sent.tokens, sent)
        grad, *_ = self.raw.dispatch(inputs.grad, handle=sent.handle, **self.sizes | {"num_sms": sent.handle.num_sms})
        num_sms = self.entry.combine_num_sms(sent.handle)
        grad_x, grad_weights, _ = self.raw.combine(grad, sent.handle, topk_weights=sent.weights, num_sms=num_sms)
        return combined, grad_x, grad_weights


def raw_subjects(entry: PooledBuffer, num_experts: int, num_topk: int, *, visible: bool) -> list[Subject]:
    """``raw-token`` and ``raw-expert``. Collective over the buffer's group."""
    found = []
    for layout in ("token", "expert"):
        calls = _RawCalls(entry, num_experts, num_topk, expert_layout=layout == "expert")
        found.append(
            Subject(
                name=f"raw-{layout}",
                dispatch=calls.dispatch,
                combine=calls.combine,
                visible=visible,
                per_token=layout == "token",
                step=calls.step,
            )
        )
    return found


def embedded_buffer(like: PooledBuffer) -> PooledBuffer:
    """An embedded buffer of the same sizes and group, known to no pool: the caller closes it."""
    backend = Backend(name="embedded", class_name="EmbeddedElasticBuffer", reason="it is measured beside another")
    built = constructor_of(backend)(like.group, **asdict(like.spec))
    return PooledBuffer(like.group, like.spec, backend, built, num_sms=0, check=False)


def embedded_subject(entry: PooledBuffer, num_experts: int) -> Subject:
    """``embedded``: the expert layout over an :func:`embedded_buffer`, through the same autograd functions as ours."""
    call = Call(entry=entry, num_experts=num_experts, expert_layout=True, expert_alignment=1)

    def dispatch(x: Tensor, topk_idx: Tensor, weights: Tensor) -> _Dispatched:
        tokens, _, received, counts, handle = FusedDispatch.apply(x, topk_idx, weights, call, None)
        return _Dispatched(tokens=tokens, weights=received, local_idx=None, tokens_per_expert=counts, handle=handle)

    def combine(rows: Tensor, dispatched: _Dispatched) -> Tensor:
        handle: DispatchHandle = dispatched.handle
        combined: Tensor = FusedCombine.apply(rows, handle, call)  # type: ignore[no-untyped-call]
        return combined

    return Subject(name="embedded", dispatch=dispatch, combine=combine, visible=True)
