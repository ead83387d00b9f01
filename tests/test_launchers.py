"""The launchers, as far as they can be checked without a cluster: run on the CPU, read, and compared with the rest."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_moe_v2.cli.env import FABRICS

ROOT = Path(__file__).resolve().parent.parent
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = ("torchrun.sh", "slurm.sbatch")
MANIFESTS = ("pytorchjob-ib.yaml", "pytorchjob-efa.yaml")
SECONDS = 180
SMALL = "--device cpu --hidden 64 --seq-len 32 --steps 2"


def environment(**more: object) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settled = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHON": sys.executable}
    return os.environ | settled | {name: str(value) for name, value in more.items()}


def free_ports() -> int:
    """The first of two neighbouring ports that nothing listens on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def manifest(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    (document,) = yaml.safe_load_all((LAUNCH / name).read_text())
    return dict(document)


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_syntax(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(LAUNCH / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck")
@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck(name: str) -> None:
    done = subprocess.run([str(SHELLCHECK), str(LAUNCH / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "set FABRIC to"),
        ({"FABRIC": "ib", "NNODES": 2}, "set NODE_RANK, 0 to 1"),
        ({"FABRIC": "ib", "NNODES": 2, "NODE_RANK": 1}, "set MASTER_ADDR"),
        ({"FABRIC": "ib", "ONLY": "bench"}, "ONLY=bench"),
        ({"FABRIC": "carrier-pigeon"}, "invalid choice"),
    ],
    ids=["no-fabric", "no-rank", "no-address", "only", "unknown-fabric"],
)
def test_wrong_use_is_refused_before_anything_starts(variables: dict[str, object], message: str) -> None:
    environ = environment(**variables)
    line = ["bash", str(LAUNCH / "torchrun.sh")]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("fabric", ["ib", "efa"])
def test_exports_what_env_prints_then_the_own_file(fabric: str, tmp_path: Path) -> None:
    """A stand-in for ``python`` hands ``env`` on, and prints what a program would be started with."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/usr/bin/env bash\nif [ "$2" = megatron_moe_v2 ]; then exec {sys.executable} "$@"; fi\nenv -0\n'
    )
    python.chmod(0o755)
    own = tmp_path / "own.sh"
    own.write_text("export NCCL_SOCKET_IFNAME=eth7\n")
    environ = environment(FABRIC=fabric, PYTHON=python, ENV_FILE=own, ONLY="validate", EP_DISABLE_GIN="1")
    line = ["bash", str(LAUNCH / "torchrun.sh")]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=SECONDS, check=True)
    seen = dict(entry.partition("=")[::2] for entry in done.stdout.split("\0"))
    for export in FABRICS[fabric]:
        if not export.optional:
            assert seen.get(export.name) == export.value, export.name
    assert seen["NCCL_SOCKET_IFNAME"] == "eth7"


def test_no_launcher_repeats_what_env_prints() -> None:
    names = {export.name for exports in FABRICS.values() for export in exports} - {"EP_JIT_CACHE_DIR"}
    for name in (*SCRIPTS, *MANIFESTS):
        text = (LAUNCH / name).read_text()
        assert not [variable for variable in names if re.search(rf"\b{variable}\b", text)], name


@pytest.mark.slow
def test_torchrun_as_two_nodes_on_the_cpu(tmp_path: Path) -> None:
    port = free_ports()
    nodes = []
    for node in range(2):
        environ = environment(
            FABRIC="none",
            NNODES=2,
            NODE_RANK=node,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            NPROC=1,
            VALIDATE_FLAGS=f"{SMALL} --tokens 64 --blocks 1 --expect-backend embedded",
            PRETRAIN_FLAGS=f"{SMALL} --global-batch 2 --blocks 1 --no-save --no-plots --out {tmp_path}",
        )
        line = ["bash", str(LAUNCH / "torchrun.sh")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen(line, env=environ, **pipes))  # type: ignore[call-overload]
    outputs = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "VALIDATION PASS" in outputs[0]
    assert "loss trajectory: " in outputs[0].partition("VALIDATION PASS")[2]


@pytest.mark.slow
def test_a_failed_validation_ends_the_script_before_pretraining() -> None:
    flags = f"{SMALL} --tokens 64 --blocks 1 --expect-backend deepep_v2"
    environ = environment(FABRIC="none", NPROC=1, VALIDATE_FLAGS=flags, MASTER_PORT=free_ports())
    line = ["bash", str(LAUNCH / "torchrun.sh")]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("VALIDATION FAIL: backend embedded, expected deepep_v2")


def slurm(commands: Path, srun: str, **more: object) -> subprocess.CompletedProcess[str]:
    """``slurm.sbatch`` as a job of two nodes, with stand-ins for Slurm's commands in a folder."""
    for name, body in {
        "scontrol": '[ "$*" = "show hostnames n[1-2]" ] && printf "127.0.0.1\\nn2\\n"',
        "srun": srun,
    }.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (commands / name).chmod(0o755)
    environ = environment(
        PATH=f"{commands}:{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=ROOT,
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_NNODES=2,
        SLURM_JOB_ID=17,
        SLURM_CPUS_ON_NODE=96,
        FABRIC="none",
        **more,
    )
    line = ["bash", str(LAUNCH / "slurm.sbatch")]
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize(("chosen", "cpus"), [({}, 96), ({"CPUS_PER_TASK": 12}, 12)], ids=["all", "chosen"])
def test_slurm_gives_the_ranks_of_a_node_its_cpus(chosen: dict[str, object], cpus: int, tmp_path: Path) -> None:
    done = slurm(tmp_path, 'printf "%s\\n" "$@"', **chosen)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    options = words[: words.index("bash")]
    assert options == ["--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", str(cpus), "--kill-on-bad-exit=1"]


@pytest.mark.slow
def test_slurm_with_stand_ins_for_its_commands(tmp_path: Path) -> None:
    """``srun`` starts the command once for each node, side by side, with the node's number, as Slurm's own does."""
    srun = """
        while [ "$1" != bash ]; do shift; done
        SLURM_NODEID=0 "$@" & first=$!
        SLURM_NODEID=1 "$@" >/dev/null & second=$!
        wait $first && wait $second
    """
    flags = f"{SMALL} --tokens 64 --blocks 1"
    done = slurm(tmp_path, srun, MASTER_PORT=free_ports(), NPROC=1, ONLY="validate", VALIDATE_FLAGS=flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation: 2 ranks" in done.stdout
    assert "VALIDATION PASS" in done.stdout


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_holds_what_the_operator_and_torchrun_read(name: str) -> None:
    job = manifest(name)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        assert replica["restartPolicy"] == "Never"
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["command"][:2] == ["bash", "-c"]
        started = re.fullmatch(r"NODE_RANK=\$RANK exec bash (\S+)", container["command"][2])
        assert started is not None
        assert (ROOT / started[1]).is_file()
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["pretrain-port"] == ports["pytorchjob-port"] + 1
        environ = {one["name"]: one["value"] for one in container["env"]}
        assert all(isinstance(value, str) for value in environ.values())
        assert environ["FABRIC"] in FABRICS
        assert environ["FABRIC"] in name
        assert int(environ["NNODES"]) == sum(one["replicas"] for one in replicas.values())
        assert int(environ["NPROC"]) == container["resources"]["limits"]["nvidia.com/gpu"]
        assert container["image"].endswith(f":{environ['FABRIC']}")
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    limits = container["resources"]["limits"]
    devices = [limit for limit in limits if limit.startswith(("rdma/", "vpc.amazonaws.com/efa"))]
    assert len(devices) == 1
    assert devices[0].startswith("vpc.") == ("efa" in name)
    assert "memory" in limits or not any(limit.startswith("hugepages-") for limit in limits)


def test_image_pins_what_it_installs_and_has_a_target_for_each_manifest() -> None:
    text = (LAUNCH / "Dockerfile").read_text()
    pins = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    for name in ("TORCH_VERSION", "NCCL_VERSION", "EFA_INSTALLER_VERSION"):
        assert re.fullmatch(r"\d+\.\d+\.\d+", pins[name]), name
    assert tuple(map(int, pins["NCCL_VERSION"].split("."))) >= (2, 30, 4)
    commands = [part.strip() for part in re.split(r"&&|\n", text.replace("\\\n", " "))]
    installs = [part.split("pip install ")[1].split() for part in commands if "pip install " in part]
    assert len(installs) == 5
    for words in installs:
        packages = [word for word in words if not word.startswith(("-", "https:", "/opt/", "."))]
        assert all("==" in package for package in packages), packages
    assert re.fullmatch(r"[0-9a-f]{40}", pins["DEEPEP_COMMIT"])
    assert set(re.findall(r"^FROM base AS (\w+)$", text, re.MULTILINE)) == {"ib", "efa"}
    (image,) = re.findall(r"^FROM (nvidia/\S+) AS base$", text, re.MULTILINE)
    assert re.search(r":\d+\.\d+\.\d+-", image)
    assert "WORKDIR /opt/megatron-moe-v2" in text
    assert "root=/opt/megatron-moe-v2" in (LAUNCH / "slurm.sbatch").read_text()
