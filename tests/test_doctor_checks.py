"""Single checks of the doctor on made facts: maps, mounts, sysfs trees, variables, reports of ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_moe_v2.cli.doctor import jit
from megatron_moe_v2.cli.doctor.backend import backend_check
from megatron_moe_v2.cli.doctor.environment import EP_VARIABLES, RULES, Surroundings, environment_check
from megatron_moe_v2.cli.doctor.findings import Finding, guarded, numbers
from megatron_moe_v2.cli.doctor.imports import Imports, mapped_nccl
from megatron_moe_v2.cli.doctor.nccl import nccl_check
from megatron_moe_v2.cli.doctor.ranks import differences
from megatron_moe_v2.cli.doctor.system import (
    bytecode_check,
    gpu_check,
    import_time_check,
    link_check,
    loopback_check,
    network_check,
    torch_check,
)

P = "MCORE_DEEPEP_V2_"


def by_id(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {one.id: one for one in findings}


def test_a_check_that_raises_is_a_finding() -> None:
    def check() -> Iterable[Finding]:
        yield Finding(id="first", group="g", status="ok", found="")
        raise ValueError("the cause")

    (found,) = guarded("name", "g", check)
    assert (found.id, found.status) == ("name", "warn")
    assert "ValueError: the cause" in found.found


@pytest.mark.parametrize(
    ("text", "parts"),
    [("2.30.4", (2, 30, 4)), ("2.13.0+cu130", (2, 13, 0)), ("megatron-core 0.19.2", (0, 19, 2)), ("x", ()), (None, ())],
)
def test_versions(text: str | None, parts: tuple[int, ...]) -> None:
    assert numbers(text) == parts


def test_nccl_in_the_process_map() -> None:
    maps = """\
7f00-7f01 r-xp 00000000 08:01 11 /a b/libnccl.so.2.30.7
7f02-7f03 r--p 00000000 08:01 11 /a b/libnccl.so.2.30.7
7f04-7f05 r-xp 00000000 08:01 12 /opt/libnccl.so.2 (deleted)
7f06-7f07 r-xp 00000000 08:01 13 /opt/libnccl-net-ofi.so
7f08-7f09 rw-p 00000000 00:00 0
7f0a-7f0b r-xp 00000000 08:01 14 /opt/libm.so.6
"""
    assert mapped_nccl(maps) == ["/a b/libnccl.so.2.30.7", "/opt/libnccl.so.2"]


def test_compiled_nccl_says_nothing_of_the_loaded_one() -> None:
    stages = {"torch": {"nccl": "2.30.7"}, "nccl": {"loaded": {"/old/libnccl.so.2": "2.27.3"}}}
    found = by_id(nccl_check(Imports(stages=stages), True))
    assert found["nccl-compiled"].status == "ok"
    assert found["nccl-loaded"].status == "fail"


@pytest.mark.parametrize(
    ("gpu", "installed", "status"), [(False, False, "skip"), (False, True, "fail"), (True, False, "fail")]
)
def test_an_old_nccl_matters_where_deepep_could_use_it(gpu: bool, installed: bool, status: str) -> None:
    """PyTorch's usual wheel brings an NCCL of its own, on a laptop too."""
    stages = {"nccl": {"loaded": {"/site/libnccl.so.2": "2.29.7"}}, "deep_ep": {"installed": installed}}
    assert by_id(nccl_check(Imports(stages=stages), gpu))["nccl-loaded"].status == status


@pytest.mark.parametrize(
    ("folder", "kind", "status"),
    [
        ("/home/u/.deep_ep", "nfs4", "warn"),
        ("/home/u/local/jit", "ext4", "ok"),
        ("/lustre/x", "lustre", "warn"),
        ("/with space/x", "fuse.sshfs", "warn"),
        ("/homework", "overlay", "ok"),
    ],
)
def test_file_system_of_the_cache(folder: str, kind: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "\n".join(
        f"{number} 1 0:{number} / {point} rw,relatime shared:1 - {kind} source rw"
        for number, (point, kind) in enumerate(
            [
                ("/", "overlay"),
                ("/home", "nfs4"),
                ("/home/u/local", "ext4"),
                ("/lustre", "lustre"),
                ("/with\\040space", "fuse.sshfs"),
            ]
        )
    )
    assert jit.file_system(Path(folder), mounts)[0] == kind
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in (folder, "/"))
    found = by_id(jit.jit_check({"EP_JIT_CACHE_DIR": folder, "PATH": ""}, True, mounts))
    assert found["jit-cache-filesystem"].status == status


