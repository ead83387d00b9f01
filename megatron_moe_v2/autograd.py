"""``FusedDispatch`` and ``FusedCombine``: each other's backward, over any buffer of the contract.

Backward of a dispatch is a combine of the gradients of tokens and weights; backward of a combine is a cached dispatch.
Every handle tensor that a backward reads is saved with ``save_for_backward`` by both, and the handle is rebuilt there:
the receive order may differ between calls, and recomputation must bring its own. What travels in a backward is fixed in
forward by ``needs_input_grad``, which must be equal on all ranks; a gradient that is missing travels as zeros. Every
rank must reach the backward of each dispatch and combine, also with zero rows.

Legend: T own tokens, H hidden, K top-k, L local experts, n received tokens, A rows of the expert layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .agreement import posted_failure
from .buffers.contract import flatten_handle, rebuild_handle
from .errors import CommunicationError
from .pool import PooledBuffer
from .streams import finish, launch_arguments, restored_on_error

__all__ = ["Call", "DispatchHandle", "FusedCombine", "FusedDispatch"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a dispatch and its combine are made with, beside tensors.

    Attributes:
        entry: the buffer.
        num_experts: E, over all ranks.
        expert_layout: rows grouped by expert instead of one per token.
        expert_alignment: rows of each expert are padded to a multiple of this.
        async_finish: the kernels run beside the host's next work until their result is waited for, inside the call.
        allocate_on_comm_stream: results belong to the communication stream.
    """

    entry: PooledBuffer
    num_experts: int
    expert_layout: bool
    expert_alignment: int
    async_finish: bool
    allocate_on_comm_stream: bool

    @property
    def zero_padding(self) -> bool:
        return self.expert_layout and self.expert_alignment > 1

    def streams(self) -> dict[str, Any]:
        return launch_arguments(
            self.entry.buffer, async_finish=self.async_finish, allocate_on_comm_stream=self.allocate_on_comm_stream
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchHandle:
    """What a dispatch leaves for its combine. Self-contained: it outlives later dispatches.

    Attributes:
        call: how the dispatch was made.
        ep_handle: the backend's own ``EPHandle``.
        num_rows: rows that the combine takes: n, or A in the expert layout.
        padded_tokens_per_expert: int64 ``[L]`` on the CPU, rows of each expert with padding, for a grouped GEMM.
    """

    call: Call
    ep_handle: Any
    num_rows: int
    padded_tokens_per_expert: Tensor


@contextmanager
def _communication(call: Call) -> Iterator[None]:
    """Around a buffer call: no autocast inside, streams restored, and a failed collective remembered."""
    with restored_on_error(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        try:
            yield
        except CommunicationError as error:
            call.entry.broken = True
            posted = posted_failure(call.entry.group)
            raise posted or error from error


def _weights_dtype(tokens: torch.dtype) -> torch.dtype:
    return torch.float64 if tokens == torch.float64 else torch.float32


class FusedDispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, call: Call
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, DispatchHandle]:
        """Collective over the group.

        Args:
            x: ``[T, H]``, any strides.
            topk_idx: integer ``[T, K]``, global expert, negative for none.
            topk_weights: floating ``[T, K]``, any dtype; travels as float32 (float64 with float64 tokens).

        Returns:
            ``(recv_x, recv_topk_idx, recv_topk_weights, tokens_per_expert, handle)``; ``x`` and the weights have
            gradients, the indices and counts have none.
        """
        with _communication(call):
            recv_x, recv_idx, recv_weights, ep_handle, event = call.entry.buffer.dispatch(
                x.contiguous(),
                topk_idx=topk_idx.long().contiguous(),
                topk_weights=topk_weights.to(_weights_dtype(x.dtype)).contiguous(),
                num_experts=call.num_experts,
                num_max_tokens_per_rank=call.entry.spec.num_max_tokens_per_rank,
                expert_alignment=call.expert_alignment,
                num_sms=call.entry.num_sms_for(call.num_experts, topk_idx.shape[1]),
                do_expand=call.expert_layout,
                do_zero_padding=call.zero_padding,
                **call.streams(),
            )
            finish(event)
        assert recv_weights is not None
        padded = torch.tensor(ep_handle.num_recv_tokens_per_expert_list, dtype=torch.int64)
        counts = ep_handle.num_unaligned_recv_tokens_per_expert.clone() if call.zero_padding else padded.clone()
        handle = DispatchHandle(
            call=call, ep_handle=ep_handle, num_rows=recv_x.shape[0], padded_tokens_per_expert=padded
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(one for one in (recv_idx, counts) if one is not None))
        tensors, ctx.skeleton = flatten_handle(ep_handle)
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.weights_dtype, ctx.weights_travel = call, topk_weights.dtype, ctx.needs_input_grad[2]
        ctx.received = {"x": _like(recv_x), "weights": _like(recv_weights)}
        return recv_x, recv_idx, recv_weights, counts, handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_x: Tensor | None, _idx: None, grad_weights: Tensor | None, _counts: None, _handle: None
    ) -> tuple[Tensor | None, ...]:
        """Collective over the group: combine of both gradients."""
        call: Call = ctx.call
        handle = rebuild_handle(ctx.skeleton, ctx.saved_tensors)
        with _communication(call):
            summed_x, summed_weights, event = call.entry.buffer.combine(
                _dense(grad_x, ctx.received["x"]),
                handle,
                topk_weights=_dense(grad_weights, ctx.received["weights"]) if ctx.weights_travel else None,
                num_sms=handle.num_sms,
                **call.streams(),
            )
            finish(event)
        grad_topk_weights = summed_weights.to(ctx.weights_dtype) if summed_weights is not None else None
        return summed_x if ctx.needs_input_grad[0] else None, None, grad_topk_weights, None  # x, idx, weights, call


class FusedCombine(torch.autograd.Function):
    """Rows back to their tokens, summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: DispatchHandle, call: Call) -> Tensor:
        """Collective over the group.

        Args:
            x: ``[handle.num_rows, H]``; padding rows are ignored.
            handle: of the dispatch.
            call: the dispatch's, with this call's own stream flags.

        Returns:
            ``[T, H]``, complete over the group.
        """
        with _communication(call):
            combined, _, event = call.entry.buffer.combine(
                x.contiguous(), handle.ep_handle, num_sms=handle.ep_handle.num_sms, **call.streams()
            )
            finish(event)
        tensors, ctx.skeleton = flatten_handle(handle.ep_handle)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.combined = call, _like(combined)
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Collective over the group: cached dispatch of the gradient, padding rows zero."""
        call: Call = ctx.call
        handle = rebuild_handle(ctx.skeleton, ctx.saved_tensors)
        with _communication(call):
            grad_x, _, _, _, event = call.entry.buffer.dispatch(
                _dense(grad, ctx.combined),
                handle=handle,
                num_experts=handle.num_experts,
                num_max_tokens_per_rank=handle.num_max_tokens_per_rank,
                expert_alignment=handle.expert_alignment,
                num_sms=handle.num_sms,
                do_expand=handle.do_expand,
                do_zero_padding=call.zero_padding,
                **call.streams(),
            )
            finish(event)
        return grad_x, None, None  # x, handle, call


Like = tuple[torch.Size, torch.dtype, torch.device]


def _like(tensor: Tensor) -> Like:
    """What zeros in a tensor's place need, without the tensor."""
    return tensor.shape, tensor.dtype, tensor.device


def _dense(grad: Tensor | None, like: Like) -> Tensor:
    """The gradient as a contiguous tensor, zeros where there is none."""
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad.to(dtype).contiguous()
