"""Buffers by what shapes them: built once, collectively, by one code path; looked up ever after; closed in order.

The ceiling and the other settings are pinned when the first buffer is built, and free again when the last is closed.
Nothing here is collective except what says so.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .agreement import agree, is_registered
from .buffers import choose, constructor_of, precheck_of
from .buffers.contract import LARGEST_NUM_TOPK
from .errors import BackendError, BufferClosedError, CaptureError, InputError, MissingRankError, MoEError
from .heartbeat import heartbeat
from .pooled import BufferSpec, PooledBuffer
from .probe import probe
from .ranges import ranges
from .settings import VARIABLES, Settings, agreement_timeout, name_of, read, set_deepep_defaults, snapshot
from .watchdog import watchdog

__all__ = [
    "BufferPool",
    "BufferSpec",
    "Ceiling",
    "PooledBuffer",
    "check_sizes",
    "close_buffers",
    "on_cuda",
    "pool",
    "resolve_group",
    "typed",
]

logger = logging.getLogger(__name__)

Ceiling = int | Literal["decode"] | None
"""Rows that a rank may dispatch in one call: a number, the environment's for decoding, or None for its usual one."""

Wish = tuple[int, int | None, Ceiling, bool]
"""Hidden, top-k, ceiling and FP8, as asked for."""

Group = dist.ProcessGroup | DeviceMesh | None

LOOK_SECS = 1.0
"""How often the environment is looked at for changes: reading it takes longer than the rest of a lookup."""


