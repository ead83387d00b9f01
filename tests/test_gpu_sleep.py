"""Buffers that sleep between phases change no loss and lose no memory, on the real DeepEP V2."""

from __future__ import annotations

import itertools

import gpu_sleep
import pytest
from test_gpu import on_gpus

pytestmark = pytest.mark.gpu

CYCLES = 50


@pytest.mark.parametrize("world", [1, 2])
def test_fifty_cycles_of_sleep_and_wake(world: int) -> None:
    names = ("kept", "again", "once more", "sleeps")
    runs = {name: on_gpus(world, gpu_sleep.losses, CYCLES, name == "sleeps") for name in names}
    for rank in range(world):
        kept, again, once_more, sleeps = (runs[name][rank]["losses"] for name in names)
        noise = max(farthest(*two) for two in itertools.combinations((kept, again, once_more), 2))
        apart = farthest(kept, sleeps)
        free = runs["sleeps"][rank]["free"]
        lost = free[4] - free[-1]
        print(
            f"\nrank {rank}: loss {kept[0]:.4f} -> {kept[-1]:.4f}; runs differ by {noise:.1e}, asleep between "
            f"phases by {apart:.1e}; {lost:.0f} bytes lost after cycle 5"
        )
        assert kept[-1] < 0.9 * kept[0]
        assert apart <= 2 * noise + 1e-6
        assert lost <= 0


def farthest(one: list[float], other: list[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))
