"""The doctor as a command: on this machine, without torch, and beside broken, foreign or doubled libraries."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads(re.search(r"```json\n(.*?)```", (ROOT / "docs/doctor.md").read_text(), re.DOTALL)[1])  # type: ignore[index]

TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def validate(value: Any, schema: dict[str, Any], place: str = "$") -> None:
    """The part of JSON Schema that the page uses."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    assert any(isinstance(value, TYPES[kind]) for kind in kinds), (place, kinds, value)
    assert value in schema.get("enum", [value]), place
    if isinstance(value, list):
        for index, item in enumerate(value):
            validate(item, schema.get("items", {"type": list(TYPES)}), f"{place}[{index}]")
    if isinstance(value, dict):
        properties, other = schema.get("properties", {}), schema.get("additionalProperties", {"type": list(TYPES)})
        assert set(schema.get("required", ())) <= set(value), place
        for name, item in value.items():
            assert name in properties or other is not False, (place, name)
            validate(item, properties.get(name) or other, f"{place}.{name}")


def doctor(
    *arguments: str,
    python: str = sys.executable,
    path: tuple[Path, ...] = (),
    env: dict[str, str] | None = None,
    package: Path = ROOT,
) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    """Exit status, report, findings by id; ``path`` goes before everything else on the module path."""
    prefixes = ("MCORE_", "EP_", "NCCL_", "COVERAGE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, (*path, package))), **(env or {})}
    command = [python, "-m", "megatron_moe_v2", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, cwd="/")
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    validate(report, SCHEMA)
    ids = [one["id"] for one in report["findings"]]
    assert len(ids) == len(set(ids))
    assert done.returncode == (report["status"] == "fail")
    return done.returncode, report, {one["id"]: one for one in report["findings"]}


def module(folder: Path, name: str, text: str) -> Path:
    """A stand-in package ``name`` in ``folder``."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(textwrap.dedent(text))
    return folder


def test_this_machine() -> None:
    import torch

    code, _, found = doctor(env={"MCORE_DEEPEP_V2_BACKEND": "embedded"})
    assert code == 0
    assert torch.__version__ in found["torch"]["found"]
    assert "EmbeddedElasticBuffer" in found["backend"]["found"]
    for one in found.values():
        assert one["status"] not in ("warn", "fail") or one["fix"], one


@pytest.mark.slow
def test_it_takes_less_than_five_seconds() -> None:
    assert min(doctor()[1]["seconds"] for _ in range(3)) < 5


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("doctor >&-", 0, ""),
        ("env --show > /dev/full", 1, "the output cannot be written"),
        ("doctor --selftest --timeout inf", 2, "at most 86400"),
        ("doctor --selftest --device cuda --problems", 1, "torch sees no GPU"),
    ],
)
def test_what_cannot_be(line: str, status: int, said: str) -> None:
    if "cuda" in line:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    command = f"{sys.executable} -m megatron_moe_v2 {line}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_missing_bytecode(tmp_path: Path) -> None:
    """Libraries whose bytecode is somewhere else, and which may write none."""
    env = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    code, _, found = doctor(env=env)
    assert code == 0
    assert found["bytecode"]["status"] == "warn"
    assert "PYTHONDONTWRITEBYTECODE" in found["bytecode"]["found"]
    folder = found["bytecode"]["fix"].rpartition(" ")[2]
    assert (Path(folder) / "torch").is_dir()


def test_a_helper_that_a_library_starts_is_not_waited_for(tmp_path: Path) -> None:
    text = "import os, subprocess\nhelper = subprocess.Popen(['sleep', '90'])\n"
    _, report, found = doctor(path=(module(tmp_path / "dies", "deep_ep", text + "os._exit(3)"),))
    assert report["seconds"] < 30
    assert "exit status 3" in found["deep_ep-import"]["found"]
    raises = text + "raise ImportError(f'helper {helper.pid}')"
    _, report, found = doctor(path=(module(tmp_path / "raises", "deep_ep", raises),))
    assert report["seconds"] < 30
    pid = re.search(r"helper (\d+)", found["deep_ep-import"]["found"])
    assert pid is not None
    with contextlib.suppress(FileNotFoundError):  # it ended with the child, if nobody has collected it yet
        assert Path(f"/proc/{pid[1]}/stat").read_text().split()[2] == "Z"


def test_an_environment_without_torch(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True, timeout=120)
    code, _, found = doctor(python=str(tmp_path / "bin/python"))
    assert code == 1
    assert found["torch"]["found"] == "torch is not installed"
    assert found["backend"]["status"] == "fail"
    assert found["settings"]["status"] == "ok"


BROKEN = {
    "raises": ("raise ImportError('libcudart.so.99: cannot open')", "ImportError: libcudart.so.99"),
    "exits": ("raise SystemExit('not here')", "SystemExit: not here"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "signal 11"),
    "ends-the-process": ("import os; os._exit(7)", "exit status 7"),
}


@pytest.mark.parametrize(("text", "cause"), BROKEN.values(), ids=BROKEN)
def test_broken_torch(tmp_path: Path, text: str, cause: str) -> None:
    code, _, found = doctor(path=(module(tmp_path, "torch", text),))
    assert code == 1
    assert found["torch"]["status"] == "fail"
    assert cause in found["torch"]["found"]


@pytest.mark.parametrize(("text", "cause"), BROKEN.values(), ids=BROKEN)
def test_broken_deep_ep(tmp_path: Path, text: str, cause: str) -> None:
    folder = module(tmp_path, "deep_ep", f"print('[\"torch\", {{}}]', flush=True)\n{text}")
    (folder / "deep_ep/buffer.py").touch()
    code, _, found = doctor(path=(folder,))
    assert code == 1
    assert found["torch"]["status"] == "ok"
    assert found["deep_ep-import"]["status"] == "fail"
    assert cause in found["deep_ep-import"]["found"]


def test_a_deep_ep_that_is_not_deepep(tmp_path: Path) -> None:
    code, _, found = doctor(path=(module(tmp_path, "deep_ep", "__version__ = '1.0.0'"),))
    assert code == 1
    assert "without DeepEP's buffers" in found["deep_ep-distribution"]["found"]


def test_a_sound_deep_ep_with_v2(tmp_path: Path) -> None:
    text = "class ElasticBuffer: pass\nclass Buffer: pass\n__version__ = '2.1.0'\n"
    folder = module(tmp_path, "deep_ep", text + "import os; os.environ['EP_JIT_CACHE_DIR'] = '/baked/in'\n")
    (folder / "deep_ep/buffer.py").touch()
    code, _, found = doctor(path=(folder,))
    assert code == 0
    assert found["deep_ep-classes"]["found"] == "ElasticBuffer (V2), Buffer (V1)"
    assert found["jit-cache"]["found"].startswith("/baked/in (EP_JIT_CACHE_DIR)")


@pytest.mark.parametrize(
    ("parts", "metadata", "status"),
    [
        ((), "Name: apex\nVersion: 0.9.10.dev0", "warn"),
        (("lib",), "Name: apex\nVersion: 0.9.10.dev0", "warn"),
        (("optimizers", "normalization"), "Name: apex\nVersion: 0.1", "ok"),
    ],
    ids=["namesake", "namesake-with-lib", "nvidia"],
)
def test_apex(tmp_path: Path, parts: tuple[str, ...], metadata: str, status: str) -> None:
    folder = module(tmp_path, "apex", "raise RuntimeError('not to be imported')")
    for part in parts:
        (folder / "apex" / part).mkdir()
    (folder / "apex.dist-info").mkdir()
    (folder / "apex.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\n{metadata}\n")
    (folder / "apex.dist-info/top_level.txt").write_text("apex\n")
    _, _, found = doctor(path=(folder,))
    assert found["apex"]["status"] == status
    assert metadata.rpartition(" ")[2] in found["apex"]["found"]


def nccl(folder: Path, version: int) -> Path:
    """A library that says it is this version of NCCL."""
    folder.mkdir(parents=True)
    source = folder / "nccl.c"
    source.write_text(f"int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}")
    subprocess.run(["gcc", "-shared", "-o", str(folder / "libnccl.so.2"), str(source)], check=True, timeout=60)
    return folder / "libnccl.so.2"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("versions", "duplicates", "loaded"),
    [([23007], "ok", "ok"), ([22703], "ok", "fail"), ([23007, 23004], "fail", "ok")],
    ids=["new", "old", "two"],
)
def test_loaded_nccl(tmp_path: Path, versions: list[int], duplicates: str, loaded: str) -> None:
    files = [nccl(tmp_path / str(version), version) for version in versions]
    text = f"import ctypes; kept = [ctypes.CDLL(file) for file in {[str(file) for file in files]}]"
    folder = module(tmp_path, "deep_ep", f"{text}\nclass ElasticBuffer: pass")
    (folder / "deep_ep/buffer.py").touch()
    code, _, found = doctor(path=(folder,))
    assert found["nccl-duplicates"]["status"] == duplicates
    assert found["nccl-loaded"]["status"] == loaded
    assert code == ("fail" in (duplicates, loaded))
    for version, file in zip(versions, files, strict=True):
        major, minor, patch = version // 10000, version % 10000 // 100, version % 100
        assert f"{major}.{minor}.{patch} at {file}" in found["nccl-loaded"]["found"]


def test_bad_and_contradictory_variables() -> None:
    code, report, found = doctor(
        env={
            "MCORE_DEEPEP_V2_MODE": "hybird",
            "MCORE_DEEPEP_V2_NUM_SMS": "many",
            "MCORE_DEEPEP_V2_NUM_QP": "5",
            "EP_DISABLE_GIN": "1",
            "NCCL_GIN_TYPE": "2",
            "EP_JIT_DEBUG": "yes",
        }
    )
    assert code == 1
    assert all(text in found["settings"]["found"] for text in ("MODE='hybird'", "NUM_SMS='many'"))
    assert "NUM_QP (did you mean MCORE_DEEPEP_V2_NUM_QPS?)" in found["unknown-variables"]["found"]
    assert found["conflict-gin-type-unused"]["status"] == "warn"
    assert "EP_JIT_DEBUG='yes'" in found["deep_ep-variables"]["found"]
    assert report["environment"]["MCORE_DEEPEP_V2_MODE"] == "hybird"


def test_backend_that_cannot_be_had() -> None:
    code, _, found = doctor(env={"MCORE_DEEPEP_V2_BACKEND": "deepep_v2"})
    assert code == 1
    assert found["deep_ep-distribution"]["status"] == "fail"
    assert "MCORE_DEEPEP_V2_BACKEND=deepep_v2" in found["backend"]["found"]


@pytest.mark.parametrize(
    "file", ["settings.py", "probe.py", "buffers/fabric.py", "cli/doctor/jit.py", "cli/doctor/system.py"]
)
def test_a_broken_package(tmp_path: Path, file: str) -> None:
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_moe_v2", tmp_path / "megatron_moe_v2", ignore=skip)
    (tmp_path / "megatron_moe_v2" / file).write_text("this is no Python\n")
    _, report, found = doctor(package=tmp_path)
    assert any("SyntaxError" in one["found"] for one in report["findings"])
    assert found["check-python" if "system" in file else "python"]["group"] == "system"
    assert found["apex"]["group"] == "libraries"


@pytest.mark.parametrize(
    "arguments", [["--ranks"], ["--nonsense"], ["--timeout", "0"]], ids=["ranks-alone", "unknown", "no-time"]
)
def test_wrong_usage(arguments: list[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "megatron_moe_v2", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, cwd=ROOT)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_text() -> None:
    environ = {**os.environ, "EP_SUPPRESS_NCCL_CHECK": "1"}
    command = [sys.executable, "-m", "megatron_moe_v2", "doctor", "--problems"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, cwd=ROOT)
    assert done.returncode == 0
    assert "warn  conflict-check-suppressed" in done.stdout
    assert "do: unset EP_SUPPRESS_NCCL_CHECK" in done.stdout
    assert "python" not in done.stdout.replace(sys.executable, "")
