"""What DeepEP's run-time compilation needs: nvcc, and a cache folder that all ranks of a host can write."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from .findings import FAIL, OK, SKIP, WARN, Finding, output_of

__all__ = ["cache_folder", "file_system", "jit_check"]

LEAST_NVCC = (12, 3)
LEAST_FREE_BYTES = 2**30
NETWORK_FILE_SYSTEMS = (
    "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "pvfs2", "smb",
    "sshfs", "virtiofs", "wekafs",
)  # fmt: skip
GROUP = "jit"


def jit_check(environ: Mapping[str, str], matters: bool, mounts: str | None = None) -> Iterator[Finding]:
    """Args: ``matters``: there is a GPU, so DeepEP may compile; ``mounts``: text of ``/proc/self/mountinfo``."""
    yield _nvcc(environ, matters)
    yield from _cache(environ, matters, mounts)


def _nvcc(environ: Mapping[str, str], matters: bool) -> Finding:
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    candidates = [environ.get("EP_JIT_NVCC_COMPILER"), f"{home}/bin/nvcc" if home else None]
    candidates += [shutil.which("nvcc", path=environ.get("PATH")), "/usr/local/cuda/bin/nvcc"]
    path = next((one for one in candidates if one), None)
    text = output_of([path, "--version"]) if path else None
    needed = "nvcc 12.3 or later, under CUDA_HOME"
    if text is None:
        return Finding(
            id="nvcc",
            group=GROUP,
            status=FAIL if matters else SKIP,
            found=f"{path} does not run" if matters and path else "no nvcc",
            needed=needed,
            fix="Install the CUDA toolkit and set CUDA_HOME, or point EP_JIT_NVCC_COMPILER to nvcc." if matters else "",
        )
    release = re.search(r"release (\d+)\.(\d+)", text)
    good = release is not None and (int(release[1]), int(release[2])) >= LEAST_NVCC
    return Finding(
        id="nvcc",
        group=GROUP,
        status=OK if good or not matters else FAIL,
        found=f"nvcc {release[1]}.{release[2]} at {path}" if release else f"{path} does not tell its version",
        needed=needed,
        fix="" if good else "Install a later CUDA toolkit, or point EP_JIT_NVCC_COMPILER to one.",
    )


def cache_folder(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Where compiled kernels go, and what says so."""
    if environ.get("EP_JIT_CACHE_DIR"):
        return Path(environ["EP_JIT_CACHE_DIR"]), "EP_JIT_CACHE_DIR"
    home = environ.get("HOME")
    return (Path(home) / ".deep_ep" if home else None), "the default, $HOME/.deep_ep"


def _cache(environ: Mapping[str, str], matters: bool, mounts: str | None) -> Iterator[Finding]:
    folder, origin = cache_folder(environ)
    if folder is None:
        yield Finding(
            id="jit-cache",
            group=GROUP,
            status=FAIL if matters else SKIP,
            found="neither EP_JIT_CACHE_DIR nor HOME is set",
            needed="a folder",
            fix="export EP_JIT_CACHE_DIR=/tmp/deep_ep" if matters else "",
        )
        return
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    free = shutil.disk_usage(there).free if there.is_dir() else 0
    problem = "not writable" if not writable else "nearly full" if free < LEAST_FREE_BYTES else ""
    bad = FAIL if not writable and matters else WARN
    yield Finding(
        id="jit-cache",
        group=GROUP,
        status=bad if problem and matters else OK if matters else SKIP,
        found=f"{folder} ({origin}){'' if there == folder else ', not made yet'}: {problem or 'writable'}, "
        f"{free / 2**30:.1f} GiB free",
        needed="a writable folder with 1 GiB free",
        fix="export EP_JIT_CACHE_DIR=... to a folder on a local disk" if problem and matters else "",
    )
    kind, mount = file_system(there, mounts)
    remote = _is_network(kind)
    yield Finding(
        id="jit-cache-filesystem",
        group=GROUP,
        status=SKIP if not matters else WARN if remote else OK,
        found=f"{kind} at {mount}" + (", a network file system" if remote else ""),
        needed="a local disk: on a network one hundreds of ranks compile into one folder, and see each other's late",
        fix="export EP_JIT_CACHE_DIR=/tmp/deep_ep_$USER, on every host" if remote and matters else "",
    )


def _is_network(kind: str) -> bool:
    name = kind.removeprefix("fuse.")
    return any(name.startswith(known) for known in NETWORK_FILE_SYSTEMS)


def file_system(path: Path, mounts: str | None = None) -> tuple[str, str]:
    """Type and mount point of the file system that holds ``path``."""
    if mounts is None:
        mounts = Path("/proc/self/mountinfo").read_text()
    found = ("unknown", "/")
    real = str(path.resolve())
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), left.split()[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[1]):  # of equal ones the later hides the earlier
            found = (right.split()[0], point)
    return found
