"""What the autograd functions keep alive."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from launch import RankPool
from scene import (
    BOTH_LAYOUTS,
    STREAM_FLAGS,
    Layer,
    Scene,
    buffers,
    combine_of,
    dispatch_of,
    layer_forward,
    leaves,
    scene_for,
)
from torch import Tensor

from megatron_moe_v2.pool import PooledBuffer


def _tensors_in(value: Any, path: str, seen: set[int]) -> Iterator[str]:
    """Paths of tensors reachable from ``value`` through attributes and containers, buffers left out."""
    if isinstance(value, Tensor):
        yield path
    elif id(value) in seen or isinstance(value, (PooledBuffer, type, str, int, float)):
        return
    else:
        seen.add(id(value))
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        )
        for key, item in itertools.chain(items, getattr(value, "__dict__", {}).items()):
            yield from _tensors_in(item, f"{path}.{key}", seen)


def kept(rank: int, world: int, scene: Scene, flags: dict[str, bool]) -> list[str]:
    """Tensors that a context holds as attributes, and outputs that live on though only graph and handle are held."""
    layer, found = Layer(scene), []
    gc.collect()
    gc.disable()
    try:
        with buffers(adversary=scene.adversary):
            x, weights, *_ = leaves(layer, rank)
            recv_x, recv_idx, recv_weights, counts, handle = dispatch_of(layer, rank, x, weights, **flags)
            rows = recv_x + 0.0
            y = combine_of(rows, handle, **flags)
            nodes = {"dispatch": recv_x.grad_fn, "combine": y.grad_fn}
            for name, node in nodes.items():
                found += list(_tensors_in(node.__dict__, f"{name} context", set()))
            outputs = {"recv_x": recv_x, "recv_idx": recv_idx, "recv_weights": recv_weights, "counts": counts, "y": y}
            watched = {name: weakref.ref(value) for name, value in outputs.items() if value is not None}
            del recv_x, recv_idx, recv_weights, counts, rows, y, outputs
            found += [f"{name} lives on" for name, value in watched.items() if value() is not None]
            del nodes, handle
    finally:
        gc.enable()
    return found


@pytest.mark.parametrize("flags", STREAM_FLAGS, ids=lambda f: ", ".join(k for k, v in f.items() if v) or "neither")
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_context_and_handle_hold_no_output(ranks2: RankPool, layout: str, flags: dict[str, bool]) -> None:
    assert ranks2.run(kept, scene_for(2, layout), flags) == [[], []]


def live_tensors(rank: int, world: int, scene: Scene) -> list[int]:
    """Live tensors after 10, 110 and 210 steps whose outputs were dropped without a backward, collector off."""
    layer, counts = Layer(scene), []
    x, weights, matrices, biases = leaves(layer, rank)
    with buffers(adversary=scene.adversary):
        for steps in (10, 100, 100):
            gc.collect()
            gc.disable()
            for number in range(steps):
                flags = STREAM_FLAGS[number % len(STREAM_FLAGS)]
                layer_forward(layer, rank, x, weights, matrices, biases, **flags)
            counts.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
            gc.enable()
    return counts


@pytest.mark.parametrize("layout", ["token", "expert aligned"])
def test_live_tensors_stay_flat_over_200_dropped_steps(ranks2: RankPool, layout: str) -> None:
    for counts in ranks2.run(live_tensors, scene_for(2, layout)):
        assert max(counts) < min(counts) + 20, "a few may still be on their way out in gloo's threads"
