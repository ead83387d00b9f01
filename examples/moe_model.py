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

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from expert_gemm import grouped_linear, runs_native
from fp8_experts import fp8_grouped_linear
from layers import Embedding, Linear, RMSNorm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_moe_v2 import FlexTokenDispatcher, RoutingLayout
from megatron_moe_v2.fp8 import QuantizedRows, ScaleFormat

Choose = Callable[[int, Tensor], Tensor]
"""``(block, topk_idx [..., K])`` of all tokens, those of a sequence side by side, to the experts to take instead."""


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


class Decoding:
    """Keys and values of B sequences of up to S positions, which grow by a token of each sequence at a time.

    All shapes are fixed and ``position`` (int64 ``[1]``, where the next tokens stand) is a tensor, so a step can be
    captured in a CUDA graph.
    """

    def __init__(
        self, config: ModelConfig, *, sequences: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.blocks, 2, sequences, config.kv_heads, positions, config.head_dim)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._kept = torch.zeros(shape, dtype=dtype, device=device)
        self._places = torch.arange(positions, device=device)

    def extend(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add ``[B, heads, 1, D]`` each; all keys and values ``[B, heads, S, D]``, and a mask ``[1, S]`` of what is."""
        keys, values = self._kept[block].unbind(0)
        keys.index_copy_(2, self.position, key)
        values.index_copy_(2, self.position, value)
        return keys, values, (self._places <= self.position)[None]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and QK-norm: ``[B, S, H]`` or ``[1, B * S, H]``, kept."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.config, self.number = config, number
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = Linear(config.hidden, query + 2 * key)
        self.out = Linear(query, config.hidden)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, decoding: Decoding | None = None) -> Tensor:
        c = self.config
        qkv = self.qkv(x).reshape(-1, len(cos), c.heads + 2 * c.kv_heads, c.head_dim).transpose(1, 2)
        q, k, v = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        q = _rotate(self.q_norm(q), cos, sin).to(v.dtype)
        k = _rotate(self.k_norm(k), cos, sin).to(v.dtype)
        mask = None
        if decoding is not None:
            k, v, mask = decoding.extend(self.number, k, v)
        gqa = c.heads != c.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(*x.shape[:2], c.heads * c.head_dim))
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

    def forward(
        self, x: Tensor, choose: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Route ``x [B, S, H]``, to the experts that ``choose`` makes of the router's own.

        Returns:
            ``topk_idx [B, S, K]`` int64, ``topk_weights [B, S, K]`` float32, and this block's two rows of
            :class:`RouterStats`.
        """
        probs = self.gate(x.float()).softmax(dim=-1)
        topk_idx = probs.topk(self.top_k, dim=-1).indices
        if choose is not None:
            topk_idx = choose(topk_idx)
        top = probs.gather(-1, topk_idx)
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
        """``rows [P, H]`` grouped by expert, ``rows_per_expert`` ``[L]`` as :func:`grouped_linear`; ``[P, H]``."""
        if isinstance(rows, QuantizedRows):
            gate_up = fp8_grouped_linear(rows, self.gate_up, rows_per_expert)
        else:
            gate_up = grouped_linear(rows, self.gate_up, rows_per_expert)
        gate, up = gate_up.chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.down, rows_per_expert)


