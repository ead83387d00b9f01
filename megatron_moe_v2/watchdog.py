"""Who is late: a rank whose host waits long in a dispatch or combine logs where it is and which ranks do not wait too.

A rank that lives and does not come is waited for as long as the process group's or DeepEP's time-out says, and the
time-out's own text names nobody. A daemon thread looks once a second. A rank that waits for more than a second leaves
word of it in the store; after ``AGREE_SECS`` it reads the others' words and logs one WARNING for each operation.
Nothing is raised. Kernels that wait on the device while the host has gone on are not seen.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
import weakref

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
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, operations: Operations) -> None:
        """Look at these from now on; a second call for the same does nothing."""
        with self._lock:
            self._watched.add(operations)
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            self._thread = threading.Thread(target=self._run, name="moe-watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_SECS)
            with self._lock:
                watched = list(self._watched)
            for operations in watched:
                since, number = operations.since, operations.number
                waited = 0.0 if since is None else time.monotonic() - since
                try:
                    if waited > PERIOD_SECS and operations.posted != number:
                        operations.posted = number
                        _post(operations, number)
                    # One period more, in which those that came at the same time say so.
                    if waited > agreement_timeout() + PERIOD_SECS and operations.warned != number:
                        operations.warned = number
                        _warn(operations, number, waited)
                except (RuntimeError, ValueError, KeyError) as error:  # no store or no group any more
                    logger.debug("operation %d waits, and the other ranks cannot be asked: %s", number, error)


def _post(operations: Operations, number: int) -> None:
    store_of_its_own().set(_key(operations, dist.get_rank()), str(number))


def _warn(operations: Operations, number: int, waited: float) -> None:
    store, rank = store_of_its_own(), dist.get_rank()
    words = {one: int(store.get(key)) for one in operations.ranks if store.check([key := _key(operations, one)])}
    late = [str(one) for one in operations.ranks if words.get(one) != number and one != rank]
    stack = traceback.format_stack(sys._current_frames().get(operations.thread), limit=_FRAMES)
    logger.warning(
        "rank %d (%s pid %d) has waited %.0f s in operation %d, %s of %s. Not waiting in it: %s. It is here:\n%s",
        rank,
        socket.gethostname(),
        os.getpid(),
        waited,
        number,
        operations.operation,
        list(operations.shape),
        f"rank {', '.join(late)}" if late else "none; the transfer itself is slow or stuck",
        "".join(stack),
    )


def _key(operations: Operations, rank: int) -> str:
    return f"megatron_moe_v2/{operations.name}/waiting/{rank}"


watchdog = Watchdog()
"""The watchdog of this process."""
