"""Who is alive and where: every rank leaves a word in the store each second, so that any rank can name the silent one.

DeepEP's time-outs say that somebody is late, not who. A daemon thread posts this rank's host, operation number and last
shape over a connection of its own; nothing is posted in the step itself.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections import defaultdict
from typing import Any

import torch.distributed as dist

__all__ = ["Heartbeat", "Operations", "heartbeat", "store_of_its_own"]

logger = logging.getLogger(__name__)

PERIOD_SECS = 1.0


_namesakes: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class Operations:
    """The operations of one group, counted, and the one that the host is in.

    Attributes:
        name: of the group, with the number of groups that had its name before: what is left in the store under it is
            this one's.
        ranks: global ranks.
        number: operations launched so far.
        operation, shape: of the last.
        since: when the host went into it, None after it came back.
        thread: that launched it.
        posted, warned: the last operations that :mod:`watchdog` left word of and spoke of.
    """

    def __init__(self, group: dist.ProcessGroup, beat: Heartbeat) -> None:
        self.name = f"{group.group_name}/{next(_namesakes[group.group_name])}"
        self.ranks = dist.get_process_group_ranks(group)
        self.number = self.posted = self.warned = 0
        self.operation, self.shape = "nothing", ()  # type: tuple[str, tuple[int, ...]]
        self.since: float | None = None
        self.thread = 0
        self._beat = beat

    def note(self, operation: str, shape: tuple[int, ...]) -> None:
        """An operation of the group is about to be launched."""
        self.number += 1
        self.operation, self.shape = operation, shape
        self.thread, self.since = threading.get_ident(), time.monotonic()
        self._beat.latest = self


class Heartbeat:
    """The heartbeat of this process.

    Attributes:
        latest: the group's that launched an operation last.
    """

    def __init__(self) -> None:
        self.latest: Operations | None = None
        self._operations: weakref.WeakKeyDictionary[dist.ProcessGroup, Operations] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._posts_to: Any = None

    def operations(self, group: dist.ProcessGroup) -> Operations:
        """The group's count."""
        found = self._operations.get(group)
        if found is None:
            found = self._operations[group] = Operations(group, self)
        return found

    def start(self) -> None:
        """Begin to post; a second call does nothing. Needs the default process group."""
        default = dist.distributed_c10d._get_default_store()
        if self._posts_to is not default:
            self.stop()  # to the store of a default group that is gone
        if self._thread is None or not self._thread.is_alive():
            self._stopped.clear()
            self._posts_to = default
            store, rank = store_of_its_own(), dist.get_rank()
            self._thread = threading.Thread(target=self._post, args=(store, rank), name="moe-heartbeat", daemon=True)
            self._thread.start()
            atexit.register(self.stop)  # a thread inside the store's C++ when the interpreter ends would abort it

    def _post(self, store: Any, rank: int) -> None:
        own = {"host": socket.gethostname(), "pid": os.getpid()}
        beat = 0
        while dist.is_initialized() and not self._stopped.is_set():
            beat += 1
            last = self.latest
            number, operation, shape = (last.number, last.operation, last.shape) if last else (0, "nothing", ())
            word = {**own, "beat": beat, "number": number, "operation": operation, "shape": list(shape)}
            try:
                store.set(_key(rank), json.dumps(word))
            except RuntimeError as error:  # the store ended before this process: others will say why
                logger.debug("heartbeat ends: %s", error)
                return
            self._stopped.wait(PERIOD_SECS)

    def stop(self) -> None:
        """Post no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * PERIOD_SECS)

    def report(self, group: dist.ProcessGroup) -> str:
        """One line a rank: what it did last, and whether it is still heard of. Takes two periods. Never raises."""
        try:
            store, ranks = store_of_its_own(), dist.get_process_group_ranks(group)
            before = {rank: _word(store, rank) for rank in ranks}
            time.sleep(2 * PERIOD_SECS)
            after = {rank: _word(store, rank) for rank in ranks}
        except (RuntimeError, ValueError, KeyError) as error:
            return f"no heartbeat could be read: {error}"
        lines = []
        for rank, word in after.items():
            if word is None:
                lines.append(f"  rank {rank}: never heard of")
                continue
            was = before[rank]
            silent = was is not None and was["beat"] == word["beat"]
            state = "SILENT" if silent else "alive"
            lines.append(
                f"  rank {rank}: {state}, {word['host']} pid {word['pid']}, operation {word['number']}: "
                f"{word['operation']} of {word['shape']}"
            )
        return "\n".join(lines)


def store_of_its_own() -> Any:
    """A connection to the default group's store that no other thread uses."""
    store: Any = dist.distributed_c10d._get_default_store()  # torch has no public way to it
    try:
        return store.clone()
    except RuntimeError:  # kinds of store without connections of their own
        return store


def _key(rank: int) -> str:
    return f"megatron_moe_v2/heartbeat/{rank}"


def _word(store: Any, rank: int) -> Any:
    return json.loads(store.get(_key(rank))) if store.check([_key(rank)]) else None


heartbeat = Heartbeat()
"""The heartbeat of this process; runs once a DeepEP buffer of several ranks was built."""
