"""``prepare``, the ceiling, SM counts and the metrics of a Megatron model."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron_cases import LAYOUTS, POOLS
from megatron_models import counted, from_arguments, prepared, refused, sm_counts
from scene import environment

from megatron_moe_v2 import InputError
from megatron_moe_v2.megatron.ceiling import ceiling, tokens_per_rank

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_0_constructs_nothing(layout: str) -> None:
    """One buffer for each distinct need, whatever the number of layers and chunks, at the installed ceiling."""
    wanted = {"constructions": 2, "in step 0": 0, "specs": [(2, 16), (1, 16)]}
    wanted |= {"the same again": True, "with another ceiling": 2}
    assert POOLS[2].run(prepared, layout) == [wanted, wanted]


def test_what_cannot_run_is_refused_with_the_reason() -> None:
    for said in POOLS[2].run(refused):
        assert "MegatronError: prepare() without install()" in said["without install"]
        assert "got MoEAlltoAllTokenDispatcher, expected MoEFlexTokenDispatcher" in said["alltoall"]
        assert said["nothing to prepare"] is None
        assert "InputError: ceiling: got seq_length=8, micro_batch_size=None, expected both" in said["one of two"]
        assert "RankMismatchError" in said["sequences"]
        assert "moe_flex_dispatcher_backend: got 'hybridep'" in said["another backend"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_per_expert_reach_megatrons_tracker(layout: str) -> None:
    """All tokens of two ranks select both experts of rank 0: 32 rows each; recomputation and evaluation count not."""
    loaded, idle = POOLS[2].run(counted, layout)
    assert loaded == {"max_tokens_per_expert": [64.0], "mean_tokens_per_expert": [64.0]}
    assert idle == {"max_tokens_per_expert": [0.0], "mean_tokens_per_expert": [0.0]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, [0, 0]),
        ({"moe_flex_dispatcher_num_sms": 24}, [24, 24]),
        ({"moe_flex_dispatcher_num_sms": 20}, [20, None]),
        ({"moe_deepep_num_sms": 16}, [16, 16]),
    ],
    ids=["unset", "set", "set to Megatron's own default", "by its old name"],
)
def test_sm_count_is_the_users(config: dict[str, Any], wanted: list[int | None], layout: str) -> None:
    """Megatron passes 20 in the token layout whoever set it, so only ``prepare`` knows that the user did."""
    expected = [(20 if layout == "expert" else 0) if count is None else count for count in wanted]
    assert POOLS[2].run(sm_counts, layout, config) == [expected, expected]


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ({}, 4096 * 2),
        ({"tensor": 4}, 4096 * 2),
        ({"tensor": 4, "sequence_parallel": True}, 1024 * 2),
        ({"context": 2}, 2048 * 2),
        ({"tensor": 4, "sequence_parallel": True, "context": 2}, 512 * 2),
        ({"context": 3}, 1366 * 2),
    ],
    ids=["whole", "TP", "TP with sequence parallelism", "CP", "both", "rounded up"],
)
def test_tokens_of_a_rank(sizes: dict[str, Any], tokens: int) -> None:
    assert tokens_per_rank(4096, 2, **sizes) == tokens


class Sizes:
    tensor_model_parallel_size = 2
    sequence_parallel = True
    context_parallel_size = 1


class HybridSizes(Sizes):
    context_parallel_size = 8
    hybrid_context_parallel = True
    max_seqlen_per_dp_cp_rank = 1000


def test_precedence_of_the_ceiling() -> None:
    derived: dict[str, Any] = {"seq_length": 64, "micro_batch_size": 2, "config": Sizes()}
    with environment(MAX_TOKENS_PER_RANK=100):
        assert (ceiling(7, **derived).tokens, ceiling(7, **derived).source) == (7, "max_tokens_per_rank=")
        assert ceiling(**derived).tokens == 100
        assert ceiling(**derived).source == "MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK"
    with environment(MAX_TOKENS_PER_RANK=None):
        assert (ceiling(**derived).tokens, ceiling(**derived).source) == (64, "seq_length= and micro_batch_size=")
        assert ceiling(**{**derived, "config": HybridSizes()}).tokens == 1000
        assert (ceiling().tokens, ceiling().source) == (8192, "the default")


@pytest.mark.parametrize(
    "options",
    [{"explicit": -1}, {"explicit": "8"}, {"seq_length": 8}, {"seq_length": 0, "micro_batch_size": 1}],
    ids=["negative", "no number", "one of two", "zero"],
)
def test_ceilings_that_cannot_be(options: dict[str, Any]) -> None:
    with environment(MAX_TOKENS_PER_RANK=None), pytest.raises(InputError):
        ceiling(**options)


def test_ceiling_from_megatrons_arguments() -> None:
    """Once, with its source and what longer sequences would need."""
    text = (
        "ceiling of 16 tokens a rank, from Megatron's arguments; evaluation on longer sequences needs more, "
        "32 for 16: set MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK"
    )
    assert POOLS[2].run(from_arguments) == [([text], [16])] * 2
