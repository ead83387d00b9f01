"""NCCL as torch was compiled with it, as it is installed, and as it is loaded: three versions that often differ."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from .findings import FAIL, OK, SKIP, WARN, Finding, Status, numbers
from .imports import Imports

__all__ = ["LEAST_NCCL", "nccl_check"]

LEAST_NCCL = (2, 30, 4)
GROUP = "nccl"
_INSTALL = 'pip install "nvidia-nccl-cu13>=2.30.4" --no-deps (cu12 for CUDA 12), first on the loader path.'


def nccl_check(imports: Imports, gpu: bool) -> Iterator[Finding]:
    least = ".".join(map(str, LEAST_NCCL))
    compiled = imports.of("torch").get("nccl")
    yield Finding(
        id="nccl-compiled",
        group=GROUP,
        status=OK if compiled else SKIP,
        found=f"torch was compiled with NCCL {compiled}" if compiled else "torch has no NCCL",
        needed="this number says nothing of what is loaded" if compiled else "",
    )
    yield _installed(gpu)
    loaded = _loaded(imports)
    if not loaded:
        status: Status = WARN if gpu and compiled else SKIP
        found = "no NCCL library is in the process after importing torch"
        if gpu and compiled:
            found += "; it may be linked into torch statically"
        yield Finding(id="nccl-loaded", group=GROUP, status=status, found=found, needed=f"NCCL {least} or later")
        yield Finding(id="nccl-duplicates", group=GROUP, status=SKIP, found="none loaded")
        return
    texts = [f"{version or 'of unknown version'} at {file}" for file, version in loaded.items()]
    old = [version for version in loaded.values() if version and numbers(version) < LEAST_NCCL]
    unknown = [file for file, version in loaded.items() if not version]
    matters = gpu or imports.of("deep_ep").get("installed")
    yield Finding(
        id="nccl-loaded",
        group=GROUP,
        status=OK if not old and not unknown else SKIP if not matters else FAIL if old else WARN,
        found="loaded: NCCL " + "; ".join(texts),
        needed=f"NCCL {least} or later, for DeepEP V2",
        fix=_INSTALL if old or unknown else "",
    )
    yield Finding(
        id="nccl-duplicates",
        group=GROUP,
        status=FAIL if len(loaded) > 1 else OK,
        found=f"{len(loaded)} NCCL librar{'ies' if len(loaded) > 1 else 'y'} in one process",
        needed="exactly one",
        fix="Take one off LD_LIBRARY_PATH or LD_PRELOAD, or uninstall one; EP_SUPPRESS_NCCL_CHECK only hides it."
        if len(loaded) > 1
        else "",
    )


def _loaded(imports: Imports) -> dict[str, str | None]:
    """By file; after ``deep_ep``'s import where that was reached, else after torch's."""
    after = imports.of("nccl_after").get("loaded")
    return after if after is not None else imports.of("nccl").get("loaded") or {}


def _installed(gpu: bool) -> Finding:
    names = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
    found = []
    for name in names:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    text = ", ".join(f"{name} {version}" for name, version in found)
    if not found:
        return Finding(id="nccl-installed", group=GROUP, status=SKIP, found="no NCCL package in this environment")
    good = len(found) == 1 and numbers(found[0][1]) >= LEAST_NCCL
    return Finding(
        id="nccl-installed",
        group=GROUP,
        status=OK if good or not gpu else WARN,
        found=text,
        needed="one, at least 2.30.4",
        fix="" if good else _INSTALL,
    )
