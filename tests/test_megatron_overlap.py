"""Megatron's fine-grained overlap on our functions: its own schedule of forwards beside backwards."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from launch import RemoteError
from megatron_cases import LAYOUTS, POOLS, Case
from megatron_schedule import OVERLAP, compare_overlapped

pytestmark = pytest.mark.megatron

SHARED = {**OVERLAP, "config": {**OVERLAP["config"], "moe_shared_expert_intermediate_size": 8}}


@pytest.mark.parametrize("adversary", [None, 3], ids=["", "adversary"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (4, 2)], ids=["EP2", "TP2xEP2"])
def test_schedule_gives_losses_and_gradients_of_alltoall(
    world: int, tensor: int, layout: str, adversary: int | None
) -> None:
    case = Case(**SHARED, tensor=tensor, adversary=adversary)
    assert POOLS[world].run(compare_overlapped, layout, case) == [[]] * world


def test_the_rows_at_the_experts_must_not_be_freed() -> None:
    """Megatron's own rule frees them, and the experts' backward then has nothing to read."""
    with pytest.raises(RemoteError, match="data is not allocated"):
        POOLS[2].run(compare_overlapped, "expert", Case(**OVERLAP), True)
