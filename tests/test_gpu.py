"""The real DeepEP with several ranks, on one GPU or more. Skipped where there is no GPU or no ``deep_ep``."""

from __future__ import annotations

from typing import Any

import gpu_cases
import pytest
from launch import Launch

pytestmark = pytest.mark.gpu

WORLDS = [("deepep_v2", 1), ("deepep_v2", 2), ("deepep_v2", 4), ("deepep_v1", 2), ("deepep_v1", 4)]


def on_gpus(world: int, job: Any, *args: Any, timeout: float = 240.0, fresh: bool = False) -> list[Any]:
    """What ``job`` returned on each rank; shows the first rank's failure.

    ``fresh``: in processes of its own, for jobs that leave none usable.
    """
    if fresh:
        outcomes = Launch.fresh(world, job, *args, init=False, timeout=timeout, env=gpu_cases.ENVIRONMENT)
    else:
        outcomes = Launch.kept(world, job, *args, timeout=timeout, env=gpu_cases.ENVIRONMENT)
    for rank, outcome in enumerate(outcomes):
        if outcome.failure is not None:
            pytest.fail(f"rank {rank}: {outcome.failure.type_name}: {outcome.failure.text}\n{outcome.failure.trace}")
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(("backend", "world"), WORLDS, ids=lambda value: str(value))
def test_equals_the_embedded_buffer(backend: str, world: int) -> None:
    for rank, results in enumerate(on_gpus(world, gpu_cases.contract, backend)):
        wrong = [case for case, right in results.items() if not right]
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(results) > 50


@pytest.mark.parametrize(("backend", "world"), WORLDS, ids=lambda value: str(value))
def test_gradients_of_a_layer(backend: str, world: int) -> None:
    for rank, results in enumerate(on_gpus(world, gpu_cases.gradients, backend)):
        far = {case: value for case, value in results.items() if not value <= 1e-2}
        assert not far, f"rank {rank}: {far}"
        assert len(results) > 50


def test_hybrid_with_one_scale_out_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_cases.ENVIRONMENT, "MCORE_DEEPEP_V2_MODE", "hybrid")
    monkeypatch.setitem(gpu_cases.ENVIRONMENT, "MCORE_DEEPEP_V2_NUM_QPS", "129")
    for rank, results in enumerate(on_gpus(2, gpu_cases.contract, "deepep_v2")):
        assert not [case for case, right in results.items() if not right], rank


@pytest.mark.parametrize("world", [1, 2])
def test_a_padded_hidden_size_in_asynchronous_calls(world: int) -> None:
    for results in on_gpus(world, gpu_cases.padded_and_asynchronous):
        assert results == {"token": True, "expert": True}


def test_a_deterministic_receive_order_in_asynchronous_calls() -> None:
    for results in on_gpus(2, gpu_cases.deterministic_and_asynchronous):
        assert results == {"token": True, "expert": True}


def test_no_synchronisation_of_our_own() -> None:
    assert on_gpus(1, gpu_cases.no_synchronisation) == [12]


def test_sm_counts_that_deepep_receives() -> None:
    for seen in on_gpus(2, gpu_cases.chosen_num_sms):
        assert seen["20"] == seen["0"] == seen["estimate"]
        assert seen["32"] == 32
        assert seen["constructions"] == 3


def test_v1_carries_the_sm_count_that_is_wished_for() -> None:
    for seen in on_gpus(2, gpu_cases.num_sms_of_v1):
        usual = seen.pop("usual")
        assert seen == {"8": 8, "32": 32, "0": usual, "after": usual, "refused": True}


def test_step_0_compiles_nothing_after_warm_up() -> None:
    for seen in on_gpus(2, gpu_cases.warmed_up, timeout=300.0, fresh=True):  # a process keeps the kernels it has seen
        print(seen)
        assert seen["before"] > 0
        assert seen["after"] == seen["before"]
        assert seen["constructions"] == 1
        assert set(seen["tuned"]) == {False, True}


def test_v1_equals_megatron_core_bit_by_bit() -> None:
    for results in on_gpus(2, gpu_cases.v1_equals_megatron):
        if results is None:
            pytest.skip("megatron-core is not installed")
        wrong = [case for case, right in results.items() if not right]
        assert not wrong, wrong
