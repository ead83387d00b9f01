"""What differs between the ranks of a job. The ranks meet in the launcher's store, and no process group is made."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from ...errors import rank_table
from ...settings import PREFIX
from .findings import FAIL, OK, WARN, Finding, Status

__all__ = ["Meeting", "differences"]

GROUP = "ranks"
FATAL_FINDINGS = ("package", "torch", "nccl-loaded", "deep_ep-import", "deep_ep-classes", "backend", "settings")
FATAL_VARIABLES = ("EP_DISABLE_GIN", "EP_NUM_TOPK_IDX_BITS", "NCCL_CUMEM_ENABLE", "NCCL_GIN_ENABLE", "NCCL_GIN_TYPE")
OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
"""Launchers give each rank its own."""
STATUS_ALONE = ("import-time", "jit-cache", "selftest")
"""Findings whose text is each host's or rank's own."""

_PLACE = re.compile(r"(?: at| from) /\S+")


class Meeting:
    """The store that a launcher such as ``torchrun`` provides.

    Args:
        timeout: seconds that rank 0 waits for the others, and they for its verdict.
    """

    def __init__(self, timeout: float) -> None:
        from torch.distributed.rendezvous import rendezvous

        self.timeout = timeout
        self._store: Any
        self._store, self.rank, self.world = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))

    def collect(self, mine: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Rank 0: what each rank that came in time reported. Others: nothing."""
        self._store.set(f"doctor/{self.rank}", json.dumps(mine))
        if self.rank:
            return {}
        deadline = time.monotonic() + self.timeout
        waiting = set(range(self.world))
        while waiting and time.monotonic() < deadline:
            waiting -= {rank for rank in waiting if self._store.check([f"doctor/{rank}"])}
            time.sleep(0.05)
        came = sorted(set(range(self.world)) - waiting)
        return {rank: json.loads(self._store.get(f"doctor/{rank}")) for rank in came}

    def conclude(self, status: str | None = None) -> str:
        """Rank 0 gives the verdict, the others learn it; the store's host stays until they have."""
        if status is not None:
            self._store.set("doctor/verdict", status)
            deadline = time.monotonic() + min(self.timeout, 5.0)
            seen = [f"doctor/seen/{rank}" for rank in range(1, self.world)]
            while time.monotonic() < deadline and not all(self._store.check([key]) for key in seen):
                time.sleep(0.05)
            return status
        self._store.wait(["doctor/verdict"], timedelta(seconds=2 * self.timeout))
        verdict = str(self._store.get("doctor/verdict").decode())
        self._store.set(f"doctor/seen/{self.rank}", "")
        return verdict


def differences(reports: Mapping[int, Mapping[str, Any]], world: int) -> Iterator[Finding]:
    """Findings about the whole job, from rank to ``{"host", "gpus", "findings", "environment"}``."""
    missing = sorted(set(range(world)) - set(reports))
    hosts = rank_table({rank: report["host"] for rank, report in reports.items()})
    yield Finding(
        id="ranks",
        group=GROUP,
        status=FAIL if missing else OK,
        found=(f"no word from rank {', '.join(map(str, missing))} of {world}; " if missing else f"{world} ranks: ")
        + _flat(hosts),
        needed="a report from every rank",
        fix="Look at that rank's own output: torch may be broken there, or its host not reached." if missing else "",
    )
    yield from _crowded(reports)
    found = 0
    for what, texts in _compared(reports):
        if len(set(texts.values())) > 1:
            found += 1
            fails = any(
                one["id"] == what and one["status"] == FAIL for report in reports.values() for one in report["findings"]
            )
            yield Finding(
                id=f"differs-{what}",
                group=GROUP,
                status=FAIL if fails else _gravity(what),
                found=_flat(rank_table(texts)),
                needed="the same on every rank",
                fix=f"Make {what} equal on all hosts.",
            )
    if not found:
        yield Finding(id="differences", group=GROUP, status=OK, found="no finding and no variable differs")


def _flat(table: str) -> str:
    return "; ".join(line.strip() for line in table.splitlines())


def _gravity(what: str) -> Status:
    return FAIL if what in FATAL_FINDINGS or what in FATAL_VARIABLES or what.startswith(PREFIX) else WARN


def _compared(reports: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[str, dict[int, str]]]:
    """For each finding and variable, what each rank has; folders and free space are each host's own."""
    ids = list(dict.fromkeys(one["id"] for report in reports.values() for one in report["findings"]))
    for name in ids:
        texts = {}
        for rank, report in reports.items():
            mine = next((one for one in report["findings"] if one["id"] == name), None)
            text = mine["status"] if mine else "(nothing)"
            texts[rank] = f"{text}: {_PLACE.sub('', mine['found'])}" if mine and name not in STATUS_ALONE else text
        yield name, texts
    variables = sorted({name for report in reports.values() for name in report["environment"]} - set(OWN_VARIABLES))
    for name in variables:
        yield name, {rank: report["environment"].get(name, "(unset)") for rank, report in reports.items()}


def _crowded(reports: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """Hosts with more ranks than GPUs."""
    for host in sorted({report["host"] for report in reports.values()}):
        there = {rank: report for rank, report in reports.items() if report["host"] == host}
        first = next(iter(there.values()))
        if 0 < first["gpus"] < len(there) and first["environment"].get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            yield Finding(
                id=f"crowded-{host}",
                group=GROUP,
                status=FAIL,
                found=f"{len(there)} ranks on the {first['gpus']} GPUs of {host}",
                needed="a GPU for each rank",
                fix="Start fewer ranks, or see `megatron-moe-v2 env single-gpu`.",
            )
