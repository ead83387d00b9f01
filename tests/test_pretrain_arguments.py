"""The examples refuse a place that they cannot write to, before they build anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("--steps", "0", "--device", "cpu")


def refused(*flags: object, script: str = "pretrain.py") -> str:
    line = [sys.executable, str(ROOT / "examples" / script), *FLAGS, *map(str, flags)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "buffer:" not in done.stdout
    (last,) = done.stderr.splitlines()
    return last


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refused("--out", tmp_path / "file").startswith("pretrain.py: --out: cannot write")
    found = refused("--out", tmp_path, "--loss-log", tmp_path / "file/log")
    assert found == f"pretrain.py: --loss-log: cannot write {tmp_path}/file/log: {tmp_path}/file is no folder"


def test_reinforcement_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    last = refused("--out", tmp_path / "file", script="rl_finetune.py")
    assert last.startswith("rl_finetune.py: --out: cannot write")


def test_a_read_only_file_system() -> None:
    folder = next((place for place in map(Path, ("/sys", "/proc/sys")) if not os.access(place, os.W_OK)), None)
    if folder is None:
        pytest.skip("no folder here that this user may not write to")
    assert refused("--out", folder / "new/deeper").endswith(f"{folder} is not writable")


def test_a_run_that_writes_only_a_log_needs_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import pretrain
    finally:
        sys.path.remove(str(ROOT / "examples"))
    flags = ["--out", str(tmp_path / "file"), "--loss-log", str(tmp_path / "log.jsonl")]
    only_log, more = ([*flags, "--no-save", "--no-plots"], flags)
    pretrain.require_writable("x", pretrain.places(pretrain.parse_arguments(only_log)))
    with pytest.raises(SystemExit, match="--out"):
        pretrain.require_writable("x", pretrain.places(pretrain.parse_arguments(more)))
