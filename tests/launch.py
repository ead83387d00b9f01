"""Runs module-level functions on N ranks: gloo, one thread and one process a rank.

Two ways, for two needs:

- :class:`RankPool` keeps its processes. ``RankPool(2).run(fn, *args)`` calls ``fn(rank, world, *args)`` on both ranks
  and returns what each returned; starting Python and torch is paid once a session.
- :meth:`Launch.fresh` starts processes for one call, for faults that leave none usable: a rank that is killed, a group
  that is destroyed. It reports per rank the value or failure, the exit code and the seconds, and never raises for them.
  :meth:`Launch.kept` reports the same and keeps its processes: for jobs that make their default group themselves.

A call that hangs ends at its time-out with the Python stack of every rank in the error; the pool kills its processes
and starts new ones at the next call. The functions must be importable by name in another process: module level, in a
file of this folder. Arguments and results travel as pickles; tensors are copied.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import gc
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

__all__ = ["Failure", "Launch", "Outcome", "RankPool", "RemoteError", "join_anew", "join_group"]

Job = Callable[..., Any]

START_SECS = 120.0  # importing torch on a loaded machine
GRACE_SECS = 15.0  # what the other ranks get once one has failed
ENVIRONMENT = {"MCORE_DEEPEP_V2_AGREE_SECS": "5", "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception on a rank, as text.

    Attributes:
        type_name: name of its class; ``Hung`` and ``Died`` are this module's own.
        bases: names of all its classes, itself first.
        text: its message.
        trace: its traceback, or what the process wrote last.
    """

    type_name: str
    text: str
    bases: tuple[str, ...] = ()
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = type(error)
        return cls(
            type_name=kind.__name__,
            text=str(error),
            bases=tuple(base.__name__ for base in kind.__mro__),
            trace="".join(traceback.format_exception(error)),
        )

    def isa(self, kind: type | str) -> bool:
        """Whether the exception was of ``kind``, by name."""
        return (kind if isinstance(kind, str) else kind.__name__) in self.bases


class RemoteError(Exception):
    """At least one rank failed.

    Attributes:
        failures: rank to :class:`Failure`, failed ranks only.
        outcomes: per rank what it returned, or its :class:`Failure`.
    """

    def __init__(self, outcomes: Sequence[Any]) -> None:
        self.outcomes = list(outcomes)
        self.failures = {rank: item for rank, item in enumerate(outcomes) if isinstance(item, Failure)}
        super().__init__(
            "\n".join(f"rank {rank}: {f.type_name}: {f.text}\n{f.trace}" for rank, f in self.failures.items())
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one fresh process ended.

    Attributes:
        value: what the function returned, None if it did not.
        failure: what it raised; ``Hung`` when it had to be killed, ``Died`` when it went without an answer.
        exit_code: of the process, negative for a signal.
        seconds: from the common start, after all ranks were up, to the answer or the end.
    """

    value: Any = None
    failure: Failure | None = None
    exit_code: int | None = None
    seconds: float = 0.0


class _Worker:
    """One rank's process, seen from the parent."""

    def __init__(self, rank: int, world: int, port: int, tag: str, init: bool, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        self.log = tempfile.TemporaryFile(prefix=f"rank{rank}-")  # noqa: SIM115  (lives as long as the process)
        self.connection = Connection(ours.detach())
        path = os.pathsep.join(entry for entry in sys.path if entry)
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        own |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), tag, str(int(init))],
            env={**os.environ, **ENVIRONMENT, **own, **env},
            stdout=self.log,
            stderr=self.log,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # a dead process shows at the next receive
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            return Failure(type_name="Died", text=f"exit code {self.process.poll()}", trace=self.tail())

    def tail(self, size: int = 4000) -> str:
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - size))
        return self.log.read().decode(errors="replace")

    def stack(self) -> Failure:
        """Where a hung process stands."""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        return Failure(type_name="Hung", text="no answer within the time-out", trace=self.tail())

    def close(self, patience: float = 0.0) -> int | None:
        """End the process, politely for ``patience`` seconds; its exit code."""
        with contextlib.suppress(OSError):
            self.connection.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        return self.process.returncode


