"""What ran: commit, versions, exports of ``deep_ep``, and whether the buffer's class is the one that was installed."""

from __future__ import annotations

import importlib
import inspect
import platform
import subprocess
import sys
import zlib
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

import megatron_moe_v2
from megatron_moe_v2.probe import Probe

PACKAGE = Path(megatron_moe_v2.__file__).resolve().parent
EXPORTS = ("ElasticBuffer", "Buffer", "EventOverlap", "EventHandle")
METHODS = ("dispatch", "combine")


def commit() -> str:
    """The commit that this package's files belong to, and whether they differ from it."""
    described = _git("describe", "--always", "--abbrev=40", "--exclude=*")
    if not described or not _git("ls-files", "--error-unmatch", "--", str(PACKAGE / "__init__.py")):
        return f"unknown, {PACKAGE} is in no git checkout"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return described + (f", {len(changed.splitlines())} files changed since" if changed else "")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(PACKAGE.parent), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def source_digest() -> int:
    """CRC-32 of the package's sources, to see that all hosts run the same."""
    digest = 0
    for file in sorted(PACKAGE.rglob("*.py")):
        digest = zlib.crc32(str(file.relative_to(PACKAGE)).encode() + b"\0" + file.read_bytes(), digest)
    return digest


def versions(device: torch.device, found: Probe) -> str:
    """Python, torch and what it brings, and the device."""
    parts = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    if device.type == "cuda":
        nccl = ", ".join(loaded_nccl()) or "linked into torch"
        parts += [f"CUDA {torch.version.cuda}", f"NCCL loaded: {nccl}", torch.cuda.get_device_name(device)]
    parts.append(f"megatron_moe_v2 {megatron_moe_v2.__version__} at {PACKAGE}")
    if found.installed:
        parts.append(f"deep_ep {found.version or 'of unknown version'}")
    return ", ".join(parts)


def loaded_nccl() -> list[str]:
    """NCCL libraries in this process, with their versions where they say; two are a fault of the installation."""
    import ctypes

    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = sorted({line.split()[-1] for line in lines if "/libnccl.so" in line})
    texts = []
    for file in files:
        number = ctypes.c_int()
        try:
            ctypes.CDLL(file).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        major, rest = divmod(number.value, 10000)
        texts.append(f"{major}.{rest // 100}.{rest % 100} at {file}")
    return texts


def describe_deep_ep(found: Probe) -> list[str]:
    """The probe's state: where ``deep_ep`` is, what it exports, and why V1 or V2 cannot be used."""
    if not found.installed:
        return ["deep_ep: not installed"]
    lines = [f"deep_ep: {found.version or 'of unknown version'} at {found.file or 'an unknown place'}"]
    lines += [f"deep_ep exports {name}: {_named(getattr(found, name))}" for name in EXPORTS]
    lines.append(f"deep_ep V2: {found.v2_reason}")
    lines.append(f"deep_ep V1: {found.v1_reason}")
    return lines


def _named(kind: Any) -> str:
    return "no" if kind is None else f"{kind.__module__}.{kind.__qualname__} ({class_file(kind) or 'no file'})"


def class_file(kind: type) -> str | None:
    """Where a class was defined: its module's file."""
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None)


def class_of(buffer: Any) -> type:
    """The class that does the work: DeepEP's own where a guard or an adapter of this package stands before it."""
    return type(getattr(buffer, "raw", buffer))


def patches(buffer: Any, found: Probe) -> list[str]:
    """Each way in which the buffer's class, or one that ``deep_ep`` exports, is not what was installed.

    Args:
        buffer: the active one. Where it is a guard or an adapter, both it and what stands behind it are looked at.
    """
    places = {"megatron_moe_v2": PACKAGE}
    if found.file is not None:
        places["deep_ep"] = Path(found.file).resolve().parent
    texts = []
    for one in dict.fromkeys((getattr(buffer, "raw", buffer), buffer)):
        root = places.get(type(one).__module__.partition(".")[0])
        texts += [f"active class {text}" for text in _foreign(type(one), root, places)]
        own = getattr(one, "__dict__", {})
        texts += [f"active buffer's own {name} is patched: {_origin(own[name])}" for name in METHODS if name in own]
    for export, kind in (("ElasticBuffer", found.ElasticBuffer), ("Buffer", found.Buffer)):
        if kind is not None:
            texts += [f"deep_ep.{export} {text}" for text in _foreign(kind, places.get("deep_ep"), places)]
        now = getattr(sys.modules.get("deep_ep"), export, kind)
        if kind is not None and now is not kind:
            texts.append(f"deep_ep.{export} was replaced after the import by {_named(now)}")
    return list(dict.fromkeys(texts))


def _foreign(kind: type, root: Path | None, places: dict[str, Path]) -> list[str]:
    """Why ``kind`` is patched: it, or its dispatch or combine, comes from no file below ``root``."""
    file = class_file(kind)
    if root is None or not _below(file, root):
        expected = root or " or ".join(map(str, places.values()))
        return [f"{kind.__module__}.{kind.__qualname__} is patched: it comes from {file}, not from {expected}"]
    if getattr(importlib.import_module(kind.__module__), kind.__name__, None) is not kind:
        return [f"{kind.__module__}.{kind.__qualname__} is patched: its module holds another class of that name"]
    texts = []
    for method in METHODS:
        function = inspect.getattr_static(kind, method, None)
        if isinstance(function, FunctionType) and _below(function.__code__.co_filename, root):
            continue
        if function is not None:
            texts.append(f"{kind.__qualname__}.{method} is patched: {_origin(function)}")
    return texts


def _origin(function: Any) -> str:
    """Where what is called first comes from: a wrapper's own code, whatever it says that it wraps."""
    if isinstance(function, FunctionType):
        return f"it comes from {function.__code__.co_filename}"
    kind = type(function)
    return f"it is a {kind.__module__}.{kind.__qualname__}, expected a function"


def _below(file: str | None, root: Path) -> bool:
    return file is not None and Path(file).resolve().is_relative_to(root)
