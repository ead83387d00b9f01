"""Python, torch, driver, GPUs, links between them, network devices."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ... import __file__ as package_file
from ... import __version__
from .findings import FAIL, OK, SKIP, WARN, Finding, numbers, one_line, output_of
from .imports import Imports

__all__ = [
    "bytecode_check",
    "driver_version",
    "gpu_check",
    "has_gpu",
    "import_time_check",
    "link_check",
    "loopback_check",
    "network_check",
    "python_check",
    "torch_check",
]

LEAST_PYTHON = (3, 10)
LEAST_TORCH = (2, 10)
LEAST_CAPABILITY = (9, 0)
MOST_IMPORT_SECS = 30
MOST_MISSING_BYTECODE = 100

GROUP = "system"


def has_gpu(proc: Path = Path("/proc")) -> bool:
    """Whether an NVIDIA driver or device is here, whatever torch says."""
    return (proc / "driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def python_check() -> Iterator[Finding]:
    version = sys.version_info[:2]
    yield Finding(
        id="python",
        group=GROUP,
        status=OK if version >= LEAST_PYTHON else FAIL,
        found=f"Python {platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}",
        needed=f"Python {'.'.join(map(str, LEAST_PYTHON))} or later",
        fix="" if version >= LEAST_PYTHON else "Make the environment anew with a later Python.",
    )
    yield Finding(
        id="package",
        group=GROUP,
        status=OK,
        found=f"megatron_moe_v2 {__version__} at {Path(package_file or '').parent}",
    )


def torch_check(imports: Imports, gpu: bool) -> Iterator[Finding]:
    facts = imports.of("torch")
    needed = f"torch {'.'.join(map(str, LEAST_TORCH))} or later" + (" built for CUDA" if gpu else "")
    if "error" in facts:
        fix = "pip install torch" if facts.get("absent") else "Run `python -c 'import torch'` and mend what it says."
        found = "torch is not installed" if facts.get("absent") else f"torch cannot be imported: {facts['error']}"
        yield Finding(id="torch", group=GROUP, status=FAIL, found=found, needed=needed, fix=fix)
        return
    status, fix = OK, ""
    if numbers(facts["version"]) < LEAST_TORCH:
        status, fix = FAIL, "Upgrade torch."
    elif gpu and not facts["cuda"]:
        status, fix = FAIL, "Install torch from the index of your CUDA version: https://pytorch.org/get-started"
    built = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU alone"
    found = f"torch {facts['version']}, built for {built}, at {Path(facts['file']).parent}"
    yield Finding(id="torch", group=GROUP, status=status, found=found, needed=needed, fix=fix)


def import_time_check(imports: Imports) -> Iterator[Finding]:
    seconds = {name: imports.of(name).get("seconds") for name in ("torch", "deep_ep")}
    if seconds["torch"] is None or imports.of("torch").get("absent"):
        yield Finding(id="import-time", group=GROUP, status=SKIP, found="torch was not imported")
        return
    slow = sum(spent or 0.0 for spent in seconds.values()) > MOST_IMPORT_SECS
    yield Finding(
        id="import-time",
        group=GROUP,
        status=WARN if slow else OK,
        found=", then ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items() if spent is not None),
        needed=f"together at most {MOST_IMPORT_SECS} s, which every rank spends at its start",
        fix="See bytecode; install on a local disk instead of a network file system." if slow else "",
    )


def bytecode_check(imports: Imports) -> Iterator[Finding]:
    facts = imports.of("bytecode")
    if "error" in facts:
        yield Finding(id="bytecode", group=GROUP, status=SKIP, found=f"could not be looked at: {facts['error']}")
        return
    found, fix = f"{facts['missing']} of {facts['modules']} imported modules have no bytecode", ""
    if many := facts["missing"] > MOST_MISSING_BYTECODE:
        why = "their folders cannot be written" if facts["writes"] else "PYTHONDONTWRITEBYTECODE is set"
        found += f", and {why}: every process compiles them anew"
        folder = facts["folder"] or "FOLDER_OF_THE_PACKAGES"
        fix = f"Once, as a user who may write there: {sys.executable} -m compileall -q {folder}"
    yield Finding(
        id="bytecode",
        group=GROUP,
        status=WARN if many else OK,
        found=found,
        needed=f"at most {MOST_MISSING_BYTECODE}",
        fix=fix,
    )


def driver_version(proc: Path = Path("/proc")) -> str | None:
    """Of the NVIDIA kernel module."""
    try:
        text = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else one_line(text, 80)


def gpu_check(imports: Imports, gpu: bool) -> Iterator[Finding]:
    driver = driver_version()
    if not gpu:
        yield Finding(id="driver", group=GROUP, status=SKIP, found="no NVIDIA driver on this machine")
        yield Finding(id="gpu", group=GROUP, status=SKIP, found="no GPU: the embedded buffer runs on the CPU")
        return
    yield Finding(id="driver", group=GROUP, status=OK, found=f"NVIDIA driver {driver or 'of unknown version'}")
    facts = imports.of("cuda")
    if facts.get("devices"):
        names: dict[str, int] = {}
        for one in facts["devices"]:
            text = f"{one['name']} ({'.'.join(map(str, one['capability']))}, {one['bytes'] / 2**30:.0f} GiB)"
            names[text] = names.get(text, 0) + 1
        good = all(tuple(one["capability"]) >= LEAST_CAPABILITY for one in facts["devices"])
        yield Finding(
            id="gpu",
            group=GROUP,
            status=OK if good else WARN,
            found=", ".join(f"{count} x {name}" for name, count in names.items()),
            needed="compute capability 9.0 or later for DeepEP V2",
            fix="" if good else "On these GPUs use DeepEP V1 or the embedded buffer.",
        )
        return
    seen = output_of(["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]) or ""
    devices = "; ".join(seen.strip().splitlines()) or "nvidia-smi lists none"
    error = facts.get("error", "torch.cuda.is_available() is False")
    yield Finding(
        id="gpu",
        group=GROUP,
        status=FAIL,
        found=f"a driver is here ({devices}), but torch sees no GPU: {error}",
        needed="a GPU that torch can use",
        fix="Check CUDA_VISIBLE_DEVICES, the container's devices, and that the driver is new enough for torch's CUDA.",
    )


def link_check(imports: Imports, gpu: bool, states: str) -> Iterator[Finding]:
    """Args: ``states``: what ``nvidia-smi nvlink -s -i 0`` says of the first GPU's NVLinks."""
    count = len(imports.of("cuda").get("devices") or [])
    if not gpu:
        yield Finding(id="nvlink", group=GROUP, status=SKIP, found="no GPU")
        return
    speeds = [float(speed) for speed in re.findall(r"Link \d+:\s*([\d.]+) GB/s", states)]
    if speeds:
        found = f"{len(speeds)} links of {speeds[0]:.0f} GB/s on the first GPU, {sum(speeds):.0f} GB/s together"
        yield Finding(id="nvlink", group=GROUP, status=OK, found=found)
        return
    yield Finding(
        id="nvlink",
        group=GROUP,
        status=WARN if count != 1 else OK,
        found="no NVLink speed can be read" + ("; one GPU needs none" if count == 1 else ""),
        needed="NVLink between all GPUs of a host, for DeepEP V2",
        fix=""
        if count == 1
        else "See `nvidia-smi nvlink -s` and `nvidia-smi topo -m`; with PCIe alone use "
        "MCORE_DEEPEP_V2_BACKEND=embedded. Where only the reading fails, set MCORE_DEEPEP_V2_NUM_SMS.",
    )