def test_nvcc_and_cache(tmp_path: Path) -> None:
    def nvcc(release: str) -> str:
        file = tmp_path / f"nvcc-{release}"
        file.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        file.chmod(0o755)
        return str(file)

    for release, status in (("12.2", "fail"), ("12.3", "ok"), ("13.0", "ok")):
        environ = {"EP_JIT_NVCC_COMPILER": nvcc(release), "EP_JIT_CACHE_DIR": str(tmp_path / "not/yet")}
        found = by_id(jit.jit_check(environ, True))
        assert found["nvcc"].status == status, release
        assert found["jit-cache"].status == "ok"
        assert not (tmp_path / "not").exists()
    environ = {"EP_JIT_NVCC_COMPILER": "/no/such/nvcc", "EP_JIT_CACHE_DIR": nvcc("13.0")}
    found = by_id(jit.jit_check(environ, True))
    assert (found["nvcc"].status, found["jit-cache"].status) == ("fail", "fail")
    assert by_id(jit.jit_check({"PATH": ""}, True))["jit-cache"].status == "fail"


def test_loopback() -> None:
    (here,) = loopback_check()
    assert (here.id, here.status) == ("loopback", "ok")
    started = time.monotonic()
    (elsewhere,) = loopback_check("192.0.2.1")  # no machine's own: kept for documentation
    assert elsewhere.status == "fail"
    assert "ip link set lo up" in elsewhere.fix
    assert time.monotonic() - started < 0.5


def without_network(*command: str) -> list[str]:
    return ["unshare", "--map-root-user", "--net", *command]


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(without_network("true"), capture_output=True).returncode != 0,
    reason="may make no network namespace",
)
def test_a_loopback_that_is_down() -> None:
    code = (
        "from megatron_moe_v2.cli.doctor.system import loopback_check as f; (one,) = f(); print(one.status, one.found)"
    )
    done = subprocess.run(without_network(sys.executable, "-c", code), capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("fail 127.0.0.1 cannot be reached: "), done.stdout + done.stderr


def test_rdma_ports(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "link_layer").write_text("InfiniBand\n")
    found = by_id(network_check(True, tmp_path))
    assert found["rdma"].status == "warn"
    assert "mlx5_0:1 4: ACTIVE 400 Gb/sec (4X NDR) InfiniBand; mlx5_1:1 1: DOWN" in found["rdma"].found
    (tmp_path / "class/infiniband/mlx5_1/ports/1/state").write_text("4: ACTIVE\n")
    assert by_id(network_check(True, tmp_path))["rdma"].status == "ok"
    driver, device = tmp_path / "drivers/efa", tmp_path / "class/infiniband/rdmap0s6/device"
    driver.mkdir(parents=True)
    device.mkdir(parents=True)
    (device / "driver").symlink_to(driver)
    found = by_id(network_check(True, tmp_path))
    assert found["rdma"].found.startswith("EFA")
    assert "aws-ofi-nccl" in found["efa"].needed


def test_gpus() -> None:
    def check(capability: list[int]) -> dict[str, Finding]:
        device = {"name": "H", "capability": capability, "bytes": 80 * 2**30}
        return by_id(gpu_check(Imports(stages={"cuda": {"devices": [device, device]}}), True))

    assert check([9, 0])["gpu"].status == "ok"
    assert check([9, 0])["gpu"].found == "2 x H (9.0, 80 GiB)"
    assert check([8, 0])["gpu"].status == "warn"
    assert by_id(gpu_check(Imports(stages={"cuda": {"devices": []}}), True))["gpu"].status == "fail"


@pytest.mark.parametrize(
    ("version", "cuda", "gpu", "status"),
    [
        ("2.13.0", "13.0", True, "ok"),
        ("2.13.0", None, True, "fail"),
        ("2.9.1", "13.0", True, "fail"),
        ("2.13.0", None, False, "ok"),
    ],
    ids=["good", "cpu-build-beside-a-gpu", "old", "cpu"],
)
def test_torch(version: str, cuda: str | None, gpu: bool, status: str) -> None:
    facts = {"version": version, "cuda": cuda, "file": "/site/torch/__init__.py", "nccl": None}
    assert by_id(torch_check(Imports(stages={"torch": facts}), gpu))["torch"].status == status


def test_nvlink() -> None:
    states = "GPU 0: NVIDIA H200\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    two = Imports(stages={"cuda": {"devices": [{}, {}]}})
    (one,) = link_check(two, True, states)
    assert (one.status, one.found) == ("ok", "2 links of 27 GB/s on the first GPU, 53 GB/s together")
    (one,) = link_check(two, True, "")
    assert (one.status, one.found) == ("warn", "no NVLink speed can be read")
    assert [each.status for each in link_check(two, False, "")] == ["skip"]


@pytest.mark.parametrize(
    ("stages", "status", "found"),
    [
        ({"torch": {"seconds": 4.21}, "deep_ep": {"seconds": 6.6}}, "ok", "torch 4.2 s, then deep_ep 6.6 s"),
        ({"torch": {"seconds": 4.0}, "deep_ep": {"seconds": 27.0}}, "warn", "torch 4.0 s, then deep_ep 27.0 s"),
        ({"torch": {"seconds": 31.0}}, "warn", "torch 31.0 s"),
        ({"torch": {"seconds": 0.0, "error": "ModuleNotFoundError", "absent": True}}, "skip", "torch was not imported"),
        ({}, "skip", "torch was not imported"),
    ],
)
def test_import_time(stages: dict[str, Any], status: str, found: str) -> None:
    (one,) = import_time_check(Imports(stages=stages))
    assert (one.status, one.found) == (status, found)


@pytest.mark.parametrize(
    ("facts", "status", "said"),
    [
        ({"missing": 8, "writes": True}, "ok", ""),
        ({"missing": 900, "writes": True}, "warn", "their folders cannot be written"),
        ({"missing": 900, "writes": False}, "warn", "PYTHONDONTWRITEBYTECODE is set"),
        ({"error": "died"}, "skip", ""),
    ],
)
def test_bytecode(facts: dict[str, Any], status: str, said: str) -> None:
    (one,) = bytecode_check(Imports(stages={"bytecode": {"modules": 986, "folder": "/env/site-packages", **facts}}))
    assert one.status == status
    assert said in one.found
    assert ("compileall -q /env/site-packages" in one.fix) == (status == "warn")


@pytest.mark.parametrize(
    ("facts", "gpu", "status"),
    [
        ({"name": "deepep_v2", "class": "ElasticBuffer", "reason": "it is here", "refused": None}, True, "ok"),
        ({"name": "deepep_v2", "class": "ElasticBuffer", "reason": "", "refused": "EP_DISABLE_GIN"}, True, "fail"),
        ({"name": "embedded", "class": "E", "reason": "deep_ep is not installed", "refused": None}, True, "warn"),
        ({"name": "embedded", "class": "E", "reason": f"{P}BACKEND=embedded", "refused": None}, True, "ok"),
        ({"name": "embedded", "class": "E", "reason": "no CUDA", "refused": None}, False, "ok"),
        ({"error": "BackendError: no"}, True, "fail"),
    ],
    ids=["v2", "refused", "fell-back", "meant", "cpu", "cannot-be-had"],
)
def test_backend(facts: dict[str, Any], gpu: bool, status: str) -> None:
    (found,) = backend_check(Imports(stages={"backend": facts, "torch": {}}), gpu)
    assert found.status == status


V2 = Surroundings(gpu=True, v2=True, rdma="infiniband", nccl="2.30.7")
TWO_HOSTS = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}