class BufferPool:
    """All buffers of the process.

    Attributes:
        pinned: the settings in force, None while no buffer lives.
        constructions: how many buffers were built so far.
        wished_num_sms: what ``set_deepep_num_sms`` asked for; 0 is automatic.
        calls: dispatches made before, each a ``Call`` with its ``entry``, by what was checked of them.
    """

    def __init__(self) -> None:
        self.pinned: Settings | None = None
        self.constructions = 0
        self.wished_num_sms = 0
        self._entries: dict[tuple[dist.ProcessGroup, BufferSpec], PooledBuffer] = {}
        self._found: dict[tuple[dist.ProcessGroup, Wish], PooledBuffer] = {}
        self._last: dict[dist.ProcessGroup, PooledBuffer] = {}
        self.calls: dict[Any, Any] = {}
        self._seen_environment = snapshot()
        self._look_again = 0.0

    def obtain(
        self,
        group: dist.ProcessGroup,
        *,
        hidden: int,
        num_topk: int | None,
        num_max_tokens_per_rank: Ceiling = None,
        use_fp8_dispatch: bool = False,
        num_sms: int = 0,
        pins_ceiling: bool = True,
    ) -> PooledBuffer:
        """The buffer for these sizes; built now, collectively over the group, if there is none.

        Where it is the first, its ceiling becomes the usual one, if it ``pins_ceiling``.
        """
        try:
            check_sizes(hidden, num_topk, num_max_tokens_per_rank)
        except InputError as error:
            self.fail(group, "buffer lookup", error)
        wish = (hidden, num_topk, num_max_tokens_per_rank, use_fp8_dispatch)
        entry = self._found.get((group, wish))
        if entry is None or not entry.usable:
            if not is_registered(group):
                self._purge()
                raise BufferClosedError("the process group was destroyed", fix="Pass a living group.")
            try:
                entry = self._find(group, *wish) if self.pinned else None
            except InputError as error:
                self.fail(group, "buffer lookup", error)
            if entry is None:
                entry = self._build(group, wish, num_sms, pins_ceiling)
            self._found[group, wish] = entry
        self.used(entry)
        return entry

    def used(self, entry: PooledBuffer) -> None:
        """A dispatch on ``entry`` is about to be made."""
        if time.monotonic() >= self._look_again:
            self._warn_of_changes()
        self._last[entry.group] = entry

    def fail(self, group: dist.ProcessGroup, operation: str, error: Exception) -> NoReturn:
        """Collective over the group: raise ``error`` before it is known which buffer the call is for.

        Where a buffer of the group lives, the other ranks are taken to be in a call of one, and where it has no channel
        to compare it first if calls are compared. They are waited for no longer than an agreement.
        """
        error = typed(error, operation)
        entry = self._last.get(group)
        if entry is not None and not entry.closed and (entry.has_channel or not entry.check):
            entry.fail(operation, error)
        agree(group, operation, {}, timeout=agreement_timeout(), failure=error)
        raise error

    def entries(self, group: dist.ProcessGroup | None = None) -> list[PooledBuffer]:
        """The group's buffers, or all."""
        return [entry for key, entry in self._entries.items() if group is None or key[0] is group]

    def close(
        self, group: dist.ProcessGroup | None = None, *, abort: bool = False, release_graphs: bool = False
    ) -> None:
        """Close the group's buffers, or all. Collective over each living group unless ``abort``."""
        if not abort:
            self._release_graphs(group, forced=release_graphs)
        failure: Exception | None = None
        for key in [key for key in self._entries if group is None or key[0] is group]:
            try:
                self._drop(key, abort=abort)
            except Exception as error:  # the other buffers are freed all the same
                failure = failure or error
        if failure is not None:
            raise failure

    def _release_graphs(self, group: dist.ProcessGroup | None, *, forced: bool) -> None:
        """All ranks let go of their graphs, or all raise: which graphs still live depends on each rank's collector."""
        failures: dict[dist.ProcessGroup, Exception | None] = {}
        for entry in self.entries(group):
            try:
                entry.release_graphs(forced=forced)
            except MoEError as error:
                failures[entry.group] = error
            else:
                failures.setdefault(entry.group, None)
        for one, failure in failures.items():
            entries = self.entries(one)
            in_step = is_registered(one) and not any(entry.broken for entry in entries)
            if in_step and any(entry.backend.name == "deepep_v2" for entry in entries):
                agree(one, "close", {}, timeout=agreement_timeout(), failure=failure)
            elif failure is not None:
                raise failure

    def _drop(self, key: tuple[dist.ProcessGroup, BufferSpec], *, abort: bool) -> None:
        entry = self._entries.pop(key)
        self._found = {wish: found for wish, found in self._found.items() if found is not entry}
        self.calls.clear()
        if self._last.get(key[0]) is entry:
            del self._last[key[0]]
        if not self._entries:
            self.pinned = None
        entry.close(abort=abort)

    def _purge(self) -> None:
        for key in [key for key, entry in self._entries.items() if entry.closed or not is_registered(key[0])]:
            self._drop(key, abort=True)

    def _find(
        self, group: dist.ProcessGroup, hidden: int, num_topk: int | None, ceiling: Ceiling, fp8: bool
    ) -> PooledBuffer | None:
        assert self.pinned is not None
        spec = _spec(self.pinned, hidden, num_topk, ceiling, fp8)
        for one in (spec, replace(spec, num_topk=0) if spec.num_topk <= LARGEST_NUM_TOPK else spec):
            entry = self._entries.get((group, one))
            if entry is not None and not entry.closed:
                return entry
        return None

    def _build(self, group: dist.ProcessGroup, wish: Wish, num_sms: int, pins_ceiling: bool) -> PooledBuffer:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "a buffer cannot be built inside a CUDA graph capture", fix="Call prepare_buffer() before the capture."
            )
        self._purge()
        timeout = agreement_timeout()
        failure: Exception | None = None
        facts: dict[str, Any] = {}
        proposal: dict[str, Any] = {}
        try:
            settings = self.pinned or read()
            spec = _spec(settings, *wish)
            backend = choose(probe(), settings, on_cuda=on_cuda(group), num_ranks=group.size())
            if backend.name == "deepep_v2":
                set_deepep_defaults(settings)
            precheck_of(backend)(**asdict(spec))
            facts = {
                "backend": backend.name,
                "spec": {_named(name): value for name, value in asdict(spec).items()},
                "versions": {"torch": torch.__version__, **backend.versions},
                "settings": {
                    name_of(name): value for name, value in settings.as_dict().items() if name not in _NOT_COMPARED
                },
            }
            proposal = {"num_sms": settings.num_sms or num_sms or self.wished_num_sms}
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = typed(error, "buffer construction")
        last = self._last.get(group)
        if last is not None and last.has_channel:
            # Ranks that have this buffer may be in a call of it: they and this one must hear of each other.
            if failure is not None:
                last.fail("buffer construction", failure)
            last.announce(f"construction of a buffer for {spec}")
        try:
            decided = agree(group, "buffer construction", facts, timeout=timeout, failure=failure, decide=proposal)
        except MissingRankError as missing:
            if last is None or last.closed:
                raise
            last.fail("buffer construction", missing)  # the missing may have come to a call meanwhile
        logger.info(
            "building %s for %s, %d bytes, because %s",
            backend.class_name,
            spec,
            spec.num_bytes(group.size()),
            backend.reason,
        )
        entry = None
        try:
            sizes = asdict(spec)
            if backend.name == "deepep_v1":
                sizes["num_sms"] = max(decided["num_sms"], 0)
            built = constructor_of(backend)(group, **sizes)
            entry = PooledBuffer(group, spec, backend, built, num_sms=decided["num_sms"], check=settings.check)
        except MoEError as error:
            failure = error
        except Exception as error:  # as above; a library's own
            failure = BackendError(f"{backend.class_name} could not be built: {type(error).__name__}: {error}")
            failure.__cause__ = error
        try:
            agree(group, "buffer constructed", {}, timeout=timeout, failure=failure)
        except MoEError:
            if entry is not None:
                entry.close(abort=True)
            raise
        assert entry is not None
        self.constructions += 1
        if group.size() > 1:
            watchdog.watch(entry.operations)
            if backend.name != "embedded":
                heartbeat.start()
        self._entries[group, spec] = entry
        if self.pinned is None:
            self.pinned = settings
            ranges.use_nvtx(settings.nvtx)
            if pins_ceiling and wish[2] != "decode":
                self.pinned = replace(settings, max_tokens_per_rank=spec.num_max_tokens_per_rank)
            self._seen_environment = snapshot()
        return entry

    def _warn_of_changes(self) -> None:
        self._look_again = time.monotonic() + LOOK_SECS
        now = snapshot()
        if now == self._seen_environment:
            return
        for variable, before, after in zip(VARIABLES, self._seen_environment, now, strict=True):
            if before != after and variable.field != "agree_secs":  # which is read at each use
                logger.warning(
                    "%s changed from %s to %s after the first buffer was built: this changes nothing until "
                    "close_buffers()",
                    variable.name,
                    before,
                    after,
                )
        self._seen_environment = now