def loopback_check(address: str = "127.0.0.1", timeout: float = 0.4) -> Iterator[Finding]:
    """Whether ranks of one host could meet: a socket that listens there, and one that connects to it."""
    problem = ""
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind((address, 0))
            server.listen(1)
            client.settimeout(timeout)
            client.connect(server.getsockname())
    except OSError as error:
        problem = f"{address} cannot be reached: {error}"
    yield Finding(
        id="loopback",
        group=GROUP,
        status=FAIL if problem else OK,
        found=problem or f"{address} can be reached",
        needed="the loopback interface, where the ranks of one host meet",
        fix="ip link set lo up (as root; in a container, give it a network)." if problem else "",
    )


def network_check(gpu: bool, sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """RDMA devices with state, speed and link layer; EFA by its driver."""
    from ...buffers.fabric import rdma_kind

    kind = rdma_kind(sysfs)
    if kind is None:
        yield Finding(
            id="rdma",
            group=GROUP,
            status=OK if gpu else SKIP,
            found="no RDMA device",
            needed="none within one host; between hosts DeepEP V2 needs InfiniBand, RoCE or EFA",
            fix="In a container, pass /dev/infiniband and /sys/class/infiniband through." if gpu else "",
        )
        return
    ports = [port for device in sorted((sysfs / "class/infiniband").glob("*")) for port in _ports(device)]
    down = [text for text, active in ports if not active]
    yield Finding(
        id="rdma",
        group=GROUP,
        status=WARN if down or not ports else OK,
        found=f"{'EFA' if kind == 'efa' else 'InfiniBand or RoCE'}: "
        + one_line("; ".join(text for text, _ in ports) or "devices without ports", 800),
        needed="every port ACTIVE",
        fix="Unused ports are harmless; else see `ibstat` and the cabling." if down else "",
    )
    if kind == "efa":
        yield from _efa(sysfs)
    locked = _locked_memory()
    yield Finding(
        id="memlock",
        group=GROUP,
        status=OK if locked is None else WARN,
        found="unlimited" if locked is None else f"{locked} bytes",
        needed="unlimited locked memory for RDMA",
        fix="" if locked is None else "ulimit -l unlimited, --ulimit memlock=-1 for a container.",
    )


def _ports(device: Path) -> Iterator[tuple[str, bool]]:
    for port in sorted((device / "ports").glob("*")):
        state, rate, layer = (_line(port / name) for name in ("state", "rate", "link_layer"))
        yield f"{device.name}:{port.name} {state or 'state unknown'} {rate} {layer}".rstrip(), "ACTIVE" in state


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _efa(sysfs: Path) -> Iterator[Finding]:
    version = _line(sysfs / "module/efa/version") or "unknown"
    plugin = os.environ.get("NCCL_NET_PLUGIN")
    yield Finding(
        id="efa",
        group=GROUP,
        status=OK if plugin else WARN,
        found=f"EFA driver {version}, NCCL_NET_PLUGIN={plugin or '(unset)'}",
        needed="the aws-ofi-nccl plugin with GIN",
        fix="" if plugin else "See `megatron-moe-v2 env efa`; NCCL_DEBUG=INFO must say NET/OFI, not NET/Socket.",
    )


def _locked_memory() -> int | None:
    """The limit in bytes, None where there is none."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft
