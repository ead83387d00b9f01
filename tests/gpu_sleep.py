"""Training and decoding in turn, with one phase's buffer at a time or with both kept, over the real DeepEP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import E, H, K, M, join_nccl
from torch import Tensor

DECODE = 128


def _layer(x: Tensor, router: Tensor, experts: Tensor, dispatcher: Any) -> Tensor:
    weights, idx = (x.float() @ router).softmax(-1).topk(K)
    sent = dispatcher.dispatch(x, idx, weights)
    ends = sent.padded_tokens_per_expert.cumsum(0).to(x.device, torch.int32)
    rows = torch.nn.functional.grouped_mm(sent.tokens, experts.bfloat16(), offs=ends)
    return x + dispatcher.combine(rows, sent)  # type: ignore[no-any-return]


def losses(rank: int, world: int, cycles: int, sleeps: bool) -> dict[str, list[float]]:
    """Loss of each training step, and free bytes of the device after each cycle."""
    join_nccl(rank, world)
    from megatron_moe_v2 import FlexTokenDispatcher, close_buffers

    draw = torch.Generator("cuda").manual_seed(0)
    router = (torch.randn(H, E, device="cuda", generator=draw) / H**0.5).requires_grad_()
    experts = torch.randn(E, H, H, device="cuda", generator=draw)[rank * E // world : (rank + 1) * E // world]
    experts = (experts / H**0.5).contiguous().requires_grad_()
    own = torch.Generator("cuda").manual_seed(1 + rank)
    x = torch.randn(M, H, device="cuda", generator=own).bfloat16()
    target = torch.randn(M, H, device="cuda", generator=own)
    training = FlexTokenDispatcher(num_experts=E, layout="expert")
    decoding = FlexTokenDispatcher(num_experts=E, layout="token", num_max_tokens_per_rank="decode")
    optimizer = torch.optim.Adam([router, experts], lr=3e-3)
    found: dict[str, list[float]] = {"losses": [], "free": []}
    for _ in range(cycles):
        with torch.no_grad():
            _layer(x[:DECODE], router, experts, decoding)
        if sleeps:
            close_buffers()
        optimizer.zero_grad()
        loss = (_layer(x, router, experts, training).float() - target).square().mean()
        loss.backward()
        dist.all_reduce(router.grad)
        optimizer.step()
        if sleeps:
            close_buffers()
        found["losses"].append(float(loss.detach()))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()  # the other ranks' memory is on the same device
        found["free"].append(float(torch.cuda.mem_get_info()[0]))
        dist.barrier()
    close_buffers()
    dist.destroy_process_group()
    return found
