"""Bytes that this host sent, by its network devices' own counters in sysfs.

EFA counts bytes (``hw_counters/tx_bytes``), InfiniBand and RoCE words of four (``counters/port_xmit_data``), network
interfaces bytes (``statistics/tx_bytes``). The counters are the host's: what other processes send is in them too, and
all ranks of a host see the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

WORD_BYTES = 4
LOOPBACK = "lo"
LOOK_SECS = 0.1


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Readings in bytes since the driver started.

    Attributes:
        fabric: by ``device/port``, with the kind in front, e.g. ``"efa rdmap0s6/1"``.
        sockets: by interface, loopback included.
    """

    fabric: dict[str, int]
    sockets: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes sent between two readings.

    Attributes:
        fabric: by EFA, InfiniBand and RoCE.
        sockets: by network interfaces other than loopback.
        loopback: within the host.
        devices: fabric ports that were read.
    """

    fabric: int
    sockets: int
    loopback: int
    devices: list[str]


def read_counters(sysfs: Path) -> Counters:
    """All counters below ``sysfs``; a device without one, or whose counter cannot be read, is left out."""
    fabric: dict[str, int] = {}
    for port in sorted((sysfs / "class" / "infiniband").glob("*/ports/*")):
        name = f"{port.parent.parent.name}/{port.name}"
        efa = _number(port / "hw_counters" / "tx_bytes")
        words = _number(port / "counters" / "port_xmit_data")
        if efa is not None:
            fabric[f"efa {name}"] = efa
        elif words is not None:
            fabric[f"infiniband {name}"] = words * WORD_BYTES
    sockets: dict[str, int] = {}
    for interface in sorted((sysfs / "class" / "net").glob("*")):
        count = _number(interface / "statistics" / "tx_bytes")
        if count is not None:
            sockets[interface.name] = count
    return Counters(fabric=fabric, sockets=sockets)


def sent_between(before: Counters, after: Counters) -> Sent:
    """What was sent between two readings of one host; a counter that went back was reset, and counts from zero."""
    fabric = _growth(before.fabric, after.fabric)
    sockets = _growth(before.sockets, after.sockets)
    loopback = sockets.pop(LOOPBACK, 0)
    return Sent(fabric=sum(fabric.values()), sockets=sum(sockets.values()), loopback=loopback, devices=sorted(fabric))


def sent_since(before: Counters, sysfs: Path, *, least: int = 0, patience: float = 0.0) -> Sent:
    """What was sent since a reading.

    Args:
        least: bytes by fabric to wait for, since a driver may report late.
        patience: seconds to wait for them.
    """
    deadline = time.monotonic() + patience
    while True:
        sent = sent_between(before, read_counters(sysfs))
        if sent.fabric >= least or time.monotonic() >= deadline:
            return sent
        time.sleep(LOOK_SECS)


def _growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """By device; one that appeared in between is left out, since what it had counted before is not known."""
    grown = {}
    for name in before.keys() & after.keys():
        grown[name] = after[name] - before[name] if after[name] >= before[name] else after[name]
    return grown


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such counter, or the driver answers "N/A (no PMA)"
        return None
