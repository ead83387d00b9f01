"""All ranks of a group hold the same facts, or all raise the same error.

Runs over the store that the ranks met at, not over the process group: the store does not depend on what is being
checked, needs no communicator, and can say which rank has not come. Each agreement is a numbered event. Every rank
posts its facts, or the text of its local error; the group's rank 0 compares them and posts a verdict, which every rank
reads. What is posted is JSON.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from .errors import CommunicationError, MissingRankError, MoEError, RankMismatchError, from_wire, rank_table, to_wire

__all__ = ["agree", "agreed_name", "is_registered", "post_failure", "posted_failure"]

logger = logging.getLogger(__name__)

_MARGIN_SECS = 2.0
"""How much longer than rank 0 the others wait, so that its verdict reaches them; also how long rank 0 lingers."""

_LONGEST_PAUSE_SECS = 0.05

_events: dict[str, int] = {}
"""Agreements held so far by group name: a group made again under an old name goes on counting, since its keys may
lie in the same store."""


def is_registered(group: dist.ProcessGroup, rank: int | None = None) -> bool:
    """The group was not destroyed. ``rank`` is this process's in the default group, where it is known."""
    try:
        dist.get_group_rank(group, dist.get_rank() if rank is None else rank)
    except (ValueError, RuntimeError):
        return False
    return True


