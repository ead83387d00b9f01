"""One verdict for all ranks, also when some of them raise, hang or never come.

The ranks speak through a connection of their own to the store that the process group met at, never through
collectives: a rank that failed cannot be waited for in one. Each rank says how it ended; the first rank prints the
verdict and posts it; only then does anybody leave, since a launcher ends all ranks as soon as one exits with an error.
A thread beside the work ends a rank whose work cannot go on because another rank failed, because it was asked to stop,
or because its time is up. All of it works before the process group exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

LOOK_SECS = 0.3
GRACE_SECS = 8.0
"""How long the others get to find an error of their own once a rank has failed, and for their words to arrive.

From the first failure, or from SIGTERM, to the end of a process it is 2.5 times this at most: torchrun kills in 30 s.
"""
SETTLE_SECS = 3 * GRACE_SECS
"""How long a verdict may take once the time for the run is over."""
ANSWER_SECS = 30.0

Finish = Callable[[int], Any]


class Stop:
    """Takes SIGTERM as a request, which is seen also while the main thread is inside a call that runs no handler.

    To be made in the main thread, once in a process.
    """

    def __init__(self) -> None:
        self._came = False
        self._pipe, write = os.pipe()
        os.set_blocking(self._pipe, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    def wait(self, seconds: float) -> bool:
        """Whether SIGTERM has come; a request cuts the first wait short, and no later one."""
        if self._came:
            time.sleep(seconds)
        elif select.select([self._pipe], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):  # another thread was faster
                self._came = self._came or signal.SIGTERM in os.read(self._pipe, 64)
        return self._came


def place() -> tuple[int, int]:
    """This process's rank and the number of ranks, as a launcher says; without one it is alone."""
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if "RANK" in os.environ else (0, 1)


def connect(seconds: float) -> Any:
    """A connection to the store that the process group will meet at, or a store of this process without a launcher.

    Where the launcher keeps no store, rank 0 does; the process group that this process makes later shares it.

    Args:
        seconds: how long to wait for the store.
    """
    if "RANK" not in os.environ:
        return HashStore()
    keeps = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=keeps,
        multi_tenant=keeps,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )
    store.set_timeout(timedelta(seconds=ANSWER_SECS))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"validate/{restart}", store)


