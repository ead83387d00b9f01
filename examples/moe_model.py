"""A decoder-only mixture-of-experts language model in the style of Qwen3-30B-A3B.

RMSNorm before every sub-layer, grouped-query attention with rotary positions and RMSNorm on queries and keys, a
softmax router that keeps the top-k and renormalises them, SwiGLU experts, no biases. Each rank holds
``num_experts / R`` experts of every block; :class:`megatron_moe_v2.FlexTokenDispatcher` carries tokens to their
experts and back. Everything else is replicated.

Every weight is drawn from a generator of its own name, and each expert from (seed, block, expert number), so a model
has the same weights at any rank count.

Legend: B sequences, S positions, T = B*S tokens, H hidden, E experts, L local experts, K top-k, F expert hidden,
P rows after dispatch, R ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from expert_gemm import grouped_linear
from fp8_experts import fp8_grouped_linear
from layers import Embedding, Linear, RMSNorm
from torch import Tensor, nn

from megatron_moe_v2 import FlexTokenDispatcher
from megatron_moe_v2.fp8 import QuantizedRows, ScaleFormat


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model; the defaults of ``head_dim`` and the like are Qwen3-30B-A3B's."""

    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    expert_ffn: int
    head_dim: int = 128
    vocab: int = 256
    rope_theta: float = 1e6
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: got {self.heads}, expected a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, expected an even number (rotary positions turn pairs)")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k: got {self.top_k}, expected 1 to experts ({self.experts})")


@dataclass(frozen=True, kw_only=True)
class RouterStats:
    """What this rank's tokens chose, for the load-balancing loss and the load plot.

    Attributes:
        selections: float32 ``[blocks, E]``, how often each expert was chosen; no gradient.
        prob_sums: float32 ``[blocks, E]``, router probabilities summed over tokens; carries the gradient.
    """

    selections: Tensor
    prob_sums: Tensor


def _draw(weight: Tensor, std: float, *key: object) -> None:
    """Fill ``weight`` from a normal distribution with a generator that depends on ``key`` alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest, "big"))
    with torch.no_grad():
        weight.normal_(0.0, std, generator=generator)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and QK-norm: ``[B, S, H]`` to ``[B, S, H]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = Linear(config.hidden, query + 2 * key)
        self.out = Linear(query, config.hidden)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        qkv = self.qkv(x).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        q = _rotate(self.q_norm(q), cos, sin).to(v.dtype)
        k = _rotate(self.k_norm(k), cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.heads != c.kv_heads)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (first half, second half) of the last axis by the angle of their position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Router(nn.Module):
    """Softmax over all experts in float32, then top-k, renormalised to sum to 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate = Linear(config.hidden, config.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Route ``x [B, S, H]``.

        Returns:
            ``topk_idx [B, S, K]`` int64, ``topk_weights [B, S, K]`` float32, and this block's two rows of
            :class:`RouterStats`.
        """
        probs = self.gate(x.float()).softmax(dim=-1)
        top, topk_idx = probs.topk(self.top_k, dim=-1)
        counts = probs.new_zeros(probs.shape[-1])
        selections = counts.scatter_add_(0, topk_idx.flatten(), torch.ones_like(top).flatten())
        return topk_idx, top / top.sum(dim=-1, keepdim=True), selections, probs.sum(dim=(0, 1))


class Experts(nn.Module):
    """This rank's SwiGLU experts, stacked: ``gate_up [L, H, 2F]`` and ``down [L, F, H]``."""

    def __init__(self, config: ModelConfig, num_local: int, first: int) -> None:
        super().__init__()
        self.first = first
        self.gate_up = nn.Parameter(torch.empty(num_local, config.hidden, 2 * config.expert_ffn))
        self.down = nn.Parameter(torch.empty(num_local, config.expert_ffn, config.hidden))

    def forward(self, rows: Tensor | QuantizedRows, rows_per_expert: Tensor) -> Tensor:
        """``rows [P, H]`` grouped by expert, ``rows_per_expert`` CPU int64 ``[L]`` summing to P; ``[P, H]``."""
        if isinstance(rows, QuantizedRows):
            gate_up = fp8_grouped_linear(rows, self.gate_up, rows_per_expert)
        else:
            gate_up = grouped_linear(rows, self.gate_up, rows_per_expert)
        gate, up = gate_up.chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.down, rows_per_expert)


