"""Faults, life cycle and memory on the real DeepEP, several ranks on one GPU or more."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import gpu_cases
import gpu_faults
import pytest
from launch import Launch
from test_gpu import on_gpus as on_gpus_kept

pytestmark = pytest.mark.gpu

on_gpus = functools.partial(on_gpus_kept, fresh=True)


def test_disagreeing_ranks_raise_and_the_next_attempt_works() -> None:
    for seen in on_gpus(2, gpu_faults.disagreements):
        for case in ("ceilings", "modes", "SM counts", "backends"):
            kind, text, seconds = seen[case]
            assert kind == "RankMismatchError", (case, text)
            assert "rank 0" in text
            assert "rank 1" in text
            assert seconds < 10
        assert seen["then"][0] == "nothing", seen["then"]


def test_one_rank_cannot_import_deep_ep() -> None:
    for seen in on_gpus(2, gpu_faults.one_cannot_import):
        kind, text, seconds = seen["import"]
        assert kind == "RankMismatchError", text
        assert "embedded" in text
        assert seconds < 10


def test_misuse() -> None:
    for seen in on_gpus(2, gpu_faults.misuse):
        got = {case: kind for case, (kind, _, _) in seen.items()}
        assert got == {
            "capture before prepare": "CaptureError",
            "capture after prepare": "nothing",
            "capture of a synchronising dispatch": "CaptureError",
            "constructions": "1",
            "event of the wrong kind": "InputError",
            "float32": "LimitError",
            "refused by DeepEP": "BackendError",
            "stream": "True",
            "next dispatch": "nothing",
            "combine after close": "BufferClosedError",
            "close after the group": "nothing",
        }, seen


def test_too_many_rows_on_one_rank() -> None:
    waiting, failing = on_gpus(2, gpu_faults.too_many_rows)
    assert failing["rows"][0] == "CapacityError"
    assert failing["rows"][2] < 1
    kind, text, seconds = waiting["rows"]
    assert kind == "CapacityError", text
    assert "rank 1" in text
    assert "MAX_TOKENS_PER_RANK" in text
    assert seconds < 25


def test_a_killed_rank_is_named() -> None:
    survivor, dead = Launch.fresh(2, gpu_faults.killed, init=False, timeout=120, env=gpu_cases.ENVIRONMENT, grace=60)
    assert dead.failure is not None
    assert survivor.failure is None, survivor.failure
    kind, text, seconds = survivor.value["killed"]
    assert kind == "CommunicationError", text
    assert "rank 1: SILENT" in text
    assert "rank 0: alive" in text
    assert seconds < 30


def test_build_and_close_many_times() -> None:
    """Wants the GPU for itself: free memory is the whole device's."""
    count = 200
    (ours,) = on_gpus(1, gpu_faults.cycles, count, False)
    (raw,) = on_gpus(1, gpu_faults.cycles, count, True)
    grown, grown_raw = ours[20] - ours[-1], raw[20] - raw[-1]
    print(f"\nfree device bytes lost over {count - 21} cycles: ours {grown}, raw DeepEP {grown_raw}")
    assert grown <= max(grown_raw, 0) + 2**20


@pytest.mark.parametrize("avoid", ["0", "1"], ids=["record_stream", "EP_AVOID_RECORD_STREAM"])
@pytest.mark.parametrize(("world", "tokens", "hidden"), [(2, gpu_cases.M, gpu_cases.H), (1, 8192, 2048)], ids=str)
def test_training_memory_is_flat(world: int, tokens: int, hidden: int, avoid: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("EP_AVOID_RECORD_STREAM", avoid)
    steps = 500
    for rank, seen in enumerate(on_gpus(world, gpu_faults.training_memory, steps, tokens, hidden)):
        allocated, reserved, resident, seconds = zip(*seen, strict=True)
        print(
            f"\n{tokens} x {hidden}, rank {rank}, EP_AVOID_RECORD_STREAM={avoid}: allocated {allocated[20]} -> "
            f"{allocated[-1]}, reserved {reserved[20]} -> {reserved[-1]}, resident {resident[20]:.0f} -> "
            f"{resident[-1]:.0f} MiB, median step {1e3 * statistics.median(seconds[20:]):.3f} ms"
        )
        assert allocated[-1] <= allocated[20] + 2**20
        assert resident[-1] <= resident[20] + 64
        assert max(reserved[steps // 2 :]) <= max(reserved[: steps // 2]) * 1.1
