"""``examples/pretrain.py`` as its readers run it: torchrun or plain Python in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import RankPool

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SECONDS = 240
SMALL = shlex.split(
    "--hidden 32 --blocks 2 --heads 2 --kv-heads 1 --head-dim 16 --experts 8 --expert-ffn 32 "
    "--global-batch 4 --seq-len 32 --warmup 4 --device cpu --no-plots"
)
Records = list[dict[str, Any]]


def command(ranks: int, *flags: object) -> list[str]:
    """One rank is plain Python, more are torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *torchrun, str(EXAMPLES / "pretrain.py"), *map(str, flags)]


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def train(ranks: int, out: Path, *flags: object) -> tuple[Records, str]:
    """Run to the end and return the step log and what was printed."""
    line = command(ranks, *flags, "--out", out)
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_log(out), done.stdout


def read_log(out: Path) -> Records:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(records: Records) -> list[float]:
    return [record["loss"] for record in records]


def assert_same_curve(left: Records, right: Records, steps: int) -> None:
    """Losses, gradient norms and loads agree over the first ``steps`` steps."""
    assert len(left) >= steps
    assert losses(left)[:steps] == pytest.approx(losses(right)[:steps], abs=1e-4)
    norms = [[record["grad_norm"] for record in records[:steps]] for records in (left, right)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    loads = [torch.tensor([record["load"] for record in records[:steps]]) for records in (left, right)]
    torch.testing.assert_close(*loads, atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Twelve steps of the small model on one rank."""
    records, _ = train(1, tmp_path_factory.mktemp("one"), *SMALL, "--steps", 12, "--no-save")
    return records


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_two_ranks_take_the_steps_of_one(layout: str, one_rank: Records, tmp_path: Path) -> None:
    flags = ("--steps", 12, "--no-save", "--layout", layout, "--expert-alignment", 1 if layout == "token" else 8)
    records, printed = train(2, tmp_path, *SMALL, *flags)
    assert_same_curve(records, one_rank, 12)
    assert "EmbeddedElasticBuffer" in printed
    assert "embedded.py" in printed
    assert "AdamW" in printed
    last = printed.strip().splitlines()[-1]
    assert last.startswith("loss trajectory: first=5.5")
    assert last.endswith("decreased=True")


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(2, 1, id="2-then-1"), pytest.param(1, 2, id="1-then-2", marks=pytest.mark.slow)]
)
def test_resumed_with_another_number_of_ranks_goes_on(
    before: int, after: int, one_rank: Records, tmp_path: Path
) -> None:
    train(before, tmp_path, *SMALL, "--steps", 12, "--stop-at", 6)
    records, printed = train(after, tmp_path, *SMALL, "--steps", 12, "--resume")
    assert "at step 6" in printed
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["ranks"] for record in records] == [before] * 6 + [after] * 6
    assert_same_curve(records, one_rank, 12)


def test_rank_without_data_takes_steps_with_zero_tokens(tmp_path: Path) -> None:
    """Five windows in batches of four: every second batch is one window, and the last rank has none."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 32 + 161 // 2)) * 2 + b".")
    flags = (*SMALL, "--steps", 6, "--no-save", "--data", text)
    one, _ = train(1, tmp_path / "one", *flags)
    two, _ = train(2, tmp_path / "two", *flags)
    assert_same_curve(two, one, 6)


@pytest.mark.slow
def test_rank_that_never_has_data(tmp_path: Path) -> None:
    records, _ = train(2, tmp_path, *SMALL, "--global-batch", 1, "--steps", 4, "--no-save")
    assert len(records) == 4
    assert losses(records)[-1] < losses(records)[0]


def test_interrupt_saves_on_all_ranks_and_the_run_can_go_on(tmp_path: Path) -> None:
    flags = (*SMALL, "--steps", 100_000, "--out", tmp_path)
    with running(command(2, *flags)) as process:
        wait_for_steps(tmp_path, 3)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=SECONDS)
    assert "stopped on request, saved" in printed
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    saved = int(checkpoint.name.removeprefix("step_"))
    assert len(read_log(tmp_path)) == saved
    records, _ = train(1, tmp_path, *SMALL, "--steps", 100_000, "--resume", "--stop-at", saved + 2)
    assert len(records) == saved + 2


@pytest.mark.slow
def test_resume_refuses_another_model(tmp_path: Path) -> None:
    train(1, tmp_path, *SMALL, "--steps", 1)
    line = command(1, *SMALL, "--experts", 4, "--resume", "--out", tmp_path)
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode != 0
    assert "'experts': 8" in done.stderr


def test_expert_weights_do_not_depend_on_the_number_of_ranks(ranks1: RankPool, ranks2: RankPool) -> None:
    (alone,) = ranks1.run(initial_weights, 3)
    first, second = ranks2.run(initial_weights, 3)
    assert not first[1].keys() & second[1].keys()
    for name, weight in alone[0].items():
        assert torch.equal(weight, first[0][name])
        assert torch.equal(weight, second[0][name])
    together = first[1] | second[1]
    assert together.keys() == alone[1].keys()
    for key, weight in alone[1].items():
        assert torch.equal(weight, together[key])
    assert not torch.equal(alone[1]["blocks.0.moe.experts.down", 0], alone[1]["blocks.0.moe.experts.down", 1])
    assert not torch.equal(alone[1]["blocks.0.moe.experts.down", 0], alone[1]["blocks.1.moe.experts.down", 0])


def initial_weights(rank: int, world: int, seed: int) -> tuple[dict[str, torch.Tensor], dict[Any, torch.Tensor]]:
    """Dense weights by name, and this rank's expert weights by (name, global expert)."""
    sys.path.insert(0, str(EXAMPLES))
    import moe_model

    config = moe_model.ModelConfig(
        hidden=16, blocks=2, heads=2, kv_heads=1, head_dim=8, experts=4, top_k=2, expert_ffn=8
    )
    model = moe_model.MoELanguageModel(
        config, rank=rank, seed=seed, compute_dtype=torch.float32, device=torch.device("cpu")
    )
    dense, experts = {}, {}
    for name, weight in model.named_parameters():
        if ".experts." not in name:
            dense[name] = weight.detach().clone()
            continue
        for local, part in enumerate(weight.detach().unbind(0)):
            experts[name, rank * weight.shape[0] + local] = part.clone()
    return dense, experts


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "last"), [("token", 300), ("expert", 60)])
def test_tiny_preset_on_one_and_two_ranks(layout: str, last: int, tmp_path: Path) -> None:
    flags = ("--preset", "tiny", "--device", "cpu", "--layout", layout, "--no-save", "--stop-at", last)
    one, _ = train(1, tmp_path / "one", *flags)
    two, printed = train(2, tmp_path / "two", *flags)
    assert_same_curve(two, one, 50)
    ends = [sum(losses(records)[-20:]) / 20 for records in (one, two)]
    assert ends[0] == pytest.approx(ends[1], rel=0.01)
    assert losses(two)[0] == pytest.approx(5.5, abs=0.15)
    assert ends[1] < 3.0
    assert "decreased=True" in printed


@pytest.mark.slow
def test_tiny_preset_stopped_and_resumed_with_two_then_one_rank(tmp_path: Path) -> None:
    flags = ("--preset", "tiny", "--device", "cpu", "--steps", 90)
    whole, _ = train(2, tmp_path / "whole", *flags, "--no-save")
    train(2, tmp_path / "parts", *flags, "--stop-at", 30)
    train(2, tmp_path / "parts", *flags, "--stop-at", 60, "--resume")
    parts, _ = train(1, tmp_path / "parts", *flags, "--resume")
    assert_same_curve(parts, whole, 90)


@contextmanager
def running(line: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process whose output is collected; killed with its children if the test fails."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(line, env=environment(), **streams)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(SECONDS)


def wait_for_steps(out: Path, steps: int) -> None:
    end = time.monotonic() + SECONDS
    while not (out / "log.jsonl").exists() or len(read_log(out)) < steps:
        assert time.monotonic() < end, "the run took no step"
        time.sleep(0.2)
