"""What each rank does in the GPU tests of static shapes and CUDA graphs."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_cases import E, H, K, join_nccl
from gpu_faults import Seen, _attempt
from torch import Tensor

DECODE = 128


def _batch(rank: int, step: int, tokens: int = DECODE) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(1000 * step + rank)
    x = torch.randn(tokens, H, device="cuda", generator=draw).bfloat16()
    weights, idx = torch.rand(tokens, E, device="cuda", generator=draw).topk(K)
    empty = step % 5 == 4 and rank == 0  # nothing selected on one rank, now and then
    return (
        x,
        idx.masked_fill(torch.rand(idx.shape, device="cuda", generator=draw) < (1.0 if empty else 0.2), -1),
        weights,
    )


class Layer:
    """Dispatch, grouped matrix product, combine, with static shapes."""

    def __init__(self, rank: int, world: int, layout: Any, alignment: int = 1) -> None:
        from megatron_moe_v2 import FlexTokenDispatcher

        self.dispatcher = FlexTokenDispatcher(
            num_experts=E,
            layout=layout,
            expert_alignment=alignment,
            num_max_tokens_per_rank="decode",
            static_shapes=True,
        )
        draw = torch.Generator("cuda").manual_seed(7)
        every = (torch.randn(E, H, H, device="cuda", generator=draw) / H**0.5).bfloat16()
        self.experts = every.chunk(world)[rank].clone().requires_grad_()

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        sent = self.dispatcher.dispatch(x, idx, weights)
        ends = sent.padded_tokens_per_expert.cumsum(0, dtype=torch.int32)
        return self.dispatcher.combine(F.grouped_mm(sent.tokens, self.experts, offs=ends), sent)

    def train(self, x: Tensor, idx: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        y = self.forward(x, idx, weights)
        return y.detach(), *torch.autograd.grad(y, (x, weights, self.experts), upstream)


def decode(rank: int, world: int, mode: str) -> dict[str, Any]:
    """One capture replayed with 100 inputs beside eager, in each layout, then replay and eager timed."""
    os.environ["MCORE_DEEPEP_V2_MODE"] = mode
    join_nccl(rank, world)
    from megatron_moe_v2 import capture, close_buffers, prepare_for_capture
    from megatron_moe_v2.pool import pool

    seen: dict[str, Any] = {}
    for layout, alignment in (("token", 1), ("expert", 1), ("expert", 128)):
        prepare_for_capture(
            hidden=H,
            num_topk=K,
            num_experts=E,
            layouts=(layout,),  # type: ignore[arg-type]
            expert_alignment=alignment,
            workload={"decode_max_batch": [1, DECODE], "running_requests": DECODE * world, "dp_size": world},
        )
        layer = Layer(rank, world, layout, alignment)
        with torch.inference_mode():
            first = _batch(rank, 0)
            replay = capture(layer.forward, *(part.clone() for part in first))
            equal = []
            for step in range(100):
                batch = _batch(rank, step)
                eager = layer.forward(*batch)
                equal.append(torch.equal(replay(*batch), eager))
            case = f"{layout} {alignment}"
            seen[case] = equal.count(False)
            times = {"replay": replay, "eager": layer.forward}
            for name, function in times.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(100):
                    function(*first)
                torch.cuda.synchronize()
                seen[f"{case}: {name} ms"] = (time.perf_counter() - start) * 10
    seen["constructions"] = pool.constructions
    close_buffers(release_graphs=True)
    dist.destroy_process_group()
    return seen


def training(rank: int, world: int) -> dict[str, Any]:
    """Forward and backward captured and replayed, beside two eager runs."""
    join_nccl(rank, world)
    from megatron_moe_v2 import capture, close_buffers, prepare_for_capture

    seen: dict[str, Any] = {}
    for layout, alignment in (("token", 1), ("expert", 1), ("expert", 128)):
        prepare_for_capture(
            hidden=H,
            num_topk=K,
            num_experts=E,
            layouts=(layout,),  # type: ignore[arg-type]
            expert_alignment=alignment,
        )
        layer = Layer(rank, world, layout, alignment)
        upstream = _batch(rank, 77)[0]
        replay = capture(layer.train, *(part.clone() for part in _batch(rank, 0)), upstream)
        for step in range(5):
            batch = _batch(rank, step)
            eager, again = layer.train(*batch, upstream), layer.train(*batch, upstream)
            got = [part.clone() for part in replay(*batch, upstream)]
            case = f"{layout} {alignment}, step {step}"
            for name, one, other in zip(("output", "tokens", "weights"), got, eager, strict=False):
                seen[f"{case}: {name}"] = torch.equal(one, other)
            scale = float(eager[3].float().norm()) or 1.0
            seen[f"{case}: experts"] = (
                float((got[3].float() - eager[3].float()).norm()) / scale,
                float((again[3].float() - eager[3].float()).norm()) / scale,
            )
    close_buffers(release_graphs=True)
    dist.destroy_process_group()
    return seen


def refusals(rank: int, world: int) -> Seen:
    """What cannot be captured, and what cannot be closed; the process goes on after each."""
    join_nccl(rank, world)
    from megatron_moe_v2 import FlexTokenDispatcher, capture, close_buffers, prepare_for_capture

    seen: Seen = {}
    sizes: dict[str, Any] = {"hidden": H, "num_topk": K, "num_experts": E}

    def graph(layer: Any) -> Any:
        return capture(layer.forward, *_batch(rank, 0))

    def inside(action: Any) -> Any:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            return action()

    prepare_for_capture(**sizes)
    layer = Layer(rank, world, "expert")
    x, idx, weights = _batch(rank, 0)
    waiting = FlexTokenDispatcher(num_experts=E, layout="expert", num_max_tokens_per_rank="decode")
    _attempt(seen, "a dispatch that synchronises", lambda: inside(lambda: waiting.dispatch(x, idx, weights)))
    _attempt(seen, "construction", lambda: inside(lambda: prepare_for_capture(**sizes, num_max_tokens_per_rank=64)))
    with torch.inference_mode():
        replay = graph(layer)
        _attempt(seen, "close while captured", close_buffers)
        _attempt(seen, "replay", lambda: replay(*_batch(rank, 1)))
        _attempt(seen, "other shape", lambda: replay(*_batch(rank, 1, tokens=64)))
        _attempt(seen, "close with release", lambda: close_buffers(release_graphs=True))
        _attempt(seen, "replay after close", lambda: replay(*_batch(rank, 1)))
        prepare_for_capture(**sizes)
        dropped = graph(layer)
        del dropped
        _attempt(seen, "close after the graph is dropped", close_buffers)
        os.environ["MCORE_DEEPEP_V2_DETERMINISTIC"] = "1"
        prepare_for_capture(**sizes)
        layer.forward(*_batch(rank, 0))
        _attempt(seen, "deterministic, expert layout", lambda: inside(lambda: layer.forward(x, idx, weights)))
        token = Layer(rank, world, "token")
        _attempt(seen, "deterministic, token layout", lambda: graph(token)(*_batch(rank, 2)))
        close_buffers(release_graphs=True)
        os.environ["MCORE_DEEPEP_V2_DETERMINISTIC"] = "0"
        os.environ["MCORE_DEEPEP_V2_BACKEND"] = "embedded"
        prepare_for_capture(**sizes)
        _attempt(seen, "embedded", lambda: inside(lambda: layer.forward(x, idx, weights)))
        _attempt(seen, "embedded, eager", lambda: layer.forward(x, idx, weights))
    close_buffers()
    dist.destroy_process_group()
    return seen