CONFLICTS: dict[str, tuple[dict[str, str], Surroundings]] = {
    "gin-between-hosts": ({"EP_DISABLE_GIN": "1", **TWO_HOSTS}, V2),
    "gin-without-rdma": ({}, Surroundings(gpu=True, v2=True)),
    "gin-off-in-nccl": ({"NCCL_GIN_ENABLE": "0"}, V2),
    "gin-type-unused": ({"EP_DISABLE_GIN": "1", "NCCL_GIN_TYPE": "3"}, V2),
    "cumem-off": ({"NCCL_CUMEM_ENABLE": "0"}, V2),
    "cumem-unset": ({f"{P}SET_ENV": "0"}, V2),
    "p2p-off": ({"NCCL_P2P_DISABLE": "1"}, V2),
    "ib-off": ({"NCCL_IB_DISABLE": "1"}, V2),
    "shared-gpu": ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, Surroundings(gpu=True, rdma="infiniband", nccl="2.29.2")),
    "check-suppressed": ({"EP_SUPPRESS_NCCL_CHECK": "1"}, V2),
    "efa-queue-pairs": ({f"{P}NUM_QPS": "129"}, Surroundings(gpu=True, v2=True, rdma="efa")),
    "without-effect": ({f"{P}BACKEND": "embedded", f"{P}NUM_QPS": "9"}, V2),
}