class MoE(nn.Module):
    """Router, dispatch, experts, combine: ``[B, S, H]`` to ``[B, S, H]``."""

    def __init__(self, config: ModelConfig, dispatcher: FlexTokenDispatcher, first_expert: int) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config, dispatcher.num_local_experts, first_expert)
        self.dispatcher = dispatcher

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        topk_idx, topk_weights, selections, prob_sums = self.router(x)
        dispatched = self.dispatcher.dispatch(x, topk_idx, topk_weights)
        rows = self.experts(dispatched.tokens, dispatched.padded_tokens_per_expert)
        return self.dispatcher.combine(rows, dispatched), selections, prob_sums


class Block(nn.Module):
    """Pre-norm attention and mixture of experts on a float32 residual stream."""

    def __init__(self, config: ModelConfig, dispatcher: FlexTokenDispatcher, first_expert: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.hidden, config.norm_eps)
        self.moe = MoE(config, dispatcher, first_expert)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x).to(dtype), cos, sin)
        y, selections, prob_sums = self.moe(self.moe_norm(x).to(dtype))
        return x + y, selections, prob_sums


class MoELanguageModel(nn.Module):
    """The model; parameters are float32, ``compute_dtype`` is what matrix products and the dispatch run in.

    Args:
        config: sizes.
        rank: this rank in the expert-parallel group, which owns experts ``[rank * L, (rank + 1) * L)``.
        seed: of the initial weights.
        compute_dtype: float32 or bfloat16.
        device: where parameters live.
        layout, expert_alignment, fp8, dequantize, fp8_backward: of :class:`FlexTokenDispatcher`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rank: int,
        seed: int,
        compute_dtype: torch.dtype,
        device: torch.device,
        layout: Literal["token", "expert"] = "token",
        expert_alignment: int = 1,
        fp8: ScaleFormat | None = None,
        dequantize: bool = True,
        fp8_backward: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.seed = config, compute_dtype, seed
        with torch.device(device):
            self.embedding = Embedding(config.vocab, config.hidden)
            blocks = []
            for number in range(config.blocks):
                dispatcher = FlexTokenDispatcher(
                    num_experts=config.experts,
                    layout=layout,
                    expert_alignment=expert_alignment,
                    fp8=fp8,
                    dequantize=dequantize,
                    fp8_backward=fp8_backward,
                    name=f"block {number}",
                )
                blocks.append(Block(config, dispatcher, rank * dispatcher.num_local_experts))
            self.blocks = nn.ModuleList(blocks)
            self.norm = RMSNorm(config.hidden, config.norm_eps)
            self.head = Linear(config.hidden, config.vocab)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        """Scales by fan-in; the first guess is near uniform, and the first router sees mostly each token's own byte."""
        residual_scale = 1.0 / math.sqrt(2 * self.config.blocks)
        gains = {"embedding": 0.5, "qkv": 1.0, "out": residual_scale, "gate": 0.25, "head": 0.1}
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                nn.init.ones_(weight)
            elif weight.dim() == 2:
                layer = name.split(".")[-2]
                fan_in = 1 if layer == "embedding" else weight.shape[1]
                _draw(weight, gains[layer] / math.sqrt(fan_in), seed, name)
        for number, experts in enumerate(self._expert_modules()):
            for local in range(experts.gate_up.shape[0]):
                expert = experts.first + local
                for kind, stack, gain in (("gate_up", experts.gate_up, 1.0), ("down", experts.down, residual_scale)):
                    _draw(stack[local], gain / math.sqrt(stack.shape[1]), seed, number, expert, kind)

    def _expert_modules(self) -> Iterator[Experts]:
        return (module for module in self.modules() if isinstance(module, Experts))

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that live on one rank each; all others are replicated."""
        for module in self._expert_modules():
            yield from module.parameters()

    def forward(self, tokens: Tensor) -> tuple[Tensor, RouterStats]:
        """``tokens [B, S]`` int64 to ``logits [B, S, vocab]`` and the routing statistics; B may be 0."""
        cos, sin = self._rotary(tokens.shape[1], tokens.device)
        x = self.embedding(tokens)
        selections, prob_sums = [], []
        for block in self.blocks:
            x, chosen, probs = block(x, cos, sin, self.compute_dtype)
            selections.append(chosen)
            prob_sums.append(probs)
        logits = self.head(self.norm(x).to(self.compute_dtype))
        return logits, RouterStats(selections=torch.stack(selections), prob_sums=torch.stack(prob_sums))

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """``cos, sin [S, head_dim / 2]`` float32."""
        half = torch.arange(0, self.config.head_dim, 2, device=device, dtype=torch.float32)
        frequencies = self.config.rope_theta ** (-half / self.config.head_dim)
        angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
        return angles.cos(), angles.sin()
