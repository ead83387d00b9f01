"""``FusedDispatch`` and ``FusedCombine``: each other's backward, over any buffer of the contract.

Backward of a dispatch is a combine of the gradients of tokens and weights; backward of a combine is a cached dispatch.
Every handle tensor that a backward reads is saved with ``save_for_backward`` by both, and the handle is rebuilt there:
the receive order may differ between calls, and recomputation must bring its own. What travels in a backward is fixed in
forward by ``needs_input_grad``, which must be equal on all ranks; a gradient that is missing travels as zeros. Every
rank must reach the backward of each dispatch and combine, also with zero rows.

Legend: T own tokens, H hidden, K top-k, n received tokens, A rows of the expert layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .buffers.contract import flatten_handle, rebuild_handle
from .communication import (
    Call,
    DispatchHandle,
    Received,
    complete,
    first_order,
    launch_cached_dispatch,
    launch_combine,
    launch_dispatch,
    opened,
)
from .errors import InputError
from .fp8 import QuantizedRows
from .recompute import RoutingLayout
from .streams import finish

__all__ = [
    "FusedCombine",
    "FusedDispatch",
    "apply",
    "as_delivered",
    "keep_combine",
    "keep_dispatch",
    "launch_backward_of_combine",
    "launch_backward_of_dispatch",
    "outputs",
]


_ROWS, _WEIGHTS = 0, 1
"""Places of what has a gradient among a function's outputs."""


def outputs(received: Received) -> tuple[Any, ...]:
    """What a dispatch's function returns to autograd: what has a gradient, and all as a plain object.

    FP8 rows have none; their anchor stands for them.
    """
    if isinstance(received.x, Tensor):
        return received.x, received.topk_weights, received
    return received.x.anchor, received.topk_weights, received._replace(x=replace(received.x, anchor=None))


def as_delivered(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a dispatch delivers, from what autograd returned."""
    x, topk_weights, received = returned
    if isinstance(received.x, QuantizedRows):
        x = replace(received.x, anchor=x)
    return x, received.topk_idx, topk_weights, received.tokens_per_expert, received.handle


def keep_dispatch(ctx: Any, received: Received, *, weights_travel: bool) -> None:
    """What the backward of a dispatch needs: the handle's tensors saved, all else plain."""
    ctx.set_materialize_grads(False)
    handle = received.handle
    tensors, ctx.skeleton = handle.flat = flatten_handle(handle.ep_handle)
    ctx.save_for_backward(*tensors)
    ctx.call, ctx.weights_travel = handle.call, weights_travel


def _gradient(ctx: Any, output: int, grad: Tensor | None) -> Tensor:
    """An output's gradient, contiguous, or zeros; where there is no memory for it, the other ranks hear of it."""
    try:
        if grad is not None:
            return grad.contiguous()
        wanted = ctx._input_metadata[output]  # torch.autograd.graph.Node's: what came out of the forward
        return torch.zeros(wanted.shape, dtype=wanted.dtype, device=wanted.device)
    except Exception as error:  # whatever it is, they are waiting
        call: Call = ctx.call
        call.entry.fail("backward", error)


def _kept_handle(ctx: Any) -> Any:
    """The backend's handle, as the forward kept it.

    Raises:
        BufferClosedError: its buffer was closed, or the group destroyed.
        RuntimeError: PyTorch's own, where the graph was freed.
    """
    entry = ctx.call.entry
    entry.require_usable()
    try:
        return rebuild_handle(ctx.skeleton, ctx.saved_tensors)
    except Exception as error:  # whatever it is, the other ranks are waiting
        entry.fail("backward", error)


def launch_backward_of_dispatch(
    ctx: Any, grad_x: Tensor | None, grad_weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Any]:
    """Combine of both gradients, and its event. Collective over the group."""
    handle = _kept_handle(ctx)
    rows = _gradient(ctx, _ROWS, grad_x)
    weights = _gradient(ctx, _WEIGHTS, grad_weights) if ctx.weights_travel else None
    return launch_combine(ctx.call, rows, handle, weights, "dispatch backward")


def keep_combine(ctx: Any, call: Call, handle: DispatchHandle) -> None:
    """What the backward of a combine needs, as :func:`keep_dispatch`."""
    ctx.set_materialize_grads(False)
    assert handle.flat is not None
    tensors, ctx.skeleton = handle.flat
    ctx.save_for_backward(*tensors)
    ctx.call = call


def launch_backward_of_combine(ctx: Any, grad: Tensor | None) -> tuple[Tensor | QuantizedRows, Any]:
    """Cached dispatch of the gradient, padding rows zero, and its event. Collective over the group."""
    handle = _kept_handle(ctx)
    return launch_cached_dispatch(ctx.call, _gradient(ctx, _ROWS, grad), handle)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, one of them a :class:`Call`, without what that does for ``torch.func``.

    Raises:
        InputError: on every rank, inside one of its transforms.
    """
    if torch._C._are_functorch_transforms_active():
        (call,) = (one for one in args if isinstance(one, Call))
        error = InputError("dispatch or combine in a transform of torch.func", fix="Use torch.autograd.")
        call.entry.fail("torch.func", error)
    return _plain_apply(function)(*args)


@functools.cache
def _plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


class FusedDispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Collective over the group. Arguments as :meth:`forward` without ``ctx``.

        Returns:
            ``(recv_x, recv_topk_idx, recv_topk_weights, tokens_per_expert, handle)``; ``x`` and the weights have
            gradients, the indices and counts have none.
        """
        return as_delivered(super().apply(*args))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, call: Call, layout_cache: RoutingLayout | None
    ) -> tuple[Any, ...]:
        """Collective over the group. Arguments as :func:`launch_dispatch`; returns :func:`outputs`."""
        received, event = launch_dispatch(call, x, topk_idx, topk_weights, layout_cache)
        finish(event)
        received = complete(received)
        keep_dispatch(ctx, received, weights_travel=ctx.needs_input_grad[2])
        ctx.weights_dtype = topk_weights.dtype
        return outputs(received)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_x: Tensor | None, grad_weights: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Collective over the group: combine of both gradients."""
        summed_x, summed_weights, event = launch_backward_of_dispatch(ctx, grad_x, grad_weights)
        finish(event)
        grad_topk_weights = summed_weights.to(ctx.weights_dtype) if summed_weights is not None else None
        grad_of_x = summed_x if ctx.needs_input_grad[0] else None
        return grad_of_x, None, grad_topk_weights, None, None  # x, idx, weights, call, layout_cache


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
        combined, _, event = launch_combine(call, x, handle.ep_handle)
        finish(event)
        keep_combine(ctx, call, handle)
        return combined

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Collective over the group: cached dispatch of the gradient, padding rows zero."""
        grad_x, event = launch_backward_of_combine(ctx, grad)
        finish(event)
        return opened(grad_x), None, None  # x, handle, call
