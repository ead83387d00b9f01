"""One Megatron MoE layer through our layouts beside Megatron's alltoall dispatcher: real DeepEP V2 and Transformer
Engine's grouped MLP on the GPU, and the same cases on the CPU with the embedded buffer and local experts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_megatron_cases as cases
import pytest
import torch
from gpu_megatron_cases import CASES, CPU_BF16, CPU_FP32, GPU, Place, Topology
from launch import Launch

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).resolve().parent.parent
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron is made CPU-capable only where there is no GPU")
TOPOLOGIES = {"ep2": Topology(world=2), "ep4": Topology(world=4), "tp2-ep2": Topology(world=4, tensor=2)}


def run(place: Place, topology: Topology, timeout: float) -> list[Any]:
    """What :func:`gpu_megatron_cases.layers` returned on each rank."""
    env = cases.environment(place)
    outcomes = Launch.fresh(
        topology.world, cases.layers, place, topology, init=False, timeout=timeout, env=env, grace=30.0
    )
    for rank, outcome in enumerate(outcomes):
        if outcome.failure is not None:
            pytest.fail(f"rank {rank}: {outcome.failure.type_name}: {outcome.failure.text}\n{outcome.failure.trace}")
    return [outcome.value for outcome in outcomes]


def check(place: Place, topology: Topology, found: list[Any]) -> None:
    far, worst = [], dict.fromkeys(cases.PATHS[1:], (0.0, 0.0, ""))
    for rank, result in enumerate(found):
        for what, (whole, row) in result["differences"].items():
            if not (whole <= place.bounds[0] and row <= place.bounds[1]):
                far.append(f"rank {rank}: {what}: {whole:.1e} of the whole, {row:.1e} of a row")
            path = what.split(": ")[1]
            worst[path] = max(worst[path], (whole, row, what))
    print(found[0]["used"], worst, sep="\n")
    assert not far, "\n".join([f"bounds {place.bounds}", *far])
    assert {what.split(": ")[0] for what in found[0]["differences"]} == {case.name for case in CASES}
    for result in found:
        facts = result["facts"]
        assert facts["plain"]["selections"] == place.tokens * place.topk
        assert 0 < facts["capacity factor"]["selections"] < place.tokens * place.topk
        assert facts["an expert and a rank without tokens"]["idle"] == cases.idle_experts(place, topology, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
def test_layer_on_deepep_v2_equals_alltoall_within_bf16_rounding(topology: Topology) -> None:
    found = run(GPU, topology, timeout=400.0)
    check(GPU, topology, found)
    for used in found[0]["used"].values():
        assert "deepep_v2" in used.lower() or "deep_ep" in used.lower()
        assert used.endswith("TEGroupedMLP")


@NO_GPU
@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(CPU_FP32, "ep2", id="fp32-ep2"),
        pytest.param(CPU_BF16, "ep2", id="bf16-ep2", marks=pytest.mark.slow),
        pytest.param(CPU_BF16, "tp2-ep2", id="bf16-tp2-ep2", marks=pytest.mark.slow),
    ],
)
def test_same_cases_on_the_cpu(place: Place, name: str) -> None:
    found = run(place, TOPOLOGIES[name], timeout=180.0)
    check(place, TOPOLOGIES[name], found)
    for used in found[0]["used"].values():
        assert "EmbeddedElasticBuffer" in used
        assert used.endswith("SequentialMLP")


@NO_GPU
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_timing_script_runs_on_the_cpu(ranks: int) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    line = [sys.executable, *torchrun, str(ROOT / "scripts" / "gpu_megatron.py"), "--device", "cpu", "--rounds", "2"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| flex/expert over alltoall |") == 2