def agree(
    group: dist.ProcessGroup,
    topic: str,
    facts: Mapping[str, Any],
    *,
    timeout: float,
    failure: Exception | None = None,
    decide: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compare ``facts`` between all ranks. Collective over the group.

    Args:
        topic: what the event is about; part of what is compared.
        facts: must be equal on all ranks, JSON values.
        timeout: seconds to wait for the slowest rank.
        failure: this rank's local error; every rank then raises.
        decide: this rank's proposal; rank 0's is returned on every rank.

    Raises:
        MoEError: ``failure``, or on the other ranks the same type with its text.
        RankMismatchError: facts differ; the message is a table of who has what.
        MissingRankError: a rank did not come in time; the message names it.
        CommunicationError: the store is gone.
    """
    if group.size() == 1:
        if failure is not None:
            raise failure
        return dict(decide or {})
    number = _events[group.group_name] = _events.get(group.group_name, 0) + 1
    event = _Event(group, number, topic)
    report = {"topic": topic, "facts": _flat(facts), "error": None if failure is None else to_wire(failure)}
    try:
        verdict = event.hold(report, dict(decide or {}), timeout)
    except MoEError:
        raise
    except RuntimeError as error:
        raise failure or CommunicationError(
            f"rank {group.rank()} lost the store that ranks meet at, in agreement {number} on {topic}",
            got=str(error).splitlines()[0],
            fix="Usually the process that hosts it ended: look for the first error in its log.",
        ) from error
    if verdict["ok"]:
        return dict(verdict["decided"])
    if failure is not None:
        raise failure
    if verdict["kind"] == "error":
        raise from_wire(verdict["text"], verdict["rank"])
    raise _KINDS[verdict["kind"]](verdict["text"])


def agreed_name(group: dist.ProcessGroup) -> str:
    """A name for what was made since the group's last agreement: the same on all ranks, never used before."""
    return f"megatron_moe_v2/{group.group_name}/{_events.get(group.group_name, 0)}"


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names, so that only what differs is shown."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def post_failure(group: dist.ProcessGroup, name: str, number: int, error: Exception) -> None:
    """Leave word in the store that this rank's operation ``number`` failed. Not collective.

    It is for ranks that will wait for it in vain, see :func:`posted_failure`. ``name`` is the group's among all that
    used the store.
    """
    if group.size() > 1:
        report = {"number": number, "error": to_wire(error)}
        try:
            dist.distributed_c10d._get_default_store().set(_failure_key(name, dist.get_rank()), json.dumps(report))
        except RuntimeError as lost:  # the error itself matters more
            logger.debug("no word could be left in the store: %s", lost)


def posted_failure(group: dist.ProcessGroup, name: str, number: int) -> MoEError | None:
    """Another rank's posted failure from operation ``number`` on, as an error of its type, or None. Never raises."""
    try:
        store = dist.distributed_c10d._get_default_store()
        for rank in dist.get_process_group_ranks(group):
            if rank == dist.get_rank() or not store.check([_failure_key(name, rank)]):
                continue
            report = json.loads(store.get(_failure_key(name, rank)))
            if report["number"] >= number:
                return from_wire(report["error"], rank)
    except (RuntimeError, ValueError, KeyError) as lost:
        logger.debug("no word could be read from the store: %s", lost)
    return None


def _failure_key(name: str, rank: int) -> str:
    return f"megatron_moe_v2/{name}/failure/{rank}"


_KINDS: dict[str, Callable[[str], MoEError]] = {"mismatch": RankMismatchError, "missing": MissingRankError}


class _Event:
    """One numbered agreement of one group, over the store."""

    def __init__(self, group: dist.ProcessGroup, number: int, topic: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.global_ranks = dist.get_process_group_ranks(group)
        self.prefix, self.number, self.topic = f"megatron_moe_v2/{group.group_name}", number, topic
        self.store = dist.distributed_c10d._get_default_store()  # torch has no public way to it

    def key(self, name: object, number: int | None = None) -> str:
        return f"{self.prefix}/{self.number if number is None else number}/{name}"

    def hold(self, report: dict[str, Any], proposal: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.store.set(self.key(self.rank), json.dumps(report))
        if self.rank == 0:
            verdict = self.judge(proposal, timeout)
            self.store.set(self.key("verdict"), json.dumps(verdict))
        else:
            verdict = self.await_verdict(timeout)
        if self.rank not in verdict.get("awaited", [self.rank]):
            verdict["text"] += ". This rank came after that"
        if verdict["ok"]:
            self.forget()
        else:
            self.acknowledge(verdict)
        return verdict

    def judge(self, proposal: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Rank 0: wait for all reports and compare them."""
        if not self.wait([self.key(rank) for rank in range(self.size)], timeout) and len(self.present()) < self.size:
            return {"ok": False, "kind": "missing", "text": self.missing(timeout), "awaited": self.present()}
        reports = [json.loads(self.store.get(self.key(rank))) for rank in range(self.size)]
        for rank, report in enumerate(reports):
            if report["error"] is not None:
                return {"ok": False, "kind": "error", "rank": self.global_ranks[rank], "text": report["error"]}
        differing = {
            name
            for report in reports
            for name in report["facts"].keys() | reports[0]["facts"].keys()
            if report["facts"].get(name) != reports[0]["facts"].get(name)
        }
        if any(report["topic"] != reports[0]["topic"] for report in reports):
            lines = {self.global_ranks[rank]: report["topic"] for rank, report in enumerate(reports)}
        elif differing:
            lines = {
                self.global_ranks[rank]: ", ".join(f"{name}={report['facts'].get(name)}" for name in sorted(differing))
                for rank, report in enumerate(reports)
            }
        else:
            return {"ok": True, "decided": proposal}
        text = f"ranks disagree in agreement {self.number} on {self.topic}:\n{rank_table(lines)}"
        return {"ok": False, "kind": "mismatch", "text": text}

    def await_verdict(self, timeout: float) -> dict[str, Any]:
        if self.wait([self.key("verdict")], timeout + _MARGIN_SECS):
            return dict(json.loads(self.store.get(self.key("verdict"))))
        raise MissingRankError(self.missing(timeout))

    def wait(self, keys: list[str], timeout: float) -> bool:
        """Ask again and again: the store's own wait would keep all other threads of this process from it."""
        until, pause = time.monotonic() + timeout, 1e-3
        while not self.store.check(keys):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)
        return True

    def present(self) -> list[int]:
        return [rank for rank in range(self.size) if self.store.check([self.key(rank)])]

    def missing(self, timeout: float) -> str:
        absent = sorted(set(range(self.size)) - set(self.present()))
        named = ", ".join(str(self.global_ranks[rank]) for rank in absent) or "none, but rank 0 gave no verdict"
        return (
            f"agreement {self.number} on {self.topic}: no word within {timeout:g} s from rank {named}. "
            "It may be dead, elsewhere in the program, or not calling this at all"
        )

    def acknowledge(self, verdict: dict[str, Any]) -> None:
        """A failed event ends processes; rank 0, which may host the store, stays until the others have read why."""
        self.store.add(self.key("read"), 1)
        if self.rank != 0:
            return
        awaited = len(verdict.get("awaited", range(self.size)))
        until = time.monotonic() + _MARGIN_SECS
        while self.store.add(self.key("read"), 0) < awaited and time.monotonic() < until:
            time.sleep(0.01)

    def forget(self) -> None:
        """Everybody has read the verdict before this one."""
        self.store.delete_key(self.key(self.rank, self.number - 1))
        if self.rank == 0:
            self.store.delete_key(self.key("verdict", self.number - 1))
