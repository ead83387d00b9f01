"""What DeepEP needs to know of the network, on made sysfs trees. No machine with EFA ran any of this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_moe_v2 import BackendError, LimitError
from megatron_moe_v2.buffers import fabric
from megatron_moe_v2.settings import DEEPEP_DEFAULTS, Settings, set_deepep_defaults


def sysfs(root: Path, kind: str | None) -> Path:
    devices = {"efa": "rdmap0s6", "infiniband": "mlx5_0"}
    if kind is not None:
        driver = root / "drivers" / ("efa" if kind == "efa" else "mlx5_core")
        device = root / "class" / "infiniband" / devices[kind] / "device"
        driver.mkdir(parents=True)
        device.mkdir(parents=True)
        (device / "driver").symlink_to(driver)
    return root


@pytest.mark.parametrize("kind", ["efa", "infiniband", None])
def test_rdma_kind(tmp_path: Path, kind: str | None) -> None:
    assert fabric.rdma_kind(sysfs(tmp_path, kind)) == kind


@pytest.mark.parametrize(
    ("kind", "asked", "hybrid", "got"),
    [
        ("efa", 0, True, 128),
        ("efa", 0, False, 0),
        ("efa", 64, True, 64),
        ("infiniband", 0, True, 0),
        ("infiniband", 500, True, 500),
        (None, 0, True, 0),
    ],
)
def test_queue_pairs(tmp_path: Path, kind: str | None, asked: int, hybrid: bool, got: int) -> None:
    assert fabric.allocated_qps(asked, hybrid=hybrid, sysfs=sysfs(tmp_path, kind)) == got


def test_more_queue_pairs_than_efa_has(tmp_path: Path) -> None:
    with pytest.raises(LimitError, match=r"NUM_QPS.*129.*128"):
        fabric.allocated_qps(129, hybrid=True, sysfs=sysfs(tmp_path, "efa"))


@pytest.mark.parametrize(
    ("kind", "environment", "line"),
    [
        (None, {}, "export EP_DISABLE_GIN=1"),
        (None, {"EP_DISABLE_GIN": "0"}, "export EP_DISABLE_GIN=1"),
        (None, {"EP_DISABLE_GIN": "1"}, None),
        ("infiniband", {}, None),
        ("infiniband", {"NCCL_CUMEM_ENABLE": "0"}, "export NCCL_CUMEM_ENABLE=1"),
    ],
)
def test_what_to_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, environment: dict[str, str], line: str | None
) -> None:
    for name in ("EP_DISABLE_GIN", "NCCL_CUMEM_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if line is None:
        fabric.check_host(sysfs(tmp_path, kind))
        return
    with pytest.raises(BackendError, match=line):
        fabric.check_host(sysfs(tmp_path, kind))


@pytest.mark.parametrize("name", DEEPEP_DEFAULTS)
@pytest.mark.parametrize(("before", "allowed", "after"), [(None, True, "1"), (None, False, None), ("0", True, "0")])
def test_defaults_are_set_once_and_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, name: str, before: str | None, allowed: bool, after: str | None
) -> None:
    import os

    for every in DEEPEP_DEFAULTS:
        monkeypatch.setenv(every, "to be restored")
    if before is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, before)
    set_deepep_defaults(Settings(set_env=allowed))
    found: Any = os.environ.get(name)
    assert found == after
