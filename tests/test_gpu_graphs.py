"""Static shapes and CUDA graphs on the real DeepEP V2. Skipped where there is no GPU or no ``deep_ep``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gpu_graphs
import pytest
from test_gpu import on_gpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("world", "mode"), [(1, "direct"), (2, "direct"), (2, "hybrid")], ids=str)
def test_a_captured_decode_equals_eager_bit_by_bit(world: int, mode: str) -> None:
    for seen in on_gpus(world, gpu_graphs.decode, mode, timeout=300.0):
        print(seen)
        assert {case: wrong for case, wrong in seen.items() if ":" not in case} == {
            "token 1": 0,
            "expert 1": 0,
            "expert 128": 0,
            "constructions": 1,
        }


@pytest.mark.parametrize("world", [1, 2])
def test_a_captured_training_step_equals_eager(world: int) -> None:
    for seen in on_gpus(world, gpu_graphs.training, timeout=300.0):
        noise = {case: value for case, value in seen.items() if isinstance(value, tuple)}
        print({case: tuple(f"{part:.1e}" for part in value) for case, value in noise.items()})
        assert not [case for case, value in seen.items() if value is False]
        assert not {case: value for case, value in noise.items() if not value[0] <= 2 * value[1] + 1e-3}


def test_refusals_leave_the_process_usable() -> None:
    for seen in on_gpus(2, gpu_graphs.refusals, timeout=300.0):
        assert {case: kind for case, (kind, _, _) in seen.items()} == {
            "a dispatch that synchronises": "CaptureError",
            "construction": "CaptureError",
            "close while captured": "CapturedBufferError",
            "replay": "nothing",
            "other shape": "InputError",
            "close with release": "nothing",
            "replay after close": "BufferClosedError",
            "close after the graph is dropped": "nothing",
            "deterministic, expert layout": "CaptureError",
            "deterministic, token layout": "nothing",
            "embedded": "CaptureError",
            "embedded, eager": "nothing",
        }, seen


def test_probe_of_captures() -> None:
    script = Path(__file__).parent.parent / "scripts" / "probe_capture.py"
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=400)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("outside a capture: works") == 2
    assert ended.stdout.count("inside a capture: exit code") == 2
