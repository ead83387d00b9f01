"""Dispatch and combine in two halves, so that other work runs between launch and wait, in backward too.

    pending = fused_dispatch(..., wait=False)
    shared = shared_experts(x)                    # beside the transfer
    recv_x, recv_indices, recv_probs, counts, handle = pending.wait()

Each half is an autograd node. A *flight* carries what travels from one to the other; the graph connects them by an
empty tensor alone, the ticket. In backward the wait's node launches the transfer of the gradients and the launch's node
waits for it: what lies between them in the graph runs meanwhile.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .autograd import (
    apply,
    as_delivered,
    keep_combine,
    keep_dispatch,
    launch_backward_of_combine,
    launch_backward_of_dispatch,
    outputs,
)
from .communication import (
    Call,
    DispatchHandle,
    complete,
    first_order,
    launch_combine,
    launch_dispatch,
    opened,
)
from .errors import InputError
from .recompute import RoutingLayout
from .streams import finish, finish_if_any

__all__ = ["Pending", "launch_pending_combine", "launch_pending_dispatch"]

_T = TypeVar("_T")


class _Flight:
    """What is on its way: taken once."""

    def __init__(self) -> None:
        self._cargo: Any = None
        self._event: Any = None

    def load(self, cargo: Any, event: Any) -> None:
        self._cargo, self._event = cargo, event

    def __del__(self) -> None:
        """The event keeps the tensors that the transfer still uses: they go only after the wait."""
        finish_if_any(self._event)

    def unload(self) -> Any:
        """Wait for the transfer and hand over what it brought."""
        cargo, self._cargo = self._cargo, None
        event, self._event = self._event, None
        finish(event)
        return cargo


class Pending(Generic[_T]):
    """A launched dispatch or combine. ``wait()`` must be called, once, on every rank."""

    def __init__(self, operation: str, call: Call, wait: Any, ticket: Tensor, flight: _Flight) -> None:
        self._operation, self._call = operation, call
        self._wait: Any = wait
        self._ticket, self._flight = ticket, flight

    def wait(self) -> _T:
        """Let the current stream wait for the transfer and return its result.

        Raises:
            InputError: a second call.
        """
        if self._wait is None:
            raise InputError(f"wait() of a {self._operation} that was waited for", expected="one call")
        wait, self._wait = self._wait, None
        result: _T = wait(self._ticket, self._flight)
        return result

    def __del__(self) -> None:
        if self._wait is not None:
            self._call.entry.dropped = self._operation


class _DispatchLaunch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        call: Call,
        layout_cache: RoutingLayout | None,
        flight: _Flight,
    ) -> Tensor:
        received, event = launch_dispatch(call, x, topk_idx, topk_weights, layout_cache)
        flight.load((received, ctx.needs_input_grad[2]), event)
        ctx.flight, ctx.weights_dtype = flight, topk_weights.dtype
        return x.new_empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weights = ctx.flight.unload()
        grad_weights = None if grad_weights is None else grad_weights.to(ctx.weights_dtype)
        grad_x = grad_x if ctx.needs_input_grad[0] else None
        return grad_x, None, grad_weights, None, None, None  # x, idx, weights, call, layout_cache, flight


class _DispatchWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: _Flight) -> tuple[Any, ...]:
        received, weights_travel = flight.unload()
        received = complete(received)
        keep_dispatch(ctx, received, weights_travel=weights_travel)
        ctx.flight = flight
        return outputs(received)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_x: Tensor | None, grad_weights: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *grads, event = launch_backward_of_dispatch(ctx, grad_x, grad_weights)
        ctx.flight.load(grads, event)
        return None, None  # ticket, flight


class _CombineLaunch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: DispatchHandle, call: Call, flight: _Flight) -> Tensor:
        combined, _, event = launch_combine(call, x, handle.ep_handle)
        flight.load((combined, handle, call), event)
        ctx.flight = flight
        return x.new_empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return opened(ctx.flight.unload()), None, None, None  # x, handle, call, flight


class _CombineWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: _Flight) -> Tensor:
        combined, handle, call = flight.unload()
        keep_combine(ctx, call, handle)
        ctx.flight = flight
        return combined  # type: ignore[no-any-return]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_x, event = launch_backward_of_combine(ctx, grad)
        ctx.flight.load(grad_x, event)
        return None, None  # ticket, flight


def launch_pending_dispatch(
    call: Call, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, layout_cache: RoutingLayout | None = None
) -> Pending[Any]:
    """Launch a dispatch; its ``wait()`` returns what ``FusedDispatch`` does. Collective over the group."""
    flight = _Flight()
    ticket = apply(_DispatchLaunch, x, topk_idx, topk_weights, call, layout_cache, flight)

    def wait(ticket: Tensor, flight: _Flight) -> tuple[Any, ...]:
        return as_delivered(_DispatchWait.apply(ticket, flight))  # type: ignore[no-untyped-call]

    return Pending("dispatch", call, wait, ticket, flight)


def launch_pending_combine(call: Call, x: Tensor, handle: DispatchHandle) -> Pending[Any]:
    """Launch a combine; its ``wait()`` returns ``(combined, None)``. Collective over the group."""
    flight = _Flight()
    ticket = apply(_CombineLaunch, x, handle, call, flight)

    def wait(ticket: Tensor, flight: _Flight) -> tuple[Tensor, None]:
        return _CombineWait.apply(ticket, flight), None  # type: ignore[no-untyped-call]

    return Pending("combine", call, wait, ticket, flight)
