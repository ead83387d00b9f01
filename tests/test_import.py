"""What importing costs and touches, the public names, the command, and what the built distributions hold."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import megatron_moe_v2

ROOT = Path(__file__).parent.parent
ABSENT = importlib.util.find_spec("deep_ep") is None


def python(*arguments: str, coverage: bool = False) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, without coverage unless asked for: it would be part of what is measured."""
    environment = {name: value for name, value in os.environ.items() if coverage or not name.startswith("COVERAGE")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_package_import_loads_nothing_else() -> None:
    code = (
        "import sys, megatron_moe_v2 as m; m.Settings; m.MoEError; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = python("-W", "error", "-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.skipif(not ABSENT, reason="deep_ep is installed and takes its own time")
def test_fused_a2a_import_is_quick() -> None:
    """Under 50 ms beyond torch, in the best of three fresh children of one process that has imported torch."""
    code = """
import os, time, torch
for _ in range(3):
    if not os.fork():
        start = time.perf_counter()
        import megatron_moe_v2.fused_a2a
        milliseconds = (time.perf_counter() - start) * 1e3
        assert not torch.cuda.is_initialized()
        print(milliseconds, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
    done = python("-W", "ignore::DeprecationWarning", "-c", code)  # of a fork beside numpy's threads
    assert done.stderr == ""
    times = [float(text) for text in done.stdout.split()]
    assert len(times) == 3
    assert min(times) < 50, times


@pytest.mark.skipif(not ABSENT, reason="deep_ep is installed and may print")
def test_fused_a2a_import_prints_nothing() -> None:
    done = python("-W", "error", "-c", "import megatron_moe_v2.fused_a2a")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", megatron_moe_v2.__all__)
def test_public_name_resolves(name: str) -> None:
    value = getattr(megatron_moe_v2, name)
    assert name in dir(megatron_moe_v2)
    if not name.startswith("HAVE_"):
        assert value.__doc__
        assert value.__module__ == f"megatron_moe_v2.{megatron_moe_v2._MODULES[name]}"


def test_public_names_are_listed_alike_everywhere() -> None:
    tree = ast.parse(Path(megatron_moe_v2.__file__).read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == megatron_moe_v2._MODULES
    assert sorted(typed) == sorted(megatron_moe_v2.__all__)


def test_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fused_dispatsch'"):
        _ = megatron_moe_v2.fused_dispatsch


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "bench"),
        (["--version"], 0, megatron_moe_v2.__version__),
        ([], 2, "COMMAND"),
        (["bensch"], 2, "invalid choice: 'bensch'"),
        (["bench", "--help"], 0, "bench"),
    ],
    ids=["help", "version", "no-command", "unknown-command", "subcommand-help"],
)
def test_command(arguments: list[str], code: int, text: str) -> None:
    done = python("-m", "megatron_moe_v2", *arguments, coverage=True)
    assert done.returncode == code
    assert text in (done.stderr if code else done.stdout)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_distributions(tmp_path: Path) -> None:
    """The sdist, and the wheel built from it, hold what they should; the wheel is pure Python."""
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=unwanted)
    done = python("-m", "build", "--outdir", str(tmp_path), str(tmp_path / "source"))
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"megatron_moe_v2-{megatron_moe_v2.__version__}-py3-none-any.whl"
    package = ROOT / "megatron_moe_v2"
    sources = {str(file.relative_to(ROOT)) for file in package.rglob("*.py")} | {"megatron_moe_v2/py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    assert {name for name in in_wheel if ".dist-info/" not in name} == sources
    assert any(name.endswith("/licenses/LICENSE") for name in in_wheel)

    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    others = {"LICENSE", "README.md", "CHANGELOG.md", "setup.py", "scripts/test.sh", "tests/test_import.py"}
    assert sources | others <= in_sdist