class _Crew:
    """The processes of one world, and the store they meet at: in the parent, on a port of the system's choice."""

    def __init__(self, world: int, tag: str, *, init: bool = True, env: Mapping[str, str] | None = None) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers = [_Worker(rank, world, self.store.port, tag, init, env or {}) for rank in range(world)]
        ready = self.gather(START_SECS)[0]
        if any(isinstance(item, Failure) for item in ready):
            self.close()
            raise RemoteError(ready)

    def call(
        self, job: Job, args: tuple[Any, ...], timeout: float, grace: float = GRACE_SECS
    ) -> tuple[list[Any], list[float]]:
        for worker in self.workers:
            worker.send((job, args))
        return self.gather(timeout, grace)

    def gather(self, timeout: float, grace: float = GRACE_SECS) -> tuple[list[Any], list[float]]:
        """Per rank the answer or a :class:`Failure`, and the seconds to it."""
        start = time.monotonic()
        deadline = start + timeout
        pending = {worker.connection: worker for worker in self.workers}
        answers: list[Any] = [None] * len(self.workers)
        seconds = [timeout] * len(self.workers)
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                assert isinstance(connection, Connection)
                worker = pending.pop(connection)
                answers[worker.rank] = answer = worker.receive()
                seconds[worker.rank] = time.monotonic() - start
                if isinstance(answer, Failure):
                    deadline = min(deadline, time.monotonic() + grace)
        for worker in pending.values():
            answers[worker.rank] = worker.stack()
        return answers, seconds

    def close(self, patience: float = 0.0) -> list[int | None]:
        for worker in self.workers:
            worker.send(None)
        return [worker.close(patience) for worker in self.workers]


