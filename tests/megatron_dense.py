"""The oracle: a Megatron MoE layer, computed densely on one rank from the weights of all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def dense_output(layer: Any, x: Tensor, *, tensor: int) -> Tensor:
    """What ``layer`` must give for this rank's tokens ``[S, B, H]``. Collective over the world.

    Experts are gated (SiLU), the top 2 of a softmax. Groups of ``tensor`` neighbours are expert-parallel to each other,
    and within a group the hidden units of each expert and of the shared one are sharded.
    """
    weights: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(weights, {name: one.detach() for name, one in layer.named_parameters()})
    tokens = x.detach().reshape(-1, x.shape[-1]).double()
    logits = tokens @ weights[0]["router.weight"].double().T
    chosen, experts = logits.topk(2, dim=1)
    probs = torch.softmax(chosen, dim=1)

    local = sum(1 for name in weights[0] if name.startswith("experts.") and name.endswith("linear_fc1.weight"))
    total = torch.zeros_like(tokens)
    for expert in range(local * (dist.get_world_size() // tensor)):
        first = expert // local * tensor
        prefix = f"experts.local_experts.{expert % local}."
        weight = torch.where(experts == expert, probs, 0.0).sum(1, keepdim=True)
        total += weight * _mlp(tokens, weights[first : first + tensor], prefix)
    if any(name.startswith("shared_experts.") for name in weights[0]):
        first = dist.get_rank() // tensor * tensor
        total += _mlp(tokens, weights[first : first + tensor], "shared_experts.")
    return total.reshape(x.shape)


def _mlp(tokens: Tensor, shards: list[dict[str, Tensor]], prefix: str) -> Tensor:
    """Sum over the shards of the hidden units."""
    total = torch.zeros_like(tokens)
    for shard in shards:
        gate, up = (tokens @ shard[f"{prefix}linear_fc1.weight"].double().T).chunk(2, dim=1)
        total += (torch.nn.functional.silu(gate) * up) @ shard[f"{prefix}linear_fc2.weight"].double().T
    return total
