"""A round trip of which every rank knows beforehand, without asking any other, what must arrive where.

What token ``n`` of all tokens holds, which experts it selects and with which weights are functions of ``n`` alone. So
the expectation shares nothing with the path under test: not the buffer, not the process group. All values are small
integers that float32 and bfloat16 hold exactly, sums over 32 selections included.

Legend: T tokens of a rank, H hidden, K top-k, E experts, L local experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_moe_v2 import FlexTokenDispatcher

LAYOUTS: tuple[Literal["token", "expert"], ...] = ("token", "expert")
BASE, DIGITS = 8, 8
"""A row begins with its token's number: 8 digits of base 8, for 16 million tokens."""
LEAST_HIDDEN = DIGITS


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is sent: ``tokens`` of each rank, ``hidden``, ``experts`` over all ranks, ``topk``."""

    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one rank and layout: experts whose rows all arrived exactly, of how many, and wrong values after them."""

    layout: str
    exact: int
    experts: int
    wrong_sums: int
    wrong_gradients: int


def rows(numbers: Tensor, sizes: Sizes, salt: int = 0) -> Tensor:
    """``[n, H]`` of tokens ``numbers`` int64 ``[n]``: integers of at most 8 in size."""
    columns = torch.arange(sizes.hidden, device=numbers.device)
    mixed = numbers[:, None] * 2654435761 + columns * 40503 + salt * 97 + numbers[:, None] * columns * 69069
    values = (mixed >> 7) % 17 - 8
    powers = BASE ** torch.arange(DIGITS, device=numbers.device)
    values[:, :DIGITS] = numbers[:, None] // powers % BASE
    return values.to(sizes.dtype)


def selections(numbers: Tensor, sizes: Sizes) -> Tensor:
    """``[n, K]`` distinct experts: a start and a stride that depend on the token."""
    start = (numbers * 2654435761 >> 5) % sizes.experts
    most = max((sizes.experts - 1) // max(sizes.topk - 1, 1), 1)  # K - 1 strides stay below E, so none comes twice
    stride = (numbers * 40503 >> 3) % most + 1
    return (start[:, None] + stride[:, None] * torch.arange(sizes.topk, device=numbers.device)) % sizes.experts


def weights(numbers: Tensor, sizes: Sizes) -> Tensor:
    """float32 ``[n, K]``."""
    lanes = torch.arange(sizes.topk, device=numbers.device)
    return ((numbers[:, None] * sizes.topk + lanes) % 63 + 1).float() / 64


def crossing_bytes(rank: int, nodes: list[int], sizes: Sizes) -> int:
    """Least bytes of this rank's tokens that must leave its node in one dispatch: each once for each other node."""
    numbers = rank * sizes.tokens + torch.arange(sizes.tokens)
    node_of_rank = torch.tensor(nodes)
    chosen = node_of_rank[selections(numbers, sizes) // (sizes.experts // len(nodes))]
    others = torch.nn.functional.one_hot(chosen, max(nodes) + 1).amax(1)
    others[:, nodes[rank]] = 0
    return int(others.sum()) * sizes.hidden * sizes.dtype.itemsize


def round_trip(layout: Literal["token", "expert"], rank: int, world: int, sizes: Sizes) -> Result:
    """Dispatch, experts that change nothing, combine, and backward. Collective over the default group."""
    dispatcher = FlexTokenDispatcher(num_experts=sizes.experts, layout=layout, name=f"round trip, {layout} layout")
    own = rank * sizes.tokens + torch.arange(sizes.tokens, device=sizes.device)
    x, probs = rows(own, sizes).requires_grad_(), weights(own, sizes).requires_grad_()
    gradient = rows(own, sizes, salt=1)
    sent = dispatcher.dispatch(x, selections(own, sizes), probs)
    counts = sent.tokens_per_expert.tolist()
    exact = _exact_experts(sent.tokens.detach(), sent.weights.detach(), counts, rank, world, sizes)
    combined = dispatcher.combine(sent.tokens, sent, apply_weights=False)
    torch.autograd.backward([combined, sent.weights], [gradient, sent.weights.detach()])
    assert x.grad is not None
    assert probs.grad is not None
    return Result(
        layout=layout,
        exact=exact,
        experts=dispatcher.num_local_experts,
        wrong_sums=_differences(combined.detach(), x.detach() * sizes.topk),
        wrong_gradients=_differences(x.grad, gradient * sizes.topk) + _differences(probs.grad, probs.detach()),
    )


def _exact_experts(got: Tensor, got_weights: Tensor, counts: list[int], rank: int, world: int, sizes: Sizes) -> int:
    """Local experts that received their rows and weights, all of them and no others, bit by bit in any order."""
    everybody = torch.arange(world * sizes.tokens, device=sizes.device)
    chosen = selections(everybody, sizes)
    local, exact = len(counts), 0
    groups = zip(got.split(counts), got_weights.split(counts), strict=True) if sum(counts) == len(got) else []
    for expert, (part, part_weights) in enumerate(groups, start=rank * local):
        token, lane = (chosen == expert).nonzero().unbind(1)
        wanted, wanted_weights = rows(everybody[token], sizes), weights(everybody[token], sizes)
        order = _numbers(part).argsort()
        same = part.shape == wanted.shape and torch.equal(part[order], wanted)
        exact += same and torch.equal(part_weights[order], wanted_weights.gather(1, lane[:, None])[:, 0])
    return exact


def _numbers(part: Tensor) -> Tensor:
    """Token numbers that rows ``[n, H]`` say they are of."""
    powers = float(BASE) ** torch.arange(DIGITS, device=part.device, dtype=torch.float64)
    return (part[:, :DIGITS].double() * powers).sum(1)


def _differences(got: Tensor, wanted: Tensor) -> int:
    return int((got != wanted).sum())
