"""Expert load counted where tokens arrive, against counts from all ranks' indices; ranges that a profiler sees."""

from __future__ import annotations

import collections
import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import gpu_cases
import pytest
import torch
import torch.distributed as dist
from launch import RankPool
from scene import BOTH_LAYOUTS, Layer, Recorder, Scene, buffers, combine_of, dispatch_of, raised_by, scene_for
from test_gpu import on_gpus
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from megatron_moe_v2 import (
    ExpertLoadStats,
    FlexTokenDispatcher,
    RoutingLayout,
    capture,
    close_buffers,
    fused_combine,
    fused_dispatch,
    prepare_buffer,
    prepare_for_capture,
    ranges,
)
from megatron_moe_v2 import launch as launching
from megatron_moe_v2.slabs import ExpertSegments, OverflowFlag, repack, unrepack

CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "non-reentrant, all of it": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "one in another": lambda function, *inputs: checkpoint(
        lambda *inner: checkpoint(function, *inner, use_reentrant=False), *inputs, use_reentrant=True
    ),
}
MODES = {"no": lambda function, *inputs: function(*inputs), **CHECKPOINTS}


def selections(idx: list[Tensor], num_experts: int) -> list[int]:
    """Per expert, how many tokens of all ranks select it."""
    counts = collections.Counter(expert for part in idx for expert in part.flatten().tolist())
    return [counts[expert] for expert in range(num_experts)]


def step(rank: int, layer: Layer, through: Callable[..., Any], inputs: tuple[Tensor, Tensor], **options: Any) -> None:
    """Dispatch and combine in ``through``, then backward."""

    def both(x: Tensor, weights: Tensor) -> Tensor:
        recv_x, _, recv_weights, _, handle = dispatch_of(layer, rank, x, weights, **options)
        return combine_of(recv_x * recv_x * recv_weights.sum(), handle)

    through(both, *inputs).sum().backward()


def leaves(layer: Layer, rank: int) -> tuple[Tensor, Tensor]:
    return layer.x[rank].clone().requires_grad_(), layer.weights[rank].clone().requires_grad_()


def counted(rank: int, world: int, scene: Scene) -> dict[str, Any]:
    """Snapshots after a step in each mode."""
    layer, found = Layer(scene), {}
    with buffers(kind=Recorder) as built:
        for mode, through in MODES.items():
            stats = ExpertLoadStats(num_experts=scene.num_experts)
            step(rank, layer, through, leaves(layer, rank), load_stats=stats)
            found[mode] = stats.snapshot(all_ranks=True)
            layout = RoutingLayout()
            stats.reset()
            step(rank, layer, through, leaves(layer, rank), load_stats=stats, layout_cache=layout)
            found[f"{mode}, with its layout kept"] = stats.snapshot(all_ranks=True)
        (buffer,) = built
        assert isinstance(buffer, Recorder)
        made = [call for call in buffer.calls if call.operation == "dispatch" and "topk_idx" in call.arguments]
        found["uncached dispatches"] = len(made)
    return found


@pytest.mark.parametrize("routing", ["masked", "one rank"])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_counts_once_under_every_kind_of_recomputation(ranks2: RankPool, layout: str, routing: str) -> None:
    scene = scene_for(2, layout, routing=routing)
    want = selections(Layer(scene).idx, scene.num_experts)
    for rank, found in enumerate(ranks2.run(counted, scene)):
        # Two for each mode, and each checkpoint's recomputation.
        assert found.pop("uncached dispatches") == 2 * len(MODES) + len(CHECKPOINTS) + 1
        assert len(found) == 2 * len(MODES)
        local = want[2 * rank : 2 * rank + 2]
        for mode, snapshot in found.items():
            assert json.loads(json.dumps(snapshot)) == snapshot
            assert snapshot["first_expert"] == 2 * rank, mode
            assert snapshot["tokens_per_expert"] == local, mode
            assert snapshot["tokens"] == sum(local), mode
            assert snapshot["imbalance"] == pytest.approx(max(local) / (sum(local) / 2) if sum(local) else 1.0)
            every = snapshot["global"]
            assert every["tokens_per_expert"] == want, mode
            assert every["tokens"] == sum(want), mode
            assert every["imbalance"] == pytest.approx(max(want) * 4 / sum(want))
            assert every["rank_imbalance"] == pytest.approx(max(sum(want[:2]), sum(want[2:])) * 2 / sum(want))


