"""The plan beside the real DeepEP V2: bytes of the buffer to the byte, rows that arrive to 2 %; the doctor there."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_cases import E, H, K, M, join_nccl
from test_gpu import on_gpus

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent


def job_sizes(rank: int, world: int) -> list[tuple[dict[str, Any], int, int]]:
    """Sizes asked for, planned bytes, DeepEP's own hint."""
    join_nccl(rank, world)
    from deep_ep import ElasticBuffer

    from megatron_moe_v2.cli.plan.memory import num_buffer_bytes
    from megatron_moe_v2.cli.plan.model import Cluster

    group = dist.group.WORLD
    dist.all_reduce(torch.zeros(1, device="cuda"))  # DeepEP reads the communicator, which is there after a collective
    found = []
    shapes = ((4096, 2048, 8), (1366, 7168, 8), (8192, 3072, 4), (100, 256, 0))
    for shape, fp8, hybrid, multiple in itertools.product(shapes, *[(False, True)] * 3):
        ceiling, hidden, topk = shape
        hint = ElasticBuffer.get_buffer_size_hint(
            group,
            ceiling,
            hidden,
            num_topk=topk,
            use_fp8_dispatch=fp8,
            allow_hybrid_mode=hybrid,
            allow_multiple_reduction=multiple,
        )
        planned = num_buffer_bytes(
            Cluster(ranks=world),
            hidden=hidden,
            num_topk=topk,
            num_max_tokens_per_rank=ceiling,
            hybrid=hybrid,
            fp8=fp8,
            multiple_reduction=multiple,
        )
        found.append(({"shape": shape, "fp8": fp8, "hybrid": hybrid, "multiple": multiple}, planned, int(hint)))
    dist.destroy_process_group()
    return found


def job_rows(rank: int, world: int) -> tuple[int, int]:
    """Rows received over several dispatches, and tokens sent."""
    os.environ["MCORE_DEEPEP_V2_BACKEND"] = "deepep_v2"
    join_nccl(rank, world)
    from megatron_moe_v2 import close_buffers, fused_dispatch, prepare_buffer

    prepare_buffer(hidden=H, num_topk=K)
    draw, rows, calls = torch.Generator("cuda").manual_seed(rank), 0, 8
    for _ in range(calls):
        scores = torch.rand(M, E, device="cuda", generator=draw)
        weights, idx = scores.topk(K)
        x = torch.zeros(M, H, device="cuda", dtype=torch.bfloat16)
        rows += fused_dispatch(x, idx, weights, E, dist.group.WORLD)[0].shape[0]
    close_buffers()
    dist.destroy_process_group()
    return rows, calls * M


@pytest.mark.parametrize("world", [1, 2, 4])
def test_buffer_bytes_equal_deepeps_hint(world: int) -> None:
    for found in on_gpus(world, job_sizes):
        assert len(found) == 32
        assert [case for case, planned, hint in found if planned != hint] == []


@pytest.mark.parametrize("world", [2, 4])
def test_rows_received_are_the_expected_ones(world: int) -> None:
    from megatron_moe_v2.cli.plan.model import Cluster, Model
    from megatron_moe_v2.cli.plan.traffic import traffic

    sizes = Model(name="m", hidden=H, num_experts=E, num_topk=K, num_layers=1, expert_ffn=H)
    found = on_gpus(world, job_rows)
    rows, tokens = (sum(one[place] for one in found) for place in (0, 1))
    assert traffic(sizes, Cluster(ranks=world)).received == pytest.approx(rows / tokens, rel=0.02)


def test_doctor_finds_deepep_v2() -> None:
    command = [sys.executable, "-m", "megatron_moe_v2", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT)
    found = {one["id"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["deep_ep-classes"]["found"].startswith("ElasticBuffer (V2)")
    assert found["gpu"]["status"] in ("ok", "warn")
    assert found["nccl-loaded"]["status"] == "ok", found["nccl-loaded"]
