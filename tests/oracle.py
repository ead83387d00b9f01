"""What dispatch, combine and a mixture-of-experts layer must give, from all ranks' inputs in one process.

Written from the contract alone, with loops over tokens: slow, plain, and sharing nothing with the package.

Legend: R ranks, T_r tokens of rank r, K top-k, E experts, L = E / R local experts, H hidden, M the ceiling of tokens
per rank. A row of the token layout is known by ``(source rank, source token)``, a row of the expert layout by
``(source rank, source token, k)`` with k the place of the selection in its row of ``topk_idx``. "Lane" is that k; the
master lane of a token on a rank is the highest k that lives there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Key", "Oracle", "accumulate", "moe"]

Key = tuple[int, int, int]  # source rank, source token, k


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Expected outcome of one dispatch over all ranks.

    Attributes:
        topk_idx: per rank [T_r, K] int64, global expert ids, negative for none.
        num_experts: E.
        max_tokens: M.
        alignment: rows of each expert are padded to a multiple of it in the expert layout.
    """

    topk_idx: Sequence[Tensor]
    num_experts: int
    max_tokens: int
    alignment: int = 1

    @property
    def world(self) -> int:
        return len(self.topk_idx)

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.world

    @property
    def topk(self) -> int:
        return self.topk_idx[0].shape[1]

    def home(self, expert: int) -> int:
        """The rank that holds an expert."""
        return expert // self.local_experts

    def selections(self, source: int, token: int) -> list[tuple[int, int]]:
        """``(k, expert)`` of the token's valid selections, k ascending."""
        row = self.topk_idx[source][token].tolist()
        return [(k, expert) for k, expert in enumerate(row) if expert >= 0]

    def lanes(self, source: int, token: int, rank: int) -> list[int]:
        """The k of the token's selections that live on ``rank``, ascending."""
        return [k for k, expert in self.selections(source, token) if self.home(expert) == rank]

    def destinations(self, source: int, token: int) -> list[int]:
        """Ranks that need the token, ascending."""
        return sorted({self.home(expert) for _, expert in self.selections(source, token)})

    # What a rank receives.

    def received(self, rank: int) -> list[tuple[int, int]]:
        """Rows of the token layout in deterministic order: source rank, then source token."""
        return [
            (source, token)
            for source in range(self.world)
            for token in range(len(self.topk_idx[source]))
            if self.lanes(source, token, rank)
        ]

    def received_by_expert(self, rank: int) -> list[list[Key]]:
        """Rows of the expert layout per local expert, without padding, in deterministic order."""
        experts: list[list[Key]] = [[] for _ in range(self.local_experts)]
        for source, token in self.received(rank):
            for k in self.lanes(source, token, rank):
                experts[int(self.topk_idx[source][token, k]) - rank * self.local_experts].append((source, token, k))
        return experts

    def sent(self, source: int, rank: int) -> int:
        """Tokens that ``source`` sends to ``rank``, each once."""
        return sum(bool(self.lanes(source, token, rank)) for token in range(len(self.topk_idx[source])))

    def counts(self, rank: int) -> list[int]:
        """Selections received per local expert."""
        return [len(rows) for rows in self.received_by_expert(rank)]

    def aligned_counts(self, rank: int) -> list[int]:
        return [_align(count, self.alignment) for count in self.counts(rank)]

    def starts(self, rank: int) -> list[int]:
        """First slot of each local expert in the expert layout."""
        aligned = self.aligned_counts(rank)
        return [sum(aligned[:expert]) for expert in range(self.local_experts)]

    def slots(self, rank: int) -> list[Key | None]:
        """The expert layout slot by slot in deterministic order, None for padding."""
        rows: list[Key | None] = []
        for keys, size in zip(self.received_by_expert(rank), self.aligned_counts(rank), strict=True):
            rows += [*keys, *[None] * (size - len(keys))]
        return rows

    def psum_ranks(self, rank: int) -> list[int]:
        """Inclusive prefix sum of received tokens over source ranks."""
        return list(itertools.accumulate(self.sent(source, rank) for source in range(self.world)))

    def psum_experts(self, rank: int, *, expanded: bool) -> list[int]:
        """Token layout: inclusive sum of aligned counts. Expert layout: first slot plus exact count."""
        if expanded:
            return [start + count for start, count in zip(self.starts(rank), self.counts(rank), strict=True)]
        return list(itertools.accumulate(self.aligned_counts(rank)))

    def worst_tokens(self) -> int:
        """Rows of the token layout when nobody waits for the counts."""
        return self.max_tokens * self.world

    def worst_slots(self) -> int:
        """Rows of the expert layout when nobody waits for the counts."""
        rows = self.worst_tokens() * min(self.topk, self.local_experts)
        return _align(rows + (self.alignment - 1) * self.local_experts, self.alignment)

    def local_topk(self, source: int, token: int, rank: int) -> list[int]:
        """The token's row of ``topk_idx`` as ``rank`` sees it: local ids, -1 where the selection is not its own."""
        row = [-1] * self.topk
        for k in self.lanes(source, token, rank):
            row[k] = int(self.topk_idx[source][token, k]) - rank * self.local_experts
        return row

    # What comes back.

    def combine_tokens(
        self, source: int, outputs: Sequence[Mapping[tuple[int, int], Tensor]], bias: Sequence[Tensor], like: Tensor
    ) -> Tensor:
        """Combine of the token layout for one source rank.

        Args:
            outputs: per rank ``(source rank, source token)`` to the row [H] that its experts gave.
            bias: each [T, H].
            like: gives H and the dtype of the result.

        Returns:
            [T, H].
        """
        tokens = range(len(self.topk_idx[source]))
        rows = []
        for token in tokens:
            partials = [
                (max(self.lanes(source, token, rank)), outputs[rank][source, token])
                for rank in self.destinations(source, token)
            ]
            rows.append(self._join(partials, [each[token] for each in bias], like))
        return torch.stack(rows) if rows else like.new_empty(0, like.shape[-1])

    def combine_slots(
        self,
        source: int,
        outputs: Sequence[Mapping[Key, Tensor]],
        bias: Sequence[Tensor],
        like: Tensor,
        *,
        multiple_reduction: bool = True,
    ) -> Tensor:
        """As :meth:`combine_tokens` for the expert layout, keyed with k as well.

        With ``multiple_reduction`` an expert's rank adds its rows of a token, in ascending k, and rounds once; without,
        every row travels by itself.
        """
        tokens = range(len(self.topk_idx[source]))
        rows = []
        for token in tokens:
            partials = []
            for rank in self.destinations(source, token):
                lanes = self.lanes(source, token, rank)
                each = [outputs[rank][source, token, k] for k in lanes]
                if multiple_reduction:
                    partials.append((lanes[-1], accumulate(each, like)))
                else:
                    partials += list(zip(lanes, each, strict=True))
            rows.append(self._join(partials, [item[token] for item in bias], like))
        return torch.stack(rows) if rows else like.new_empty(0, like.shape[-1])

    def combine_weights(self, source: int, returned: Callable[[int, Key], float]) -> Tensor:
        """[T, K] float64: the weight that the owner of each selection sent back, 0 where there is no selection.

        Args:
            returned: weight that a rank gives back for a key.
        """
        weights = torch.zeros(self.topk_idx[source].shape, dtype=torch.float64)
        for token in range(len(weights)):
            for k, expert in self.selections(source, token):
                weights[token, k] = returned(self.home(expert), (source, token, k))
        return weights

    @staticmethod
    def _join(partials: list[tuple[int, Tensor]], bias: list[Tensor], like: Tensor) -> Tensor:
        ordered = [row for _, row in sorted(partials, key=lambda item: item[0])]
        return accumulate([*bias, *ordered], like)


