"""Who is late: a rank whose host waits long in a dispatch or combine logs where it is and which ranks do not wait too.

A rank that lives and does not come is waited for as long as the process group's or DeepEP's time-out says, and the
time-out's own text names nobody. A daemon thread looks once a second; after ``AGREE_SECS`` it leaves this rank's word
in the store, reads the others', and logs one WARNING for each operation. Nothing is raised. Kernels that wait on the
device while the host has gone on are not seen.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from typing import Any

import torch.distributed as dist

from .heartbeat import Operations, store_of_its_own
from .settings import agreement_timeout

__all__ = ["Watchdog", "watchdog"]

logger = logging.getLogger(__name__)

PERIOD_SECS = 1.0
_FRAMES = 20


class Watchdog:
    """Watches the operations of any number of groups."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Operations] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, operations: Operations) -> None:
        """Look at these from now on; a second call for the same does nothing."""
        self._watched.add(operations)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="moe-watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_SECS)
            for operations in list(self._watched):
                since, number = operations.since, operations.number
                if since is None or operations.warned == number or time.monotonic() - since < agreement_timeout():
                    continue
                operations.warned = number
                try:
                    _warn(operations, number, since)
                except (RuntimeError, ValueError, KeyError) as error:  # no store or no group any more
                    logger.warning("operation %d waits, and the other ranks cannot be asked: %s", number, error)


def _warn(operations: Operations, number: int, since: float) -> None:
    store, rank = store_of_its_own(), dist.get_rank()
    mine = {"number": number, "host": socket.gethostname(), "pid": os.getpid()}
    store.set(_key(operations, rank), json.dumps(mine))
    time.sleep(2 * PERIOD_SECS)  # those that came at the same time say so meanwhile
    if operations.since != since:
        return
    words: dict[int, Any] = {
        one: json.loads(store.get(key)) for one in operations.ranks if store.check([key := _key(operations, one)])
    }
    late = [str(one) for one in operations.ranks if one not in words or words[one]["number"] != number]
    stack = traceback.format_stack(sys._current_frames().get(operations.thread), limit=_FRAMES)
    logger.warning(
        "rank %d (%s pid %d) has waited %.0f s in operation %d, %s of %s. Not waiting in it: %s. It is here:\n%s",
        rank,
        mine["host"],
        mine["pid"],
        time.monotonic() - since,
        number,
        operations.operation,
        list(operations.shape),
        f"rank {', '.join(late)}" if late else "none; the transfer itself is slow or stuck",
        "".join(stack),
    )


def _key(operations: Operations, rank: int) -> str:
    return f"megatron_moe_v2/waiting/{operations.name}/{rank}"


watchdog = Watchdog()
"""The watchdog of this process."""
