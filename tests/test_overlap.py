"""Dispatch and combine in two halves: the same numbers, with other work between launch and wait."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
from launch import RankPool
from torch import Tensor

from megatron_moe_v2 import InputError, close_buffers, fused_combine, fused_dispatch
from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer
from megatron_moe_v2.settings import name_of

T, H, K, E = 9, 8, 3, 8


def _inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    weights, idx = torch.rand(T + rank, E, generator=draw, dtype=torch.float64).topk(K)
    x = torch.randn(T + rank, H, generator=draw, dtype=torch.float64)
    return x.requires_grad_(), idx, weights.requires_grad_()


def _run(rank: int, layout: Any, alignment: int, halves: bool) -> list[Tensor]:
    x, idx, weights = _inputs(rank)
    options: dict[str, Any] = {"layout": layout, "expert_alignment": alignment}
    if halves:
        pending = fused_dispatch(x, idx, weights, E, None, True, True, wait=False, **options)
        recv_x, _, recv_w, _, handle = pending.wait()
    else:
        recv_x, _, recv_w, _, handle = fused_dispatch(x, idx, weights, E, None, **options)
    rows = torch.tanh(recv_x) * (recv_w.sum(-1) if layout == "token" else recv_w)[:, None]
    if halves:
        y, _ = fused_combine(rows, None, handle, True, True, wait=False).wait()
    else:
        y, _ = fused_combine(rows, None, handle)
    y.square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


def _same_numbers(rank: int, world: int) -> None:
    for layout, alignment in (("token", 1), ("expert", 1), ("expert", 8)):
        for one, other in zip(_run(rank, layout, alignment, True), _run(rank, layout, alignment, False), strict=True):
            assert torch.equal(one, other), (layout, alignment)
    close_buffers()


def test_both_halves_equal_one_call(ranks2: RankPool) -> None:
    ranks2.run(_same_numbers)


def _completed_by_the_wait(rank: int, world: int) -> None:
    """As DeepEP V2 does for a deterministic receive order: the first wait for a dispatch completes its handle."""
    made, cached = EmbeddedElasticBuffer.dispatch, []

    def dispatch(self: EmbeddedElasticBuffer, *args: Any, **arguments: Any) -> Any:
        received = made(self, *args, **arguments)
        handle, event = received[3:]
        if arguments.get("handle") is None:
            handle.made_by_wait = None
            event.register_hook_after_wait(lambda: setattr(handle, "made_by_wait", torch.ones(1)))
        else:
            cached.append(arguments["handle"].made_by_wait)
        return received

    EmbeddedElasticBuffer.dispatch = dispatch  # type: ignore[method-assign]
    try:
        x, idx, weights = _inputs(rank)
        for wait in (True, False):
            sent: Any = fused_dispatch(x, idx, weights, E, None, True, True, wait=wait)  # type: ignore[call-overload]
            recv_x, *_, handle = sent if wait else sent.wait()
            fused_combine(recv_x, None, handle)[0].sum().backward()
    finally:
        EmbeddedElasticBuffer.dispatch = made  # type: ignore[method-assign]
    assert [torch.is_tensor(one) for one in cached] == [True, True]
    close_buffers()


def test_a_backward_sees_what_the_wait_added_to_the_handle(ranks2: RankPool) -> None:
    ranks2.run(_completed_by_the_wait)


class _Note(torch.autograd.Function):
    """Identity that notes when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.log.append("shared experts")
        return grad, None


def _order(rank: int, world: int) -> list[str]:
    log: list[str] = []
    kept = EmbeddedElasticBuffer.combine, EmbeddedElasticBuffer.dispatch
    x, idx, weights = _inputs(rank)

    def noted(name: str, method: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.append(f"{name} launched")
            *results, event = method(self, *args, **kwargs)
            wait = event.current_stream_wait
            event.current_stream_wait = lambda *a, **k: (log.append(f"{name} waited for"), wait(*a, **k))
            return (*results, event)

        return call

    EmbeddedElasticBuffer.combine = noted("combine", kept[0])  # type: ignore[method-assign]
    EmbeddedElasticBuffer.dispatch = noted("dispatch", kept[1])  # type: ignore[method-assign]
    try:
        pending = fused_dispatch(x, idx, weights, E, None, wait=False)
        shared = _Note.apply(x, log)
        recv_x, _, _, _, handle = pending.wait()
        y, _ = fused_combine(recv_x, None, handle)
        log.clear()
        (y + shared).sum().backward()
    finally:
        EmbeddedElasticBuffer.combine, EmbeddedElasticBuffer.dispatch = kept  # type: ignore[method-assign]
    close_buffers()
    return log


def test_backward_overlaps_too(ranks2: RankPool) -> None:
    for log in ranks2.run(_order):
        assert log == ["dispatch launched", "combine launched", "shared experts", "combine waited for"]


def _dropped(rank: int, world: int) -> str:
    os.environ[name_of("check")] = "1"
    try:
        x, idx, weights = _inputs(rank)
        fused_dispatch(x, idx, weights, E, None, wait=False)
        gc.collect()
        with pytest.raises(InputError) as raised:
            fused_dispatch(x, idx, weights, E, None)
        recv_x, _, _, _, handle = fused_dispatch(x, idx, weights, E, None)
        fused_combine(recv_x, None, handle)
    finally:
        del os.environ[name_of("check")]
        close_buffers()
    return str(raised.value)


def test_a_dropped_pending_is_reported(ranks2: RankPool) -> None:
    for text in ranks2.run(_dropped):
        assert "dispatch" in text
        assert "wait()" in text


def _twice(rank: int, world: int) -> bool:
    x, idx, weights = _inputs(rank)
    pending = fused_dispatch(x, idx, weights, E, None, wait=False)
    received = pending.wait()
    with pytest.raises(InputError):
        pending.wait()
    seen = weakref.ref(received[0])
    del received
    gc.collect()
    gone = seen() is None
    close_buffers()
    return gone


def test_a_second_wait_raises_and_nothing_is_kept(ranks1: RankPool) -> None:
    assert ranks1.run(_twice) == [True]
