"""Channels of DeepEP V2's hybrid mode: how many a dispatch has, and SM counts that give two dispatches the same.

Between nodes a dispatch runs in channels, each a pair of warps with a token's bytes in shared memory: as many to an SM
as fit, and the fewer the larger the token. The handle is laid out by channels, so a cached dispatch must have as many
as the dispatch that made it, or DeepEP asserts. FP8 tokens are smaller than the bfloat16 ones that follow them in
backward: at hidden 7168 an H200 has 8 channels an SM for the one and 7 for the other. Where the numbers differ both
take SM counts whose products agree: 21 SMs of 8 channels and 24 of 7.

Pure arithmetic; only hybrid topologies with more than one scale-out domain need it. The combine follows the handle's
own number and needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import LimitError
from .contract import align

__all__ = ["HOPPER_SHARED_MEMORY", "Token", "cached_num_sms", "channels_per_sm", "sms_of_both"]

HOPPER_SHARED_MEMORY = 227 * 1024
"""Bytes that a block of a Hopper GPU can ask for."""

_NOTIFY_WARPS = 4
_MOST_WARPS = 32
_MOST_CHANNELS_PER_SM = 8
_MOST_WITHOUT_OVERLAP = 4


@dataclass(frozen=True, kw_only=True)
class Token:
    """What of a dispatched token counts.

    Attributes:
        width: elements of the row as it travels.
        num_scales: 4-byte scales beside one-byte elements; None for bfloat16.
        num_topk: K.
    """

    width: int
    num_scales: int | None
    num_topk: int

    @property
    def dispatched(self) -> int:
        """Bytes in shared memory: row, scales, indices with weights and source, barrier; each to 32 bytes."""
        element = 2 if self.num_scales is None else 1
        return (
            align(self.width * element, 32)
            + align(4 * (self.num_scales or 0), 32)
            + align(12 * self.num_topk + 4, 32)
            + 32
        )

    @property
    def combined(self) -> int:
        """The same for the bfloat16 row of the combine, which has no scales and no source."""
        return align(self.width * 2, 32) + align(8 * self.num_topk, 32) + 32


def channels_per_sm(
    token: Token,
    *,
    num_ranks: int,
    num_experts: int,
    shared_memory: int = HOPPER_SHARED_MEMORY,
    overlap: bool = True,
) -> int:
    """Channels that one SM holds in a dispatch of ``token``.

    Args:
        shared_memory: bytes that a block can ask for.
        overlap: the buffer was built with ``prefer_overlap_with_compute``.

    Raises:
        LimitError: not even one.
    """
    counters = align(num_ranks + num_experts, 32 * _NOTIFY_WARPS) * 4
    warps = min(
        (shared_memory - counters) // token.dispatched, _MOST_WARPS - _NOTIFY_WARPS, shared_memory // token.combined
    )
    channels = min(warps // 2, _MOST_CHANNELS_PER_SM if overlap else _MOST_WITHOUT_OVERLAP)
    if channels < 1:
        raise LimitError("bytes of a token in hybrid mode", got=token.dispatched, expected=f"two in {shared_memory}")
    return channels


def sms_of_both(limit: int, first: int, second: int) -> tuple[int, int]:
    """SM counts ``(a, b)`` with ``a * first == b * second`` channels.

    ``(limit, limit)`` where both have as many an SM. Else the largest up to ``limit``, or the least there are.
    """
    if first == second:
        return limit, limit
    channels = math.lcm(first, second)
    of_first, of_second = channels // first, channels // second
    times = max(limit // max(of_first, of_second), 1)
    return times * of_first, times * of_second


def cached_num_sms(num_channels: int, per_sm: int, num_device_sms: int) -> int:
    """The SM count with which a cached dispatch of ``per_sm`` channels an SM has its handle's ``num_channels``.

    Raises:
        LimitError: there is none on this device.
    """
    num_sms, rest = divmod(num_channels, per_sm)
    if rest or num_sms > num_device_sms:
        raise LimitError(
            "channels of the dispatch that a cached dispatch repeats",
            got=num_channels,
            expected=f"a multiple of {per_sm}, for at most {num_device_sms} SMs",
            fix="Dispatch in FP8 with fewer SMs, or repeat it with rows of the same size.",
        )
    return num_sms