class MoE(nn.Module):
    """Router, dispatch, experts, combine: ``[B, S, H]`` to ``[B, S, H]``; a decoder dispatches while decoding."""

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        dispatcher: FlexTokenDispatcher,
        decoder: FlexTokenDispatcher,
        first: int,
    ) -> None:
        super().__init__()
        self.number = number
        self.router = Router(config)
        self.experts = Experts(config, dispatcher.num_local_experts, first)
        self.dispatcher, self.decoder = dispatcher, decoder

    def forward(
        self, x: Tensor, decode: bool = False, choose: Choose | None = None, layout: RoutingLayout | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        chosen = None if choose is None else functools.partial(choose, self.number)
        topk_idx, topk_weights, selections, prob_sums = self.router(x, chosen)
        dispatcher = self.decoder if decode else self.dispatcher
        dispatched = dispatcher.dispatch(x, topk_idx, topk_weights, layout_cache=layout)
        rows = self.experts(dispatched.tokens, dispatched.padded_tokens_per_expert)
        return dispatcher.combine(rows, dispatched), selections, prob_sums


class Block(nn.Module):
    """Pre-norm attention and mixture of experts on a float32 residual stream."""

    def __init__(self, config: ModelConfig, number: int, moe: MoE) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config, number)
        self.moe_norm = RMSNorm(config.hidden, config.norm_eps)
        self.moe = moe

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        dtype: torch.dtype,
        decoding: Decoding | None = None,
        choose: Choose | None = None,
        layout: RoutingLayout | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x).to(dtype), cos, sin, decoding)
        y, selections, prob_sums = self.moe(self.moe_norm(x).to(dtype), decoding is not None, choose, layout)
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
        decode_layout: the same while decoding, with static shapes under the ceiling for decoding.
        recompute: keep nothing of a block for backward but its input and the layout of its dispatch.
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
        decode_layout: Literal["token", "expert"] = "expert",
        recompute: bool = False,
        fp8: ScaleFormat | None = None,
        dequantize: bool = True,
        fp8_backward: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.seed, self.recompute = config, compute_dtype, seed, recompute
        with torch.device(device):
            self.embedding = Embedding(config.vocab, config.hidden)
            blocks = []
            for number in range(config.blocks):
                name, experts = f"block {number}", config.experts
                dispatcher = FlexTokenDispatcher(
                    num_experts=experts,
                    layout=layout,
                    expert_alignment=expert_alignment,
                    fp8=fp8,
                    dequantize=dequantize,
                    fp8_backward=fp8_backward,
                    name=name,
                )
                decoder = FlexTokenDispatcher(
                    num_experts=experts,
                    layout=decode_layout,
                    static_shapes=True,
                    num_max_tokens_per_rank="decode",
                    name=f"{name}, decoding",
                )
                moe = MoE(config, number, dispatcher, decoder, rank * dispatcher.num_local_experts)
                blocks.append(Block(config, number, moe))
            self.blocks = nn.ModuleList(blocks)
            self.norm = RMSNorm(config.hidden, config.norm_eps)
            self.head = Linear(config.hidden, config.vocab)
        self._initialise(seed)
        runs_native(device.type, compute_dtype)

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

    def forward(
        self,
        tokens: Tensor,
        *,
        one_window: bool = False,
        decoding: Decoding | None = None,
        choose: Choose | None = None,
    ) -> tuple[Tensor, RouterStats]:
        """``tokens [B, S]`` int64 to ``logits [B, S, vocab]`` and the routing statistics; B may be 0.

        Args:
            one_window: sum weight gradients over all sequences at once: cheaper where they are short, but their last
                bits then depend on the number of ranks, see layers.py.
            decoding: what came before; ``tokens [B, 1]`` are the next of each sequence.
            choose: takes other experts than the router would.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device) if decoding is None else decoding.position
        cos, sin = self._rotary(positions)
        x = self.embedding(tokens.reshape(1, -1) if one_window or decoding is not None else tokens)
        selections, prob_sums = [], []
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                given = (x, cos, sin, self.compute_dtype, decoding, choose, RoutingLayout())
                x, chosen, probs = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                x, chosen, probs = block(x, cos, sin, self.compute_dtype, decoding, choose)
            selections.append(chosen)
            prob_sums.append(probs)
        logits = self.head(self.norm(x).to(self.compute_dtype)).view(*tokens.shape, self.config.vocab)
        return logits, RouterStats(selections=torch.stack(selections), prob_sums=torch.stack(prob_sums))

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``cos, sin [S, head_dim / 2]`` float32."""
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device, dtype=torch.float32)
        frequencies = self.config.rope_theta ** (-half / self.config.head_dim)
        angles = torch.outer(positions.float(), frequencies)
        return angles.cos(), angles.sin()