class Verdict:
    """Collects this rank's failures and agrees on the exit status with the others.

    Args:
        rank, world: of this process.
        seconds: for the whole run.
        stop: whether this process was asked to stop.
        leave: ends the process from the thread.
    """

    def __init__(self, rank: int, world: int, *, seconds: float, stop: Stop, leave: Finish = os._exit) -> None:
        self.rank, self.world, self.stage = rank, world, "start"
        self.failures: list[str] = []
        self._store: Any = None
        self._watched: Any = None  # a store's connection serves one thread at a time
        self._stop, self._leave, self._seconds = stop, leave, seconds
        self._deadline = time.monotonic() + seconds
        self._once, self._settling = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def connect(self) -> None:
        """Reach the store where the ranks meet; waits for it until the time is up."""
        self.stage = "connecting to the store of the process group"
        self._store = connect(max(self._deadline - time.monotonic(), 1.0))
        self._watched = connect(ANSWER_SECS)

    def fail(self, reason: str) -> None:
        """Note a failure and go on."""
        self.failures.append(reason)

    def share(self, topic: str, value: Any) -> list[Any]:
        """What each rank shared under ``topic``. Collective over the ranks.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        self._store.set(f"{topic}/{self.rank}", json.dumps(value))
        keys = [f"{topic}/{rank}" for rank in range(self.world)]
        self._store.wait(keys, timedelta(seconds=max(self._deadline - time.monotonic(), 1.0)))
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def settle(self, *, broken: bool = False) -> int:
        """The exit status, equal on all ranks; the first rank prints the verdict. Collective over the ranks.

        Args:
            broken: this rank has left the run early, and the others may wait for it in vain.
        """
        return self._settle(self._store, broken=broken)

    def _settle(self, store: Any, *, broken: bool) -> int:
        with self._once:
            if self._settling.is_set():  # the thread and the work came here together: the first one ends the process
                threading.Event().wait()
            self._settling.set()
        if store is None:
            self._print_failure([*self.failures, f"rank {self.rank} never reached the others"])
            return 1
        try:
            store.set(f"ended/{self.rank}", json.dumps(self.failures))
            if broken:
                store.set("broken", str(self.rank))
            return self._conclude(store) if self.rank == 0 else self._learn(store)
        except Exception as error:  # the store went with the process that kept it
            self._print_failure([*self.failures, f"rank {self.rank} lost the others: {type(error).__name__}: {error}"])
            return 1

    def _conclude(self, store: Any) -> int:
        waiting = set(range(self.world))
        deadline = self._deadline + GRACE_SECS
        while waiting and time.monotonic() < deadline:
            waiting -= {rank for rank in waiting if store.check([f"ended/{rank}"])}
            if waiting and (self._stop.wait(LOOK_SECS) or store.check(["broken"])):
                deadline = min(deadline, time.monotonic() + GRACE_SECS)
        reasons: dict[str, list[int]] = {}
        for rank in sorted(set(range(self.world)) - waiting):
            for reason in json.loads(store.get(f"ended/{rank}")):
                reasons.setdefault(reason, []).append(rank)
        texts = [f"{_ranks(ranks, self.world)}{reason}" for reason, ranks in reasons.items()]
        if waiting:
            texts.append(f"no word from {_ranks(sorted(waiting), 0)[:-2]}")
        if texts:
            self._print_failure(texts)
        else:
            print("VALIDATION PASS", flush=True)
        store.set("verdict", str(int(bool(texts))))
        others = [f"left/{rank}" for rank in set(range(1, self.world)) - waiting]
        deadline = time.monotonic() + GRACE_SECS
        while others and not store.check(others) and time.monotonic() < deadline:
            time.sleep(0.05)  # this process may keep the store that they read the verdict from
        return int(bool(texts))

    def _learn(self, store: Any) -> int:
        deadline = self._deadline + SETTLE_SECS
        while not store.check(["verdict"]):
            if self._stop.wait(LOOK_SECS) or store.check(["broken"]):
                deadline = min(deadline, time.monotonic() + 2 * GRACE_SECS)
            if time.monotonic() > deadline:
                raise TimeoutError("no verdict from rank 0")
        status = int(store.get("verdict"))
        store.set(f"left/{self.rank}", "")
        return status

    def _print_failure(self, texts: list[str]) -> None:
        stream = sys.stdout if self.rank == 0 else sys.stderr
        print(f"VALIDATION FAIL: {'; '.join(' '.join(text.split()) for text in texts)}", file=stream, flush=True)

    def _watch(self) -> None:
        """End this rank when its work cannot end by itself."""
        seen: float | None = None
        while not self._settling.is_set():
            stopped = self._stop.wait(LOOK_SECS)
            now = time.monotonic()
            if seen is None and (stopped or self._broken()):
                seen = now
            if now > self._deadline:
                self.failures.append(f"not finished within {self._seconds:.0f} s, at {self.stage}")
            elif seen is None or now <= seen + GRACE_SECS / 2:
                continue
            elif stopped:
                self.failures.append(f"stopped by SIGTERM, at {self.stage}")
            self._leave(self._settle(self._watched, broken=True) or 1)

    def _broken(self) -> bool:
        """Whether a rank has left the run early."""
        try:
            return self._watched is not None and bool(self._watched.check(["broken"]))
        except Exception:  # the store is gone, and so is the rank that kept it
            return True


def _ranks(ranks: list[int], world: int) -> str:
    """``"rank 3: "`` or ``"ranks 0-2, 5: "``; nothing where it is all of several."""
    if len(ranks) == world:
        return ""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}: "