def several(rank: int, world: int, scene: Scene) -> dict[str, list[int]]:
    """Sums over calls of each form, and what resets leave."""
    layer, found = Layer(scene), {}
    x, weights = layer.x[rank], layer.weights[rank]
    with buffers():
        with torch.inference_mode():
            stats = ExpertLoadStats(num_experts=scene.num_experts)
        for _ in range(3):
            dispatch_of(layer, rank, x, weights, load_stats=stats)
        found["three"] = stats.snapshot()["tokens_per_expert"]
        dispatch_of(layer, rank, x, weights)
        found["and one that is not counted"] = stats.snapshot()["tokens_per_expert"]
        stats.reset()
        found["none"] = stats.snapshot()["tokens_per_expert"]
        with torch.inference_mode():
            dispatch_of(layer, rank, x, weights, load_stats=stats)
        found["in inference mode"] = stats.snapshot()["tokens_per_expert"]
        dispatch_of(layer, rank, x, weights, load_stats=stats, wait=False).wait()
        found["two, one in halves"] = stats.snapshot()["tokens_per_expert"]
        dispatcher = FlexTokenDispatcher(num_experts=scene.num_experts, load_stats=stats)
        dispatcher.dispatch(x, layer.idx[rank], weights)
        found["three, one by a dispatcher"] = stats.snapshot()["tokens_per_expert"]
    return found


def test_counts_add_up(ranks2: RankPool) -> None:
    scene = scene_for(2, routing="masked")
    want = selections(Layer(scene).idx, scene.num_experts)
    times = {"three": 3, "and one that is not counted": 3, "none": 0, "in inference mode": 1}
    times |= {"two, one in halves": 2, "three, one by a dispatcher": 3}
    for rank, found in enumerate(ranks2.run(several, scene)):
        local = want[2 * rank : 2 * rank + 2]
        assert found == {name: [number * count for count in local] for name, number in times.items()}


def refused(rank: int, world: int) -> dict[str, Any]:
    layer = Layer(scene_for(2))
    x, weights = layer.x[rank], layer.weights[rank]
    own = ExpertLoadStats(num_experts=4)
    wrong = {
        "a number": 3,
        "other experts": ExpertLoadStats(num_experts=8),
        "another group": ExpertLoadStats(num_experts=4, group=dist.new_group([0, 1])),
        "another device": ExpertLoadStats(num_experts=4, device="meta"),
    }
    found: dict[str, Any] = {"no multiple": raised_by(lambda: ExpertLoadStats(num_experts=3))}
    with buffers():
        dispatch_of(layer, rank, x, weights)
        for name, one in wrong.items():
            stats = one if rank == 1 else own
            found[name] = raised_by(lambda: dispatch_of(layer, rank, x, weights, load_stats=stats))  # noqa: B023
        dispatch_of(layer, rank, x, weights, load_stats=own)
    found["counted"] = own.snapshot()["tokens"]
    return found


def test_wrong_stats_are_refused_on_every_rank(ranks2: RankPool) -> None:
    for rank, found in enumerate(ranks2.run(refused)):
        want = selections(Layer(scene_for(2)).idx, 4)
        assert found.pop("counted") == sum(want[2 * rank : 2 * rank + 2])
        for name, failure in found.items():
            assert failure.isa("InputError"), (name, failure)
            assert "load_stats" in failure.text or name == "no multiple"


def beyond_32_bits(rank: int, world: int) -> list[Any]:
    stats, most = ExpertLoadStats(num_experts=3), 2**23
    for number in range(1200):
        counters = stats.counters(most)
        assert counters is not None
        counters += torch.tensor([most, 1, 0], dtype=torch.int32)
        if number == 100:
            stats.reset()
    return stats.snapshot()["tokens_per_expert"]  # type: ignore[no-any-return]


def test_counts_beyond_32_bits(ranks1: RankPool) -> None:
    assert ranks1.run(beyond_32_bits) == [[1099 * 2**23, 1099, 0]]


def names(events: Any) -> dict[str, int]:
    found = {event.key: event.count for event in events.key_averages() if event.key.startswith("moe ")}
    return {name.removeprefix("moe "): count for name, count in found.items()}


