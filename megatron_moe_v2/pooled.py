"""A buffer with its spec and the way it was chosen, as the pool keeps it. What is collective says so."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from .agreement import agree, is_registered, post_failure
from .buffers import Backend
from .buffers.contract import BuiltBuffer, ElasticBufferLike, buffer_bytes
from .errors import BufferClosedError, CapturedBufferError
from .heartbeat import heartbeat
from .settings import TUNE, agreement_timeout

__all__ = ["BufferSpec", "PooledBuffer"]

logger = logging.getLogger(__name__)

FALLBACK_NUM_SMS = 24
"""SM count where DeepEP can make no estimate: within a few percent of its best dispatch at two ranks over NVLink."""


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
    """A buffer with its spec and the way it was chosen. As a context manager it closes, by abort on an exception.

    Attributes:
        beneath: what dispatches whose like was checked before; None after the close.
        rank: this process's, in the default group.
    """

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
        self.operations = heartbeat.operations(group)
        self.closed, self.rank = False, dist.get_rank()
        self.broken = False
        self.dropped: str | None = None
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.captured = False
        self.capturing: Any = None
        self._built: BuiltBuffer | None = built
        self.beneath: Any = built.buffer if built.beneath is None else built.beneath
        self.tuned: dict[bool, tuple[int, int]] = {}
        self._estimates: dict[tuple[int, int], int] = {}

    @property
    def usable(self) -> bool:
        """Neither closed nor its group destroyed."""
        return not self.closed and is_registered(self.group, self.rank)

    @property
    def buffer(self) -> ElasticBufferLike:
        """The live buffer; whether its group lives too, ``usable`` says.

        Raises:
            BufferClosedError: it was closed.
        """
        if self._built is None:
            raise BufferClosedError("the buffer was closed", fix="Call prepare_buffer() or dispatch again.")
        return self._built.buffer

    def passes_on(self, hidden: int) -> bool:
        """A dispatch of such a hidden size goes as it is to ``beneath``."""
        return self._built is not None and (self._built.passes_on is None or self._built.passes_on(hidden))

    def require_usable(self) -> None:
        """Raise :class:`BufferClosedError` unless the buffer is usable."""
        if not self.usable:
            what = "buffer was closed" if self.closed else "process group was destroyed"
            self.close(abort=True)  # other ranks may wait for this one
            raise BufferClosedError(f"the {what}", fix="Dispatch again, over a living group.")

    def fail(self, operation: str, error: Exception) -> NoReturn:
        """Collective over the group: raise ``error`` here and on the ranks that are in a call of this buffer."""
        if self._built is None:
            raise error
        if self._built.report_failure is not None:
            self._built.report_failure(operation, error)
        self.broken = True  # the others will time out, and then make no collective with this rank
        post_failure(self.group, self.operations.name, self.operations.number, error)
        raise error

    @property
    def has_channel(self) -> bool:
        """The buffer lives, and its ranks can tell each other that something else than a call of it is up."""
        return self._built is not None and self._built.announce is not None

    def announce(self, text: str) -> None:
        """Collective over the group, where there is a channel: all ranks announce the same, or all raise."""
        if self._built is not None and self._built.announce is not None:
            self._built.announce(text)

    def note_capture(self) -> None:
        """The buffer is used inside a CUDA graph capture: by one of our callables, or behind our back."""
        if self.capturing is not None:
            self.graphs.add(self.capturing)
        else:
            self.captured = True

    def release_graphs(self, *, forced: bool) -> None:
        """Let go of the CUDA graphs that use this buffer.

        Raises:
            CapturedBufferError: there are some, and it was not ``forced``.
        """
        if not forced and (self.captured or len(self.graphs)):
            raise CapturedBufferError(
                "the buffer was used under a CUDA graph capture: a replay after the close would write to freed memory",
                fix="Drop the graphs, then close_buffers(release_graphs=True).",
            )
        self.captured = False
        for graph in list(self.graphs):
            graph.release()
        self.graphs.clear()

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
        dropped, and what DeepEP holds comes back at process exit, which is warned about. The embedded buffer's close
        never is one.

        Raises:
            CapturedBufferError: a CUDA graph uses it.
        """
        if self._built is None:
            return
        if not abort:
            self.release_graphs(forced=False)
        built, self._built, self.beneath, self.closed = self._built, None, None, True
        if self.backend.name != "embedded" and (abort or self.broken or not is_registered(self.group)):
            held = self.spec.num_bytes(self.group.size())
            logger.warning("%s dropped without its collective close: %d bytes stay until exit", built.buffer, held)
            return
        built.buffer.destroy()

    def __enter__(self) -> PooledBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(abort=kind is not None)
