"""Buffers by what shapes them: built once, collectively, by one code path; looked up ever after; closed in order.

The ceiling and the other settings are pinned when the first buffer is built, and free again when the last is closed.
Nothing here is collective except what says so.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .agreement import agree, is_registered, post_failure
from .buffers import Backend, choose, constructor_of, precheck_of
from .buffers.contract import LARGEST_NUM_TOPK, BuiltBuffer, ElasticBufferLike, buffer_bytes
from .errors import BackendError, BufferClosedError, CaptureError, InputError, MissingRankError, MoEError
from .heartbeat import heartbeat
from .probe import probe
from .settings import TUNE, VARIABLES, Settings, agreement_timeout, read, set_deepep_defaults, snapshot

__all__ = ["BufferPool", "BufferSpec", "PooledBuffer", "close_buffers", "on_cuda", "pool", "resolve_group", "typed"]

logger = logging.getLogger(__name__)

FALLBACK_NUM_SMS = 24
"""SM count where DeepEP can make no estimate: within a few percent of its best dispatch at two ranks over NVLink."""

Wish = tuple[int, int | None, int | None, bool]
"""Hidden, top-k, ceiling and FP8, as asked for."""

Group = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """Everything but the group that shapes a buffer.

    Attributes:
        hidden: H, elements of a row.
        num_topk: K; 0 sizes for DeepEP's largest, 32, and serves every K.
        num_max_tokens_per_rank: M, the ceiling that every call carries.
        use_fp8_dispatch: sized for FP8 rows with scales.
        deterministic: fixed receive order.
        allow_hybrid_mode: hybrid topology between nodes, else direct.
        allow_multiple_reduction: the expert layout adds a rank's rows of a token before they travel.
        num_allocated_qps: queue pairs of DeepEP V2; 0 is its own choice.
        num_cpu_timeout_secs, num_gpu_timeout_secs: how long DeepEP V2 waits for other ranks.
    """

    hidden: int
    num_topk: int
    num_max_tokens_per_rank: int
    use_fp8_dispatch: bool = False
    deterministic: bool = False
    allow_hybrid_mode: bool = True
    allow_multiple_reduction: bool = True
    num_allocated_qps: int = 0
    num_cpu_timeout_secs: int = 300
    num_gpu_timeout_secs: int = 100

    def num_bytes(self, num_ranks: int) -> int:
        """Bytes that DeepEP V2 reserves for this on one NVLink domain."""
        return buffer_bytes(
            num_ranks=num_ranks,
            num_max_tokens_per_rank=self.num_max_tokens_per_rank,
            hidden=self.hidden,
            num_topk=self.num_topk,
            use_fp8_dispatch=self.use_fp8_dispatch,
            allow_multiple_reduction=self.allow_multiple_reduction,
        )


class PooledBuffer:
    """A buffer with its spec and the way it was chosen. As a context manager it closes, by abort on an exception."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        spec: BufferSpec,
        backend: Backend,
        built: BuiltBuffer,
        *,
        num_sms: int,
        check: bool,
    ) -> None:
        self.group, self.spec, self.backend, self.wished_num_sms, self.check = group, spec, backend, num_sms, check
        self.broken = False
        self.dropped: str | None = None
        self._built: BuiltBuffer | None = built
        self.tuned: dict[bool, tuple[int, int]] = {}
        self._estimates: dict[tuple[int, int], int] = {}

    @property
    def closed(self) -> bool:
        return self._built is None

    @property
    def buffer(self) -> ElasticBufferLike:
        """The live buffer.

        Raises:
            BufferClosedError: it was closed, or its group is gone.
        """
        if self._built is None:
            raise BufferClosedError("the buffer was closed", fix="Call prepare_buffer() or dispatch again.")
        return self._built.buffer

    def fail(self, operation: str, error: Exception) -> NoReturn:
        """Collective over the group: raise ``error`` here and on the ranks that are in a call of this buffer."""
        if self._built is None:
            raise error
        if self._built.report_failure is not None:
            self._built.report_failure(operation, error)
        self.broken = True  # the others will time out, and then make no collective with this rank
        post_failure(self.group, heartbeat.number(self.group), error)
        raise error

    @property
    def has_channel(self) -> bool:
        """The buffer lives, and its ranks can tell each other that something else than a call of it is up."""
        return self._built is not None and self._built.announce is not None

    def announce(self, text: str) -> None:
        """Collective over the group, where there is a channel: all ranks announce the same, or all raise."""
        if self._built is not None and self._built.announce is not None:
            self._built.announce(text)

    def num_sms_for(self, num_experts: int, num_topk: int, expert_layout: bool) -> int:
        """SM count of a dispatch. Collective over the group at the first call for these numbers, on DeepEP V2.

        What was asked for goes first, then what tuning found, then DeepEP's estimate. The estimate comes from what each
        host's tools print, so rank 0's serves all; where it fails, a stated number takes its place.
        """
        if self.backend.name != "deepep_v2":
            return max(self.wished_num_sms, 0)
        if self.wished_num_sms > 0:
            return self.wished_num_sms
        if expert_layout in self.tuned:
            return self.tuned[expert_layout][0]
        known = self._estimates.get((num_experts, num_topk))
        if known is None:
            estimate: Callable[[int, int], int] = self.buffer.get_theoretical_num_sms  # type: ignore[attr-defined]
            try:
                proposal = estimate(num_experts, num_topk)
            except (ArithmeticError, AssertionError, RuntimeError) as error:
                proposal = FALLBACK_NUM_SMS
                logger.warning("DeepEP gives no SM estimate (%s): taking %d", error, proposal)
            facts = {"num_experts": num_experts, "num_topk": num_topk}
            decided = agree(self.group, "SM count", facts, timeout=agreement_timeout(), decide={"num_sms": proposal})
            known = self._estimates[num_experts, num_topk] = int(decided["num_sms"])
        return known

    def combine_num_sms(self, ep_handle: Any) -> int:
        """SM count of a combine: what tuning found for it, else the dispatch's. Hybrid topologies bind it to that."""
        if self.wished_num_sms == TUNE and ep_handle.token_metadata_at_forward is None:
            return int(self.tuned.get(ep_handle.do_expand, (0, ep_handle.num_sms))[1])
        return int(ep_handle.num_sms)

    def describe(self) -> str:
        """One line: class, module and file, sizes, and the reason of the choice."""
        if self._built is None:
            return f"{self.backend.class_name}, closed"
        kind = self._built.kind
        return (
            f"{kind.__name__} ({kind.__module__}, {sys.modules[kind.__module__].__file__}), "
            f"{self.spec.num_bytes(self.group.size())} bytes for {self.spec.num_max_tokens_per_rank} tokens a rank, "
            f"because {self.backend.reason}"
        )

    def close(self, *, abort: bool = False) -> None:
        """Free the buffer. Collective over the group unless ``abort``; a second call does nothing.

        With ``abort``, after a failed collective, or when the group is gone, no collective is made: references are
        dropped, and what DeepEP holds comes back at process exit, which is warned about.
        """
        if self._built is None:
            return
        built, self._built = self._built, None
        if abort or self.broken or not is_registered(self.group):
            if self.backend.name != "embedded":
                held = self.spec.num_bytes(self.group.size())
                logger.warning("%s dropped without its collective close: %d bytes stay until exit", built.buffer, held)
            return
        built.buffer.destroy()

    def __enter__(self) -> PooledBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(abort=kind is not None)