def typed(error: Exception, operation: str) -> MoEError:
    """``error`` itself if it is one of ours, else an :class:`InputError` that names and causes it."""
    if isinstance(error, MoEError):
        return error
    ours = InputError(f"{operation}: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours


_NOT_COMPARED = ("agree_secs", "nvtx", "max_tokens_per_rank", "decode_max_tokens_per_rank", "hidden", "num_topk")
"""Settings that may differ between ranks: a time-out, ranges for a profiler, and what the spec holds as it came out."""


_VARIABLES = {
    "num_max_tokens_per_rank": "max_tokens_per_rank",
    "allow_hybrid_mode": "mode",
    "num_allocated_qps": "num_qps",
    "num_cpu_timeout_secs": "cpu_timeout_secs",
    "num_gpu_timeout_secs": "gpu_timeout_secs",
} | {name: name for name in ("hidden", "num_topk", "deterministic")}
"""Field of a specification to the setting that it comes from where no argument says it."""


def _named(field: str) -> str:
    """A field of a specification, with the variable to set."""
    return f"{field} ({name_of(_VARIABLES[field])})" if field in _VARIABLES else field


def check_sizes(hidden: object, num_topk: object, ceiling: object) -> None:
    """Raise :class:`InputError` unless a buffer can be asked for with these."""
    for name, value, others in (
        ("hidden", hidden, ()),
        ("num_topk", num_topk, (None,)),
        ("num_max_tokens_per_rank", ceiling, (None, "decode")),
    ):
        if value not in others and (type(value) is not int or value < 1):
            also = "".join(f" or {other!r}" for other in others if other is not None)
            raise InputError(name, got=repr(value), expected=f"an integer from 1{also}")


def _spec(settings: Settings, hidden: int, num_topk: int | None, ceiling: Ceiling, fp8: bool) -> BufferSpec:
    if ceiling == "decode":
        ceiling = settings.decode_max_tokens_per_rank
    return BufferSpec(
        hidden=max(hidden, settings.hidden),
        num_topk=0 if num_topk is None else max(num_topk, settings.num_topk),
        num_max_tokens_per_rank=ceiling or settings.max_tokens_per_rank,
        use_fp8_dispatch=fp8,
        deterministic=settings.deterministic,
        allow_hybrid_mode=settings.mode == "hybrid",
        num_allocated_qps=settings.num_qps,
        num_cpu_timeout_secs=settings.cpu_timeout_secs,
        num_gpu_timeout_secs=settings.gpu_timeout_secs,
    )


def on_cuda(group: dist.ProcessGroup) -> bool:
    """The group moves CUDA tensors by NCCL."""
    return "nccl" in dist.get_backend_config(group) and torch.cuda.is_available()


def resolve_group(group: Group) -> dist.ProcessGroup:
    """A process group from itself, from a one-dimensional ``DeviceMesh``, or the default group from None.

    Raises:
        InputError: a mesh of more dimensions, or no default group.
    """
    if group is None:
        world = dist.group.WORLD
        if world is None:
            raise InputError(
                "no process group", fix="Call torch.distributed.init_process_group(), also for a single rank."
            )
        return world
    if isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, DeviceMesh):
        raise InputError("group", got=type(group).__name__, expected="a ProcessGroup, a DeviceMesh or None")
    if group.ndim != 1:
        raise InputError("dimensions of the DeviceMesh", got=group.ndim, expected="1", fix='Pass mesh["ep"].')
    return group.get_group()


pool = BufferPool()
"""The pool of this process."""


def close_buffers(group: Group = None, *, abort: bool = False, release_graphs: bool = False) -> None:
    """Close the buffers of ``group``, or all of the process. Collective over each living group unless ``abort``.

    A CUDA graph that uses a closed buffer would write to freed memory. What :func:`capture` returned refuses to be
    replayed after the close; graphs captured in another way are protected by nothing but the refusal to close.

    Handles of closed buffers refuse to be used. When none is left, the settings are read anew for the next. A second
    call does nothing. With ``abort``, or where a collective failed, no collective is made, and what DeepEP holds stays
    until the process ends, which is warned about.

    Args:
        release_graphs: close also what CUDA graphs use; they must not be replayed again.

    Raises:
        CapturedBufferError: a buffer was used under a CUDA graph capture; nothing was closed.
        RankMismatchError, MissingRankError: another rank does something else, or did not come in time; nothing was
            closed (DeepEP V2).
    """
    pool.close(None if group is None else resolve_group(group), abort=abort, release_graphs=release_graphs)