def accumulate(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sum of rows [H] from +0 in the order given, in fp32 (fp64 for fp64), rounded once to the dtype of ``like``."""
    wide = np.float64 if like.dtype == torch.float64 else np.float32
    total = np.zeros(like.shape[-1], dtype=wide)
    for row in rows:
        total = total + row.detach().to(torch.float64).numpy().astype(wide)
    return torch.from_numpy(total).to(like.dtype)


def moe(
    x: Sequence[Tensor],
    topk_idx: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    expert: Callable[[int, Tensor], Tensor],
) -> list[Tensor]:
    """The layer without any communication: ``y_t = sum over k of w_k f_k(x_t)``, differentiable.

    Args:
        x: per rank [T_r, H]; give float64 that requires gradients to get theirs by autograd.
        topk_idx: per rank [T_r, K], negative for none.
        topk_weights: per rank [T_r, K].
        expert: ``expert(e, rows [*, H])`` gives [*, H'] for global expert e.

    Returns:
        Per rank [T_r, H'].
    """
    tokens, indices, weights = torch.cat(list(x)), torch.cat(list(topk_idx)), torch.cat(list(topk_weights))
    total = torch.zeros(())
    for chosen in range(int(indices.max()) + 1 if indices.numel() else 0):
        gate = torch.where(indices == chosen, weights, torch.zeros_like(weights)).sum(dim=1, keepdim=True)
        total = total + gate * expert(chosen, tokens)
    if total.dim() == 0:
        total = 0.0 * weights.sum() + torch.zeros_like(expert(0, tokens))
    return list(torch.split(total, [len(part) for part in x]))
