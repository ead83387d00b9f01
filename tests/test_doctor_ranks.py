"""The doctor on several ranks: what differs, who is missing, and the self-test's count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import RankPool

from megatron_moe_v2.cli import measure
from megatron_moe_v2.cli.doctor import selftest

ROOT = Path(__file__).parent.parent


def torchrun(folder: Path, world: int, odd: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run the doctor on local ranks; ``odd`` runs first on rank 1. Exit status, standard error, rank 0's report."""
    script = folder / "odd_rank.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n"
        f"    {odd}\n"
        "from megatron_moe_v2.cli import main\nsys.exit(main(['doctor', *sys.argv[1:]]))\n"
    )
    prefixes = ("MCORE_", "EP_", "NCCL_", "COVERAGE", "TORCHELASTIC")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += [str(script), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, cwd=folder)
    return done.returncode, done.stderr, json.loads(done.stdout)


def test_a_rank_that_differs(tmp_path: Path) -> None:
    odd = "os.environ.update(MCORE_DEEPEP_V2_MODE='direct', NCCL_DEBUG='INFO')"
    code, _, report = torchrun(tmp_path, 2, odd, "--ranks")
    assert code == 1
    found = {one["id"]: one for one in report["findings"]}
    assert found["differs-MCORE_DEEPEP_V2_MODE"]["found"] == "rank 0: (unset); rank 1: direct"
    assert found["differs-MCORE_DEEPEP_V2_MODE"]["status"] == "fail"
    assert found["differs-NCCL_DEBUG"]["status"] == "warn"
    assert {name for name in found if name.startswith("differs-")} == {
        "differs-settings",
        "differs-MCORE_DEEPEP_V2_MODE",
        "differs-NCCL_DEBUG",
    }
    assert set(report["ranks"]) == {"0", "1"}


@pytest.mark.slow
def test_a_rank_without_torch_says_so_itself_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken/torch").mkdir(parents=True)
    (tmp_path / "broken/torch/__init__.py").write_text("raise ImportError('libcudart.so.99')")
    odd = f"sys.path.insert(0, {str(tmp_path / 'broken')!r})"
    code, noise, report = torchrun(tmp_path, 2, odd, "--ranks", "--timeout", "10")
    assert code == 1
    found = {one["id"]: one for one in report["findings"]}
    assert "no word from rank 1 of 2" in found["ranks"]["found"]
    assert "libcudart.so.99" in noise


@pytest.mark.slow
def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    code, _, report = torchrun(tmp_path, 2, "time.sleep(25); sys.exit(0)", "--ranks", "--timeout", "10")
    found = {one["id"]: one for one in report["findings"]}
    assert code == 1
    assert "no word from rank 1 of 2" in found["ranks"]["found"]


@pytest.mark.slow
def test_equal_ranks_and_self_test_under_a_launcher(tmp_path: Path) -> None:
    code, noise, report = torchrun(tmp_path, 2, "pass", "--ranks", "--selftest")
    found = {one["id"]: one for one in report["findings"]}
    assert code == 0, noise
    assert found["differences"]["status"] == "ok"
    assert "2 ranks on cpu" in found["selftest"]["found"]
    assert "exact 32/32" in found["selftest"]["found"]


@pytest.mark.slow
def test_self_test_alone() -> None:
    command = [sys.executable, "-m", "megatron_moe_v2", "doctor", "--selftest", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    (found,) = (one for one in json.loads(done.stdout)["findings"] if one["id"] == "selftest")
    assert done.returncode == 0
    assert "per-expert payloads exact 32/32, wrong sums 0, wrong gradients 0" in found["found"]


def test_self_test_that_takes_too_long() -> None:
    (found,) = selftest.selftest_check("cpu", 0.2)
    assert found.status == "fail"
    assert "not finished within" in found.found


def test_self_test_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MCORE_DEEPEP_V2_BACKEND", "deepep_v2")
    (found,) = selftest.selftest_check("cpu", 100)
    assert found.status == "fail"
    assert "MCORE_DEEPEP_V2_BACKEND=deepep_v2" in found.found


def job_round_trip(rank: int, world: int, spoil: str) -> dict[str, Any]:
    """The round trip with one value changed on rank 0: in a row, in the sum, or nowhere."""
    original = measure.subjects

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        subjects = original(*args, **kwargs)
        for one in subjects:
            if spoil == "row" and rank == 0 and one.name == "expert":
                dispatch = one.dispatch

                def changed(*inputs: Any, dispatch: Any = dispatch) -> Any:
                    sent = dispatch(*inputs)
                    sent.tokens.data[3, 17] += 1
                    return sent

                object.__setattr__(one, "dispatch", changed)
            if spoil == "sum" and rank == 0 and one.name == "token":
                combine = one.combine

                def shifted(rows: Any, sent: Any, combine: Any = combine) -> Any:
                    first = torch.zeros(selftest.TOKENS, 1, dtype=torch.bfloat16)
                    first[5] = 1
                    return combine(rows, sent) + first

                object.__setattr__(one, "combine", shifted)
        return subjects

    measure.subjects = spoiled
    try:
        return selftest.round_trip(torch.device("cpu"))
    finally:
        measure.subjects = original


@pytest.mark.parametrize(
    ("spoil", "exact", "sums"),
    [("nothing", 32, 0), ("row", 31, 1), ("sum", 32, selftest.HIDDEN)],
    ids=["sound", "one-wrong-value-in-a-row", "one-wrong-sum"],
)
def test_exact_payloads_are_counted(ranks2: RankPool, spoil: str, exact: int, sums: int) -> None:
    for facts in ranks2.run(job_round_trip, spoil):
        assert (facts["payloads"], facts["exact"], facts["wrong_sums"]) == (32, exact, sums)
        assert (facts["ranks"], facts["kind"], facts["wrong_gradients"]) == (2, "EmbeddedElasticBuffer", 0)
