"""Bytes: of a row on the wire, of DeepEP V2's buffer in any topology, of activations in both layouts.

The buffer's closed form is DeepEP V2's (``csrc/elastic/buffer.hpp``, ``calculate_buffer_size``). On one NVLink domain
it equals ``buffers.contract.buffer_bytes``, which the tests hold together; here it needs no torch and knows more nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model import Cluster, Model

__all__ = ["Activations", "activations", "combine_row_bytes", "dispatch_row_bytes", "num_buffer_bytes", "padded"]

GRANULE = 2 * 1024 * 1024
LARGEST_TOPK = 32
HIDDEN_MULTIPLE = 256
MAX_CHANNELS = 8 * 160
"""Channels that a hybrid buffer leaves room for."""
FP8_BLOCK = 128
"""Elements of a row that share a scale on the wire; the buffer leaves room for one in 32."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded(hidden: int) -> int:
    """H as DeepEP V2 carries it."""
    return _up(hidden, HIDDEN_MULTIPLE)


def dispatch_row_bytes(hidden: int, num_topk: int, fp8: bool) -> int:
    """A token, its scales, and indices, weights and source of it."""
    scales = _up(4 * -(-hidden // FP8_BLOCK), 32) if fp8 else 0
    return hidden * (1 if fp8 else 2) + scales + _up(12 * num_topk + 4, 32)


def combine_row_bytes(hidden: int) -> int:
    """A bfloat16 row; weights travel in the backward of dispatch alone, and are small."""
    return 2 * hidden


def num_buffer_bytes(
    cluster: Cluster,
    *,
    hidden: int,
    num_topk: int,
    num_max_tokens_per_rank: int,
    hybrid: bool = True,
    fp8: bool = False,
    multiple_reduction: bool = True,
) -> int:
    """What DeepEP V2 reserves on each rank.

    Args:
        hidden: already padded.
        num_topk: K; 0 counts as 32.
        num_max_tokens_per_rank: M.
        hybrid: the mode; on one NVLink domain both are the same.
        multiple_reduction: the expert layout adds a rank's rows of a token before they travel.
    """
    ceiling, num_topk = num_max_tokens_per_rank, num_topk or LARGEST_TOPK
    scales = _up(4 * -(-hidden // 32), 32) if fp8 else 0
    dispatch_row = hidden * (1 if fp8 else 2) + scales + _up(12 * num_topk + 4, 32)
    combine_row = 2 * hidden + _up(8 * num_topk, 32)
    nodes = len(cluster.nodes)

    def partials(ranks: int) -> int:
        return min(ranks, num_topk) if multiple_reduction else num_topk

    if nodes == 1 or not hybrid:
        dispatch = cluster.ranks * ceiling
        combine = partials(cluster.ranks) * ceiling
        if nodes > 1:  # what leaves by the network is staged
            dispatch += ceiling
            combine += cluster.ranks * ceiling * partials(1)
    else:
        up = cluster.gpus_per_node
        dispatch = up * nodes * ceiling + ceiling + nodes * (ceiling + MAX_CHANNELS)
        combine = partials(up) * nodes * ceiling + partials(nodes) * ceiling
        combine += partials(1) * nodes * (ceiling + MAX_CHANNELS)
    return _up(max(dispatch * dispatch_row, combine * combine_row), GRANULE)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of bfloat16 activations of one layer on a rank, gated experts.

    Attributes:
        received: rows as they arrive.
        moved: the permuted copy that the token layout needs.
        inner: outputs of an expert's first layer, gate and up, and of the activation.
        output: rows that leave the experts.
        kept: until backward: what enters the experts, ``inner``, and ``output`` for the gradient of the weights.
        peak: kept, and what lives beside it for a while.
        static: received, where shapes must not depend on the routing.
    """

    received: int
    moved: int
    inner: int
    output: int
    kept: int
    peak: int
    static: int


def activations(model: Model, cluster: Cluster, received_per_token: float, alignment: int) -> dict[str, Activations]:
    """For the token and the expert layout, under balanced routing.

    Args:
        received_per_token: rows that a rank receives for each token of a rank, each token once.
        alignment: of the expert layout; half of it is the mean padding of an expert.
    """
    tokens, local = cluster.tokens, model.num_experts // (cluster.ranks // cluster.etp)
    unique = round(tokens * received_per_token)
    copies = tokens * model.num_topk * cluster.etp
    slots = copies + local * (alignment - 1) // 2
    row = 2 * model.hidden
    worst = cluster.ranks * tokens
    worst_slots = _up(worst * min(model.num_topk, local) + (alignment - 1) * local, alignment)

    def layout(received: int, moved: int, rows: int, static: int) -> Activations:
        inner, output = rows * 6 * model.expert_ffn, rows * row
        kept = rows * row + inner + output
        beside = 2 * received * row if moved else 0
        return Activations(
            received=received * row,
            moved=moved * row,
            inner=inner,
            output=output,
            kept=kept,
            peak=kept + beside,
            static=static * row,
        )

    return {"token": layout(unique, copies, copies, worst), "expert": layout(slots, 0, slots, worst_slots)}