class BufferPool:
    """All buffers of the process.

    Attributes:
        pinned: the settings in force, None while no buffer lives.
        constructions: how many buffers were built so far.
        wished_num_sms: what ``set_deepep_num_sms`` asked for; 0 is automatic.
    """

    def __init__(self) -> None:
        self.pinned: Settings | None = None
        self.constructions = 0
        self.wished_num_sms = 0
        self._entries: dict[tuple[dist.ProcessGroup, BufferSpec], PooledBuffer] = {}
        self._found: dict[tuple[dist.ProcessGroup, Wish], PooledBuffer] = {}
        self._last: dict[dist.ProcessGroup, PooledBuffer] = {}
        self._seen_environment = snapshot()

    def obtain(
        self,
        group: dist.ProcessGroup,
        *,
        hidden: int,
        num_topk: int | None,
        num_max_tokens_per_rank: int | None = None,
        use_fp8_dispatch: bool = False,
        num_sms: int = 0,
    ) -> PooledBuffer:
        """The buffer for these sizes; built now, collectively over the group, if there is none."""
        wish = (hidden, num_topk, num_max_tokens_per_rank, use_fp8_dispatch)
        if not is_registered(group):
            self._purge()
            raise BufferClosedError("the process group was destroyed", fix="Pass a living group.")
        entry = self._found.get((group, wish))
        if entry is None or entry.closed:
            try:
                entry = self._find(group, *wish) if self.pinned else None
            except InputError as error:
                self.fail(group, "buffer lookup", error)
            if entry is None:
                entry = self._build(group, wish, num_sms)
            self._found[group, wish] = entry
        self._warn_of_changes()
        self._last[group] = entry
        return entry

    def fail(self, group: dist.ProcessGroup, operation: str, error: Exception) -> NoReturn:
        """Collective over the group: raise ``error`` before it is known which buffer the call is for.

        Where a buffer of the group lives, the other ranks are taken to be in a call of one, and to compare it first
        where calls are compared. They are waited for no longer than an agreement.
        """
        error = typed(error, operation)
        entry = self._last.get(group)
        if entry is not None and not entry.closed and not entry.check:
            entry.fail(operation, error)
        agree(group, operation, {}, timeout=agreement_timeout(), failure=error)
        raise error

    def close(self, group: dist.ProcessGroup | None = None, *, abort: bool = False) -> None:
        """Close the group's buffers, or all. Collective over each living group unless ``abort``."""
        for key in [key for key in self._entries if group is None or key[0] is group]:
            self._drop(key, abort=abort)

    def _drop(self, key: tuple[dist.ProcessGroup, BufferSpec], *, abort: bool) -> None:
        entry = self._entries.pop(key)
        self._found = {wish: found for wish, found in self._found.items() if found is not entry}
        if self._last.get(key[0]) is entry:
            del self._last[key[0]]
        if not self._entries:
            self.pinned = None
        entry.close(abort=abort)

    def _purge(self) -> None:
        for key in [key for key, entry in self._entries.items() if entry.closed or not is_registered(key[0])]:
            self._drop(key, abort=True)

    def _find(
        self, group: dist.ProcessGroup, hidden: int, num_topk: int | None, ceiling: int | None, fp8: bool
    ) -> PooledBuffer | None:
        assert self.pinned is not None
        spec = _spec(self.pinned, hidden, num_topk, ceiling, fp8)
        for one in (spec, replace(spec, num_topk=0) if spec.num_topk <= LARGEST_NUM_TOPK else spec):
            entry = self._entries.get((group, one))
            if entry is not None and not entry.closed:
                return entry
        return None

    def _build(self, group: dist.ProcessGroup, wish: Wish, num_sms: int) -> PooledBuffer:
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
                "spec": asdict(spec),
                "versions": {"torch": torch.__version__, **backend.versions},
                "settings": {name: value for name, value in settings.as_dict().items() if name not in _NOT_COMPARED},
            }
            proposal = {"num_sms": settings.num_sms or num_sms or self.wished_num_sms}
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = typed(error, "buffer construction")
        last = self._last.get(group)
        if last is not None and last.has_channel and not last.check:
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
            built = constructor_of(backend)(group, **asdict(spec))
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
        if backend.name != "embedded" and group.size() > 1:
            heartbeat.start()
        self._entries[group, spec] = entry
        if self.pinned is None:
            self.pinned = replace(settings, max_tokens_per_rank=spec.num_max_tokens_per_rank)
            self._seen_environment = snapshot()
        return entry

    def _warn_of_changes(self) -> None:
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


