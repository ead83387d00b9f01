"""``examples/megatron_pretrain.py`` as its readers run it: torchrun, megatron-core's model, optimizer and schedule."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "megatron_pretrain.py"
SECONDS = 240
SMALL = shlex.split("--hidden 64 --heads 4 --expert-ffn 64 --global-batch 4 --micro-batch 1 --seq-len 64")
PATHS = ("alltoall", "flex/token", "flex/expert")
Records = list[dict[str, Any]]


def train(ranks: int, out: Path, path: str, *flags: object) -> tuple[Records, str]:
    """Run to the end; the step log and what was printed."""
    dispatcher, _, layout = path.partition("/")
    which = ("--dispatcher", dispatcher, *(("--layout", layout) if layout else ()))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    line = (*torchrun, SCRIPT, "--device", "cpu", "--no-plots", "--out", out, *which, *flags)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(list(map(str, line)), env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()], done.stdout


def assert_same_curve(runs: list[Records], steps: int) -> None:
    assert [len(records) for records in runs] == [steps] * len(runs)
    for left, right in itertools.combinations(runs, 2):
        for what, bound in (("loss", {"abs": 1e-4}), ("grad_norm", {"rel": 1e-3})):
            curves = [[record[what] for record in records] for records in (left, right)]
            assert curves[0] == pytest.approx(curves[1], **bound)
        assert [record["load"] for record in left] == [record["load"] for record in right]


def test_three_dispatchers_take_the_same_steps_and_say_what_they_use(tmp_path: Path) -> None:
    runs, printed = zip(*(train(2, tmp_path / path, path, *SMALL, "--steps", 5) for path in PATHS), strict=True)
    assert_same_curve(list(runs), 5)
    assert runs[0][0]["loss"] == pytest.approx(5.6, abs=0.2)  # ln 256 = 5.55
    alltoall, token, expert = printed
    assert "MoEAlltoAllTokenDispatcher" in alltoall
    assert "binding: token_dispatcher.fused_dispatch = megatron_moe_v2." in token
    assert "binding: token_dispatcher._DeepepManager = megatron.core." in token
    assert "binding: token_dispatcher._DeepepManager = megatron_moe_v2." in expert
    for text in (token, expert):
        assert "MoEFlexTokenDispatcher" in text
        assert "embedded.py), " in text
        assert "because the group has no CUDA device" in text


@pytest.mark.slow
def test_fifty_steps_of_the_three_dispatchers_are_one_curve(tmp_path: Path) -> None:
    runs = [train(2, tmp_path / path, path, "--steps", 50)[0] for path in PATHS]
    assert_same_curve(runs, 50)
    losses = [record["loss"] for record in runs[0]]
    assert sum(losses[-10:]) / 10 < losses[0] - 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--tp 2 --shared-ffn 32 --recompute", id="expert-tp2-shared-recompute"),
    ],
)
def test_four_ranks_in_other_shapes_take_the_same_steps(flags: str, tmp_path: Path) -> None:
    paths = ("alltoall", "flex/expert")
    runs = [train(4, tmp_path / path, path, *SMALL, "--steps", 4, *flags.split())[0] for path in paths]
    assert_same_curve(runs, 4)