def profiled(rank: int, world: int, layout: Any) -> dict[str, dict[str, int]]:
    """Names that a profiler sees, with their counts."""
    scene = scene_for(2, layout)
    layer, found = Layer(scene), {}
    dispatcher = FlexTokenDispatcher(num_experts=scene.num_experts, layout=scene.layout)

    def both(x: Tensor, weights: Tensor, cache: RoutingLayout | None = None) -> Tensor:
        sent = dispatcher.dispatch(x, layer.idx[rank], weights, layout_cache=cache)
        return dispatcher.combine(sent.tokens * sent.tokens, sent)

    with buffers():
        both(*leaves(layer, rank)).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(2):
                both(*leaves(layer, rank)).sum().backward()
        found["two steps"] = names(seen)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            cache = RoutingLayout()
            checkpoint(both, *leaves(layer, rank), cache, use_reentrant=True).sum().backward()
        found["recomputed"] = names(seen)

        def refuse(phase: str) -> None:
            raise AssertionError(phase)

        kept, launching.named, ranges.named = launching.named, refuse, refuse  # type: ignore[assignment]
        try:
            both(*leaves(layer, rank)).sum().backward()  # nobody looks
        finally:
            launching.named = ranges.named = kept
    return found


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_profiler_sees_each_phase(ranks2: RankPool, layout: str) -> None:
    phases = ["dispatch", "combine", "dispatch backward", "combine backward"]
    own = ["permute", "unpermute", "permute backward", "unpermute backward"] if layout == "token" else []
    once = dict.fromkeys([*phases, *own], 1)
    forward = [phase for phase in own if "backward" not in phase]
    again = once | dict.fromkeys(["combine", *forward], 2) | {"repeated dispatch": 1}
    for found in ranks2.run(profiled, layout):
        assert found["two steps"] == dict.fromkeys(once, 2)
        assert found["recomputed"] == again


def test_profiler_sees_slabs() -> None:
    counts = torch.tensor([2, 1], dtype=torch.int32)
    segments = ExpertSegments(psum=counts.cumsum(0, dtype=torch.int32), counts=counts, num_rows=3)
    rows = torch.randn(3, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        slab, _ = repack(rows, segments, max_rows=2, overflow=OverflowFlag("cpu"))
        unrepack(slab, segments).sum().backward()
    assert names(seen) == dict.fromkeys(["repack", "unrepack", "repack backward", "unrepack backward"], 1)


@contextmanager
def stand_in_for_nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """NVTX needs CUDA: what would be pushed and popped."""
    seen: list[str] = []
    nvtx = SimpleNamespace(range_push=seen.append, range_pop=lambda: seen.append("pop"))
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    with monkeypatch.context() as inside:
        inside.setattr(torch.cuda, "is_available", lambda: True)
        ranges.ranges.use_nvtx(True)
    try:
        yield seen
    finally:
        ranges.ranges.use_nvtx(False)


def test_nvtx_ranges_close_on_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    @ranges.ranged("fails")
    def fails() -> None:
        raise KeyError

    with stand_in_for_nvtx(monkeypatch) as seen:
        with ranges.named("works"):
            pass
        with pytest.raises(KeyError):
            fails()
    assert seen == ["moe works", "pop", "moe fails", "pop"]
    assert not ranges.ranges.nvtx


def nvtx_setting(rank: int, world: int) -> list[bool]:
    asked = []

    def note(wanted: bool) -> None:
        asked.append(wanted)

    layer, ranges.ranges.use_nvtx = Layer(scene_for(2)), note  # type: ignore[method-assign]
    try:
        for variables in ({"NVTX": int(rank == 0)}, {}):  # it may differ between ranks
            with buffers(**variables):
                for _ in range(2):
                    dispatch_of(layer, rank, layer.x[rank], layer.weights[rank])
    finally:
        del ranges.ranges.use_nvtx
    return asked


def test_nvtx_is_read_when_the_first_buffer_is_built(ranks2: RankPool) -> None:
    assert ranks2.run(nvtx_setting) == [[True, False], [False, False]]


def on_gpu(rank: int, world: int, backend: str) -> dict[str, bool]:
    """Counts of each layout and kind of recomputation against all ranks' indices."""
    os.environ["MCORE_DEEPEP_V2_BACKEND"] = backend
    os.environ["MCORE_DEEPEP_V2_NVTX"] = "1"
    gpu_cases.join_nccl(rank, world)
    right = {}
    for name, x, idx, weights in gpu_cases.scenes(rank, world):
        counts = torch.bincount(idx[idx >= 0], minlength=gpu_cases.E)
        dist.all_reduce(counts)
        for layout, alignment in (("token", 1), ("expert", 1), ("expert", 128)):
            for mode, through in MODES.items():
                stats = ExpertLoadStats(num_experts=gpu_cases.E)
                options: dict[str, Any] = {"layout": layout, "expert_alignment": alignment, "load_stats": stats}

                def both(x: Tensor, weights: Tensor) -> Tensor:
                    recv_x, *_, handle = fused_dispatch(x, idx, weights, gpu_cases.E, None, **options)  # noqa: B023
                    return fused_combine(recv_x * recv_x, None, handle)[0]

                leaf = x.clone().requires_grad_(), weights.clone().requires_grad_()
                through(both, *leaf).sum().backward()
                found = stats.snapshot(all_ranks=True)["global"]["tokens_per_expert"]
                right[f"{name}, {layout} {alignment}, {mode}"] = found == counts.tolist()
        stats = ExpertLoadStats(num_experts=gpu_cases.E)
        for _ in range(3):
            fused_dispatch(x, idx, weights, gpu_cases.E, None, True, True, load_stats=stats, wait=False).wait()
        found = stats.snapshot(all_ranks=True)["global"]["tokens_per_expert"]
        right[f"{name}, three in halves"] = found == (3 * counts).tolist()
    close_buffers()
    dist.destroy_process_group()
    return right


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "world"), [("deepep_v2", 1), ("deepep_v2", 2), ("deepep_v1", 2), ("embedded", 2)], ids=str
)
def test_counts_on_gpus(backend: str, world: int) -> None:
    for rank, results in enumerate(on_gpus(world, on_gpu, backend)):
        wrong = [case for case, right in results.items() if not right]
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(results) == 4 * (3 * len(MODES) + 1)


