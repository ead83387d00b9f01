"""FP8 dispatch over the real DeepEP V2: the functions of ``test_fp8_dispatch``, which run there on the CPU.

The ranks of one test share the GPU where there are fewer. Blackwell's GEMMs are not run: of packed scales the layout is
tested.
"""

from __future__ import annotations

from typing import Any

import gpu_cases
import gpu_fp8_cases as cases
import pytest
from gpu_fp8_cases import Place
from test_gpu import on_gpus

pytestmark = pytest.mark.gpu

WORLDS = [1, 2]
every_kind = pytest.mark.parametrize("kind", ["float32", "ue8m0"])


def place(kind: str, **options: Any) -> Place:
    sizes = {"device": "cuda", "hidden": 1024, "ceiling": 384, "topk": 4, "local_experts": 8}
    return Place(**{**sizes, "kinds": (kind,), **options})


def check(world: int, job: Any, where: Place) -> None:
    for rank, wrong in enumerate(on_gpus(world, job, where, timeout=600.0)):
        assert wrong == [], f"rank {rank}"


@pytest.mark.parametrize("world", WORLDS)
@every_kind
def test_bytes_and_scales_are_the_sender_s(world: int, kind: str) -> None:
    check(world, cases.received, place(kind))


@pytest.mark.parametrize("world", WORLDS)
@every_kind
def test_gradients_are_the_bf16_path_s_on_the_quantised_values(world: int, kind: str) -> None:
    check(world, cases.gradients, place(kind))


@pytest.mark.parametrize("world", WORLDS)
def test_gradient_of_the_combine_in_fp8(world: int) -> None:
    check(world, cases.gradients_in_fp8, place("float32"))


def test_recomputation() -> None:
    check(2, cases.recomputed, place("float32"))


def test_captured_in_a_cuda_graph() -> None:
    check(2, cases.captured, place("float32"))


def test_a_hidden_size_that_is_padded() -> None:
    """1900 channels travel as 1920 FP8 ones, and come back as 2048 bfloat16 ones."""
    check(1, cases.received, place("float32", hidden=1900))
    check(1, cases.gradients, place("float32", hidden=1900))


def test_deterministic_receive_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_cases.ENVIRONMENT, "MCORE_DEEPEP_V2_DETERMINISTIC", "1")
    check(2, cases.received, place("float32"))


def test_hybrid_with_one_scale_out_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_cases.ENVIRONMENT, "MCORE_DEEPEP_V2_MODE", "hybrid")
    monkeypatch.setitem(gpu_cases.ENVIRONMENT, "MCORE_DEEPEP_V2_NUM_QPS", "129")
    check(2, cases.gradients, place("float32"))
