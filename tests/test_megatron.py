"""megatron-core's MoE layer through our token and expert layouts: output and gradients of the alltoall dispatcher."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from launch import Launch
from megatron_cases import LAYOUTS, OTHER_CORE, POOLS, Case, compare
from megatron_results import against_dense, contract, padded_counts, rows_sent, without_gradients
from megatron_schedule import OVERLAP, other_core

pytestmark = pytest.mark.megatron

SHARED = {"moe_shared_expert_intermediate_size": 8}

PADDED = {"fp8": "hybrid", "moe_router_padding_for_quantization": True}
"""Megatron's own check of these wants Transformer Engine; its torch experts compute with them as without."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "capacity factor with drops": {"config": {"moe_expert_capacity_factor": 0.5}},
    "bfloat16": {"dtype": torch.bfloat16},
    "experts and ranks that get nothing": {"only_experts": (0, 1)},
    "router padding": {"forced": PADDED},
    "shared experts": {"config": SHARED},
    "shared experts with overlap": {"config": {**SHARED, "moe_shared_expert_overlap": True}},
    "selective recompute": {"config": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
    "full recompute": {"whole_recompute": True},
    "router in float64": {"config": {"moe_router_dtype": "fp64"}},
}


@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (4, 1), (4, 2)], ids=["EP2", "EP4", "TP2xEP2"])
def test_layer_equals_alltoall(world: int, tensor: int, adversary: int | None) -> None:
    cases = {name: Case(tensor=tensor, adversary=adversary, **options) for name, options in CASES.items()}
    outcomes = POOLS[world].run(compare, tensor, cases, LAYOUTS, timeout=120.0)
    assert [line for lines in outcomes for line in lines] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_experts_equal_a_dense_layer(layout: str) -> None:
    case = Case(tensor=2, config=SHARED, adversary=3)
    assert POOLS[4].run(against_dense, layout, case) == [[]] * 4


def test_an_extra_all_reduce_would_differ_from_the_dense_layer() -> None:
    case = Case(tensor=2, config=SHARED)
    assert all(POOLS[4].run(against_dense, "token", case, True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_without_gradients(layout: str) -> None:
    assert POOLS[2].run(without_gradients, layout, Case()) == [[], []]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_megatron_does_to_the_results(layout: str) -> None:
    """Storages of their own, freed after use; changed in place; ``grad_fn`` and its sequence number; handles let go."""
    assert POOLS[2].run(contract, layout, Case(adversary=3)) == [[], []]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_capacity_factor_drops_is_not_sent(layout: str) -> None:
    case = Case(config={"moe_expert_capacity_factor": 0.5})
    for rows, selected in POOLS[2].run(rows_sent, layout, case):
        assert rows == selected
        assert selected < 2 * 2 * case.ceiling()  # top-2 of the tokens of two ranks


def test_rows_are_padded_for_quantised_experts() -> None:
    assert POOLS[2].run(padded_counts, Case(forced=PADDED, adversary=3)) == [[], []]


@pytest.mark.skipif(not OTHER_CORE, reason="MEGATRON_CORE_0_16 does not say where megatron-core 0.16 is")
def test_layer_equals_alltoall_in_0_16() -> None:
    """The same cases, but for what 0.16 refuses itself: shared experts with overlap under the flex dispatcher."""
    cases = {name: Case(adversary=3, **options) for name, options in CASES.items() if "with overlap" not in name}
    overlapped = Case(**OVERLAP, adversary=3)
    environment = {"PYTHONPATH": os.pathsep.join([OTHER_CORE, *(entry for entry in sys.path if entry)])}
    for outcome in Launch.fresh(4, other_core, cases, overlapped, timeout=120.0, env=environment):
        assert outcome.failure is None, outcome.failure
        assert outcome.value == ("0.16.1", [])