_NOT_COMPARED = ("agree_secs", "max_tokens_per_rank", "hidden", "num_topk")
"""Settings that may differ between ranks: a time-out, and what the spec holds as it came out."""


def _spec(settings: Settings, hidden: int, num_topk: int | None, ceiling: int | None, fp8: bool) -> BufferSpec:
    for name, value in (("hidden", hidden), ("num_topk", num_topk), ("num_max_tokens_per_rank", ceiling)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InputError(name, got=repr(value), expected="an integer from 1")
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
    if not isinstance(group, dist.ProcessGroup | DeviceMesh | None):
        raise InputError("group", got=type(group).__name__, expected="a ProcessGroup, a DeviceMesh or None")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError("dimensions of the DeviceMesh", got=group.ndim, expected="1", fix='Pass mesh["ep"].')
        return group.get_group()
    if group is None:
        if not dist.is_initialized():
            raise InputError(
                "no process group", fix="Call torch.distributed.init_process_group(), also for a single rank."
            )
        group = dist.group.WORLD
    assert group is not None
    return group


pool = BufferPool()
"""The pool of this process."""


def close_buffers(group: Group = None, *, abort: bool = False) -> None:
    """Close the buffers of ``group``, or all of the process. Collective over each living group unless ``abort``.

    Handles of closed buffers refuse to be used. When none is left, the settings are read anew for the next. A second
    call does nothing. With ``abort``, or where a collective failed, no collective is made, and what DeepEP holds stays
    until the process ends, which is warned about.
    """
    pool.close(None if group is None else resolve_group(group), abort=abort)