def replayed(rank: int, world: int) -> dict[str, int]:
    """Tokens counted by a captured dispatch over many replays; what the counters themselves do synchronises nothing."""
    gpu_cases.join_nccl(rank, world)
    draw = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(64, gpu_cases.H, device="cuda", generator=draw).bfloat16()
    weights, idx = torch.rand(64, gpu_cases.E, device="cuda", generator=draw).topk(gpu_cases.K)
    stats = ExpertLoadStats(num_experts=gpu_cases.E)
    prepare_for_capture(hidden=gpu_cases.H, num_topk=gpu_cases.K, num_experts=gpu_cases.E)
    dispatcher = FlexTokenDispatcher(
        num_experts=gpu_cases.E, num_max_tokens_per_rank="decode", static_shapes=True, load_stats=stats
    )

    def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x, idx, weights)
        return dispatcher.combine(sent.tokens, sent)

    with torch.inference_mode():
        replay = capture(layer, x, idx, weights)
        stats.reset()
        for _ in range(50):
            replay(x, idx, weights)
        found = {"replayed": stats.snapshot(all_ranks=True)["global"]["tokens"]}
        layer(x, idx, weights)
        found["and once eager"] = stats.snapshot(all_ranks=True)["global"]["tokens"]
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            stats.counters(2**31)
        stats.reset()
        torch.cuda.set_sync_debug_mode("default")
    close_buffers(release_graphs=True)
    dist.destroy_process_group()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_replays_count(world: int) -> None:
    one = 64 * gpu_cases.K * world
    for found in on_gpus(world, replayed):
        assert found == {"replayed": 50 * one, "and once eager": 51 * one}


def test_prepared_buffer_counts_nothing_by_itself(ranks1: RankPool) -> None:
    assert ranks1.run(warmed_up) == [0]


def warmed_up(rank: int, world: int) -> int:
    with buffers():
        stats = ExpertLoadStats(num_experts=4)
        prepare_buffer(hidden=8, num_topk=2, num_experts=4, warmup=True)
        return int(stats.snapshot()["tokens"])