class RankPool:
    """N lasting processes. They start at the first call."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._crew: _Crew | None = None
        self._starts = 0
        atexit.register(self.close)

    def run(self, job: Job, *args: Any, timeout: float = 60.0) -> list[Any]:
        """What ``job(rank, world, *args)`` returned on each rank.

        Raises:
            RemoteError: a rank raised, died or did not answer in ``timeout`` seconds.
        """
        outcomes = self.outcomes(job, *args, timeout=timeout)
        if any(isinstance(item, Failure) for item in outcomes):
            raise RemoteError(outcomes)
        return outcomes

    def outcomes(self, job: Job, *args: Any, timeout: float = 60.0) -> list[Any]:
        """As :meth:`run`, with a :class:`Failure` in the place of what a failed rank would have returned."""
        if self._crew is None:
            self._starts += 1
            self._crew = _Crew(self.world, f"pool{self._starts}")
        answers, _ = self._crew.call(job, args, timeout)
        failed = [item for item in answers if isinstance(item, Failure)]
        if failed and (any(f.type_name in ("Hung", "Died") for f in failed) or not self._in_step()):
            self._crew.close()
            self._crew = None
        return answers

    def restart(self) -> None:
        """New processes at the next call."""
        self.close()

    def close(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close(patience=10.0)

    def _in_step(self) -> bool:
        """Whether the ranks still pair their collectives after a failure."""
        assert self._crew is not None
        return not any(isinstance(item, Failure) for item in self._crew.call(_barrier, (), 5.0)[0])


class Launch:
    """Processes for one call."""

    @staticmethod
    def fresh(
        world: int,
        job: Job,
        *args: Any,
        timeout: float = 60.0,
        init: bool = True,
        env: Mapping[str, str] | None = None,
        grace: float = GRACE_SECS,
    ) -> list[Outcome]:
        """Call ``job(rank, world, *args)`` on ``world`` new processes and report how each ended.

        Args:
            timeout: seconds for the call; what is left then is killed.
            init: whether the default group exists when ``job`` starts.
            env: additions to the environment, the same for all ranks.
            grace: seconds that the other ranks get once one has failed.
        """
        crew = _Crew(world, "fresh", init=init, env=env)
        answers, seconds = crew.call(job, args, timeout, grace)
        patience = 0.0 if any(isinstance(a, Failure) and a.type_name == "Hung" for a in answers) else 5.0
        return _outcomes(answers, crew.close(patience), seconds)

    @staticmethod
    def kept(
        world: int, job: Job, *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> list[Outcome]:
        """As :meth:`fresh` without a default group, in processes that stay for the next call unless one failed.

        Args:
            env: additions to the environment during the call.
        """
        crew = _kept.get(world)
        if crew is None:
            if not _kept:
                atexit.register(_close_kept)
            crew = _kept[world] = _Crew(world, "kept", init=False)
        answers, seconds = crew.call(_in_turn, (job, dict(env or {}), *args), timeout)
        codes: list[int | None] = [None] * world
        if any(isinstance(answer, Failure) for answer in answers):
            codes = _kept.pop(world).close()
        return _outcomes(answers, codes, seconds)


_kept: dict[int, _Crew] = {}


def _close_kept() -> None:
    while _kept:
        _kept.popitem()[1].close(patience=10.0)


def _in_turn(rank: int, world: int, job: Job, env: Mapping[str, str], *args: Any) -> Any:
    """Run ``job`` and leave the process as it was found."""
    from megatron_moe_v2 import close_buffers, set_deepep_num_sms
    from megatron_moe_v2.pool import pool

    pool.constructions = 0
    before = dict(os.environ)
    os.environ.update(env)
    try:
        value = job(rank, world, *args)
        close_buffers(release_graphs=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        set_deepep_num_sms(0)
    finally:
        os.environ.clear()
        os.environ.update(before)
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
    return value


def _outcomes(answers: Sequence[Any], codes: Sequence[int | None], seconds: Sequence[float]) -> list[Outcome]:
    return [
        Outcome(
            value=None if isinstance(answer, Failure) else answer,
            failure=answer if isinstance(answer, Failure) else None,
            exit_code=code,
            seconds=spent,
        )
        for answer, code, spent in zip(answers, codes, seconds, strict=True)
    ]


_joined = itertools.count()
"""Default groups that this process made by :func:`join_anew`; the same on all ranks of a job."""


def join_anew(backend: str, rank: int, world: int, **more: Any) -> None:
    """Make a default group under a name of its own in the store, so that none meets what an earlier one left there.

    Collective over the world.
    """
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    tag = f"joined{next(_joined)}"
    dist.init_process_group(backend, store=PrefixStore(tag, store), rank=rank, world_size=world, **more)


def join_group(tag: str, *, timeout: float = 30.0) -> None:
    """Make the default group of this process, leaving the present one first. Collective over the world.

    Args:
        tag: equal on all ranks and new at each call, so that no rank meets what an earlier group left in the store.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    limit = datetime.timedelta(seconds=timeout)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=PrefixStore(tag, store), rank=rank, world_size=world, timeout=limit)


def _barrier(rank: int, world: int) -> None:
    dist.barrier()


def _follow_parent() -> None:
    """End this process when its parent is gone, also while a collective blocks."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve(connection: Connection, tag: str, init: bool) -> None:
    """The life of a worker: answer each ``(job, args)`` until None comes or the parent is gone."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if init:
        join_group(tag)
    connection.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        if message is None:
            break
        job, args = message
        try:
            reply = pickle.dumps(job(rank, world, *args))
        except Exception as error:
            reply = pickle.dumps(Failure.of(error))
        connection.send_bytes(reply)


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _follow_parent()
    import launch  # the classes that travel must be the ones of the importable module, not of __main__

    launch._serve(Connection(int(sys.argv[1])), sys.argv[2], bool(int(sys.argv[3])))