SOUND: dict[str, tuple[dict[str, str], Surroundings]] = {
    "several-hosts": (TWO_HOSTS, V2),
    "one-host-without-rdma": ({"EP_DISABLE_GIN": "1", "NCCL_GIN_ENABLE": "0"}, Surroundings(gpu=True, v2=True)),
    "efa": ({"NCCL_IB_DISABLE": "1", f"{P}NUM_QPS": "128"}, Surroundings(gpu=True, v2=True, rdma="efa")),
    "cpu": ({"NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}, Surroundings()),
    "embedded-on-gpus": ({f"{P}BACKEND": "embedded", "NCCL_CUMEM_ENABLE": "0"}, V2),
}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_contradiction(name: str) -> None:
    environ, around = CONFLICTS[name]
    found = {one.id for one in environment_check(environ, around) if one.id.startswith("conflict")}
    assert found == {f"conflict-{name}"}


@pytest.mark.parametrize(("environ", "around"), SOUND.values(), ids=SOUND)
def test_no_contradiction(environ: dict[str, str], around: Surroundings) -> None:
    found = by_id(environment_check(environ, around))
    assert "conflicts" in found
    assert not [one for one in found.values() if one.status not in ("ok", "skip")]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (f"{P}MAX_TOKENS", f"{P}MAX_TOKENS_PER_RANK"),
        ("EP_JIT_CACHE", "EP_JIT_CACHE_DIR"),
        ("EP_DISABLE_GINN", "EP_DISABLE_GIN"),
        ("NCCL_CUMEN_ENABLE", "NCCL_CUMEM_ENABLE"),
        ("EP_SIZE", None),
        ("NCCL_SOMETHING_NEW", None),
        ("OTHER", None),
    ],
)
def test_slips(name: str, meant: str | None) -> None:
    found = by_id(environment_check({name: "1"}, Surroundings()))["unknown-variables"]
    assert (found.status == "warn") == (meant is not None)
    if meant:
        assert f"{name} (did you mean {meant}?)" in found.found


def test_every_variable_of_deepep_is_a_known_name() -> None:
    environ = dict.fromkeys(EP_VARIABLES, "0") | {"EP_JIT_CACHE_DIR": "/x"}
    found = by_id(environment_check(environ, Surroundings()))
    assert {one.status for one in found.values()} == {"ok"}


def report(host: str = "a", gpus: int = 0, environment: dict[str, str] | None = None, **found: str) -> dict[str, Any]:
    texts = {"torch": "torch 2.13 at /x/torch", "jit-cache": "/c: writable, 1.5 GiB free", **found}
    findings = [{"id": name.replace("_", "-"), "status": "ok", "found": text} for name, text in texts.items()]
    return {"host": host, "gpus": gpus, "findings": findings, "environment": environment or {}}


def test_equal_ranks() -> None:
    elsewhere, fuller = report("b", torch="torch 2.13 at /y/torch"), report("b", **{"jit-cache": "/c: 9.0 GiB free"})
    reports = {0: report(), 1: elsewhere, 2: fuller}
    found = by_id(differences(reports, 3))
    assert {one.status for one in found.values()} == {"ok"}
    assert found["ranks"].found == "3 ranks: rank 0: a; rank 1-2: b"


def test_ranks_that_differ() -> None:
    odd = report(
        "b", torch="torch 2.12", environment={"EP_DISABLE_GIN": "1", "NCCL_DEBUG": "INFO", f"{P}MODE": "direct"}
    )
    found = by_id(differences({0: report(), 1: odd, 3: report()}, 4))
    assert found["ranks"].status == "fail"
    assert "no word from rank 2 of 4" in found["ranks"].found
    assert found["differs-torch"].found == "rank 0,3: ok: torch 2.13; rank 1: ok: torch 2.12"
    assert found[f"differs-{P}MODE"].found == "rank 0,3: (unset); rank 1: direct"
    status = {name.removeprefix("differs-"): one.status for name, one in found.items() if name.startswith("differs-")}
    assert status == {"torch": "fail", "EP_DISABLE_GIN": "fail", f"{P}MODE": "fail", "NCCL_DEBUG": "warn"}


def test_a_failure_of_one_rank_is_one_of_the_job() -> None:
    bad = report("b")
    bad["findings"].append({"id": "nvcc", "status": "fail", "found": "no nvcc"})
    found = by_id(differences({0: report(), 1: bad}, 2))
    assert found["differs-nvcc"].status == "fail"
    assert found["differs-nvcc"].found == "rank 0: (nothing); rank 1: fail: no nvcc"


def test_more_ranks_than_gpus() -> None:
    assert by_id(differences({0: report(gpus=1), 1: report(gpus=1)}, 2))["crowded-a"].status == "fail"
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    fine = {rank: report(gpus=1, environment=shared) for rank in range(2)}
    assert "crowded-a" not in by_id(differences(fine, 2))
