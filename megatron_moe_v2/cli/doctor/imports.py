"""What importing torch and ``deep_ep`` does, observed in a child process.

A broken library can raise, print, hang or end the process. In a child none of that reaches the doctor. The child writes
one JSON line a stage, so that what it learned before it died is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .findings import one_line

__all__ = ["Imports", "look", "mapped_nccl", "start"]

_STAGES = ("torch", "nccl", "cuda", "deep_ep", "nccl_after", "bytecode", "backend")
_LAST = json.dumps([_STAGES[-1], {}]).encode()[:-3]
_START = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {module} import look; look()"


@dataclass(frozen=True, kw_only=True)
class Imports:
    """What the child reported.

    Attributes:
        stages: facts by stage; a stage that raised holds ``error``, one that was not reached is absent.
        died: how the child ended before its last stage, else None.
    """

    stages: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    died: str | None = None

    def of(self, stage: str) -> dict[str, Any]:
        """Facts of a stage; ``error`` says that it failed, or that the child died in it or before."""
        facts = self.stages.get(stage)
        if facts is not None:
            return facts
        return {"error": self.died or "not looked at", "died": True}


def start(timeout: float) -> Callable[[], Imports]:
    """Start the child; the returned function waits for it."""
    command = [sys.executable, "-c", _START.format(module=__name__), json.dumps(sys.path)]
    deadline = time.monotonic() + timeout
    facts, noise = bytearray(), bytearray()
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        reason = f"no child process could be started: {error}"
        return lambda: Imports(died=reason)

    def wait() -> Imports:
        end = f"no answer within {timeout:.0f} s"
        with child, selectors.DefaultSelector() as pipes:
            pipes.register(child.stdout, selectors.EVENT_READ, facts)  # type: ignore[arg-type]
            pipes.register(child.stderr, selectors.EVENT_READ, noise)  # type: ignore[arg-type]
            while not (_LAST in facts and facts.endswith(b"\n")) and (left := deadline - time.monotonic()) > 0:
                for key, _ in pipes.select(left):
                    key.data.extend(chunk := os.read(key.fd, 2**16))
                    if not chunk:
                        pipes.unregister(key.fileobj)
                if child.stdout not in pipes.get_map():  # it ended, whoever still holds its standard error
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = child.wait(timeout=left)
                        end = f"signal {-code}" if code < 0 else f"exit status {code}"
                    for key, _ in pipes.select(0):
                        noise.extend(os.read(key.fd, 2**16))
                    break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with what the libraries started
        return _parse(facts.decode(errors="replace"), noise.decode(errors="replace"), end)

    return wait


def _parse(facts: str, noise: str, end: str) -> Imports:
    stages: dict[str, dict[str, Any]] = {}
    for line in facts.splitlines():
        try:
            stage, found = json.loads(line)
        except ValueError:
            continue
        stages[stage] = found
    missing = [stage for stage in _STAGES if stage not in stages]
    if not missing:
        return Imports(stages=stages)
    last = noise.strip().splitlines()[-1:] or ["it wrote nothing"]
    return Imports(stages=stages, died=one_line(f"the process ended while looking at {missing[0]} ({end}): {last[0]}"))


def look() -> None:
    """The child: go through the stages and report each; what libraries print goes to standard error."""
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    looks: dict[str, Callable[[], dict[str, Any]]] = {
        "torch": _torch,
        "nccl": lambda: {"loaded": _nccl_versions()},
        "cuda": _cuda,
        "deep_ep": _deep_ep,
        "nccl_after": lambda: {"loaded": _nccl_versions()},
        "bytecode": _bytecode,
        "backend": _backend,
    }
    for stage, step in looks.items():
        started = time.monotonic()
        try:
            found = step()
        except (Exception, SystemExit) as error:
            found = {"error": one_line(f"{type(error).__name__}: {error}"), "absent": _absent(error, stage)}
        found["seconds"] = time.monotonic() - started
        print(json.dumps([stage, found]), file=report, flush=True)


def _absent(error: BaseException, module: str) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == module


def _torch() -> dict[str, Any]:
    import torch

    compiled = None
    if torch.version.cuda:
        version: Any = torch.cuda.nccl.version()
        compiled = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    return {"version": torch.__version__, "file": torch.__file__, "cuda": torch.version.cuda, "nccl": compiled}


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"available": False, "devices": []}
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "available": True,
        "devices": [
            {"name": one.name, "capability": [one.major, one.minor], "bytes": one.total_memory} for one in devices
        ],
    }


def _deep_ep() -> dict[str, Any]:
    from ...probe import probe

    before = dict(os.environ)
    found = probe()
    return {
        "installed": found.installed,
        "version": found.version,
        "file": found.file,
        "v1": found.have_v1,
        "v2": found.have_v2,
        "v1_reason": found.v1_reason,
        "v2_reason": found.v2_reason,
        "error": found.v2_error or found.v1_error if not (found.have_v1 or found.have_v2) else None,
        "topk_idx_t": None if found.topk_idx_t is None else str(found.topk_idx_t),
        "sets": {name: value for name, value in os.environ.items() if before.get(name) != value},
    }


def _bytecode() -> dict[str, Any]:
    """Of the modules imported so far, written in Python: how many, and how many have no compiled form beside them."""
    specs = [spec for module in list(sys.modules.values()) if (spec := getattr(module, "__spec__", None)) is not None]
    kept = {spec.origin: spec.cached for spec in specs if spec.has_location and isinstance(spec.cached, str)}
    missing = [origin for origin, cached in kept.items() if not os.path.exists(cached)]
    return {
        "modules": len(kept),
        "missing": len(missing),
        "writes": not sys.dont_write_bytecode,
        "folder": _folder_of_most(missing),
    }


def _folder_of_most(files: list[str]) -> str | None:
    """The entry of the module search path to which most of the files belong."""
    folders = sorted(filter(None, sys.path), key=len, reverse=True)  # one may lie in another
    owners = (next((folder for folder in folders if file.startswith(f"{folder}/")), None) for file in files)
    owned = Counter(folder for folder in owners if folder is not None)
    return owned.most_common(1)[0][0] if owned else None


def _backend() -> dict[str, Any]:
    import torch

    from ...buffers import choose
    from ...buffers.fabric import check_host
    from ...probe import probe
    from ...settings import read

    chosen = choose(probe(), read(), on_cuda=torch.cuda.is_available())
    facts = {"name": chosen.name, "class": chosen.class_name, "reason": chosen.reason, "refused": None}
    if chosen.name == "deepep_v2":
        try:
            check_host()
        except Exception as error:
            facts["refused"] = one_line(str(error))
    return facts


def mapped_nccl(maps: str) -> list[str]:
    """Files of NCCL itself, plugins left out, in the text of ``/proc/PID/maps``."""
    files = {line.split(maxsplit=5)[5].removesuffix(" (deleted)") for line in maps.splitlines() if "libnccl" in line}
    return sorted(file for file in files if file.rpartition("/")[2].startswith("libnccl.so"))


def _nccl_versions() -> dict[str, str | None]:
    """NCCL libraries in this process, and the version each reports."""
    with open("/proc/self/maps") as file:
        files = mapped_nccl(file.read())
    return {file: _nccl_version(file) for file in files}


def _nccl_version(file: str) -> str | None:
    number = ctypes.c_int()
    try:
        if ctypes.CDLL(file).ncclGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    value = number.value  # 23004 is 2.30.4; before 2.9 it was 2708 for 2.7.8
    major, minor = (value // 10000, value % 10000 // 100) if value >= 10000 else (value // 1000, value % 1000 // 100)
    return f"{major}.{minor}.{value % 100}"
