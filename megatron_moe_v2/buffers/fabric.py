"""What DeepEP needs to know of the network, read from sysfs, and the variables that it wants set.

Nothing here was run on a machine with EFA; the detection is tested on made sysfs trees.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import BackendError, LimitError
from ..settings import deepep_environment, name_of

__all__ = ["allocated_qps", "check_host", "rdma_kind"]

logger = logging.getLogger(__name__)

EFA_QPS = 128
"""Slots that EFA's shared ring is said to have."""


def rdma_kind(sysfs: Path = Path("/sys")) -> str | None:
    """``"efa"``, ``"infiniband"`` (RoCE included), or None where the host has no RDMA device."""
    devices = sorted((sysfs / "class" / "infiniband").glob("*"))
    if not devices:
        return None
    for device in devices:
        if device.name.startswith("efa") or (device / "device" / "driver").resolve().name == "efa":
            return "efa"
    return "infiniband"


def check_host(sysfs: Path = Path("/sys")) -> None:
    """Refuse what DeepEP would only report from deep inside a construction.

    Raises:
        BackendError: no RDMA device and GIN not disabled, or cuMem disabled; holds the line to export.
    """
    environment = deepep_environment()
    if environment["NCCL_CUMEM_ENABLE"] == "0":
        raise BackendError(
            "NCCL_CUMEM_ENABLE=0, but DeepEP V2 maps its memory by cuMem", fix="export NCCL_CUMEM_ENABLE=1"
        )
    if rdma_kind(sysfs) is None and environment["EP_DISABLE_GIN"] != "1":
        raise BackendError(
            "this host has no RDMA device, and DeepEP V2 would ask NCCL for GIN", fix="export EP_DISABLE_GIN=1"
        )


def allocated_qps(asked: int, *, hybrid: bool, sysfs: Path = Path("/sys")) -> int:
    """Queue pairs to ask DeepEP for; 0 leaves it to DeepEP, except on EFA.

    Args:
        asked: the setting.

    Raises:
        LimitError: more than EFA has.
    """
    if rdma_kind(sysfs) != "efa":
        return asked
    if asked > EFA_QPS:
        raise LimitError(name_of("num_qps"), got=asked, expected=f"at most {EFA_QPS} on EFA")
    if asked or not hybrid:
        return asked
    logger.info("asking for %d queue pairs, all that EFA's shared ring has", EFA_QPS)
    return EFA_QPS
