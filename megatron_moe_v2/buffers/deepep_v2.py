"""The real DeepEP V2, with its limits checked on the host first.

``GuardedElasticBuffer`` passes dispatch and combine on to ``deep_ep.ElasticBuffer`` and changes nothing but this: what
DeepEP would answer with a bare assertion or a device trap is a typed error before any kernel, and a hidden size that is
no multiple of 256 is padded and cut. Legend as in ``contract``.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BufferClosedError, InputError, LimitError
from ..probe import probe
from ..settings import name_of
from . import fabric
from .channels import Token, cached_num_sms, channels_per_sm, sms_of_both
from .checks import check_combine_rows, check_num_experts, check_rows
from .contract import BuiltBuffer
from .deepep import bring_up, check_cached, check_dtype, check_event

__all__ = ["GuardedElasticBuffer", "build", "padded_hidden", "precheck"]

HIDDEN_MULTIPLE = 256
MAX_NUM_TOPK = 32
MAX_NUM_EXPERTS = 2048
MAX_NUM_LOCAL_EXPERTS = 256
MAX_HYBRID_LANES = 128
"""Scale-up ranks plus local experts of an uncached dispatch in hybrid mode."""

_LARGEST_PADDING = 0.1


def padded_hidden(hidden: int) -> int:
    """The multiple of 256 that ``hidden`` is padded to.

    Raises:
        LimitError: the padding would be more than a tenth.
    """
    padded = -(-hidden // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE
    if padded - hidden > _LARGEST_PADDING * hidden:
        raise LimitError(
            "hidden on DeepEP V2",
            got=hidden,
            expected=f"a multiple of {HIDDEN_MULTIPLE}, or at most a tenth below one",
            fix=f"Use {padded}, or {name_of('backend')}=embedded.",
        )
    return padded


def precheck(**sizes: Any) -> None:
    """What this host alone can know before ranks build together.

    Raises:
        BackendError: something that DeepEP needs is missing here; says what to set.
        LimitError: it cannot carry these sizes.
    """
    fabric.check_host()
    padded_hidden(sizes["hidden"])
    fabric.allocated_qps(sizes["num_allocated_qps"], hybrid=sizes["allow_hybrid_mode"])


def build(group: dist.ProcessGroup, **sizes: Any) -> BuiltBuffer:
    """Build DeepEP's buffer from ``BufferSpec`` fields. Collective over the group."""
    found = probe()
    assert found.ElasticBuffer is not None
    sizes["hidden"] = padded_hidden(sizes["hidden"])
    sizes["num_allocated_qps"] = fabric.allocated_qps(sizes["num_allocated_qps"], hybrid=sizes["allow_hybrid_mode"])
    bring_up(group)
    raw = found.ElasticBuffer(group, explicitly_destroy=True, **sizes)
    buffer = GuardedElasticBuffer(raw, sizes["hidden"])
    return BuiltBuffer(buffer, None, found.ElasticBuffer, beneath=raw, passes_on=buffer.passes_on)


class GuardedElasticBuffer:
    """``deep_ep.ElasticBuffer`` behind the host checks.

    Args:
        raw: the buffer.
        hidden: H that it was sized for.
    """

    def __init__(self, raw: Any, hidden: int) -> None:
        self.raw: Any = raw
        self._hidden = hidden
        self._topk_idx_dtype = probe().topk_idx_t or torch.int64
        self._event_type: Any = probe().EventHandle or object
        self._on_efa = fabric.rdma_kind() == "efa"
        self._checked: tuple[int, int] | None = None
        self._sent_fp8 = False

    def capture(self) -> Any:
        """A raw event handle recorded on the current stream."""
        return self.raw.capture()

    def destroy(self) -> None:
        """Free everything. Collective over the group."""
        self.raw.destroy()

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        """DeepEP's estimate; it can fail where no link speed can be read."""
        return int(self.raw.get_theoretical_num_sms(num_experts, num_topk))

    def dispatch(
        self, x: Tensor | tuple[Tensor, Tensor], **arguments: Any
    ) -> tuple[Any, Tensor | None, Tensor | None, Any, Any]:
        """As ``ElasticBuffer.dispatch``, whose arguments but ``x`` go by keyword. Collective over the group."""
        raw, ceiling = self.raw, arguments["num_max_tokens_per_rank"]
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        num_tokens, hidden = tokens.shape
        dtype = torch.bfloat16 if scales is None else torch.float8_e4m3fn
        if raw.runtime is None or tokens.dtype is not dtype or not tokens.is_cuda or hidden > self._hidden:
            self._refuse_tokens(tokens, hidden, dtype)
        if num_tokens > ceiling:
            check_rows(num_tokens, ceiling)
        if "async_with_compute_stream" in arguments or "previous_event" in arguments:
            self._check_streams(arguments)
        handle: Any = arguments.get("handle")
        topk_idx: Any = arguments.get("topk_idx")
        if handle is not None:
            check_cached(tokens, handle, arguments.get("do_expand", False))
        elif topk_idx is None:
            raise InputError("topk_idx", got=None, expected="[T, K] where no handle is given")
        else:
            experts = arguments["num_experts"], topk_idx.shape[1]
            if experts != self._checked:
                self._check_experts(*experts)
                self._checked = experts
            if topk_idx.dtype is not self._topk_idx_dtype:
                arguments["topk_idx"] = topk_idx.to(self._topk_idx_dtype)
        if scales is not None:
            check_scales(scales, tokens)
            self._sent_fp8 = True
        elif hidden % HIDDEN_MULTIPLE:
            x = self._padded(tokens, arguments)
        if self._sent_fp8 and raw.num_scaleout_ranks > 1:
            num_topk = (topk_idx if handle is None else handle.topk_idx).shape[1]
            num_scales = None if scales is None else scales.shape[1]
            arguments["num_sms"] = self._hybrid_num_sms(
                arguments.get("num_sms", 0), handle, arguments["num_experts"], num_topk, hidden, num_scales
            )
        received = raw.dispatch(x, **arguments)
        if scales is None and hidden % HIDDEN_MULTIPLE:
            return received[0][:, :hidden].contiguous(), *received[1:]
        return received  # type: ignore[no-any-return]

    def passes_on(self, hidden: int) -> bool:
        """:meth:`dispatch` changes nothing of what it checked, and calls :attr:`raw` with it."""
        as_it_is = hidden % HIDDEN_MULTIPLE == 0 and self._topk_idx_dtype is torch.int64
        return as_it_is and int(self.raw.num_scaleout_ranks) == 1

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **arguments: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        """As ``ElasticBuffer.combine``. Collective over the group."""
        hidden = x.shape[1]
        if self.raw.runtime is None or x.dtype is not torch.bfloat16 or not x.is_cuda or hidden > self._hidden:
            self._refuse_tokens(x, hidden, torch.bfloat16)
        if "async_with_compute_stream" in arguments or "previous_event" in arguments:
            self._check_streams(arguments)
        check_combine_rows(x.shape[0], handle, handle.num_expanded_tokens)
        if topk_weights is not None and handle.do_expand and not self.raw.allow_multiple_reduction:
            raise LimitError("topk_weights in the expert layout", expected="a buffer with allow_multiple_reduction")
        if hidden % HIDDEN_MULTIPLE:
            x = self._padded(x, arguments)
        combined, weights, event = self.raw.combine(x, handle, topk_weights=topk_weights, **arguments)
        if hidden % HIDDEN_MULTIPLE:
            combined = combined[:, :hidden].contiguous()
        return combined, weights, event

    def _padded(self, x: Tensor, arguments: dict[str, Any]) -> Tensor:
        """``x`` with the columns that DeepEP wants; the call is then no longer asynchronous.

        Both the padding before and the cut after run on the current stream: what the call waits for must come after
        the one, and the other only when the rows are there.
        """
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % HIDDEN_MULTIPLE))
        arguments.pop("async_with_compute_stream", None)
        if arguments.get("previous_event") is not None:
            arguments["previous_event"] = self.capture()
        return x

    def _refuse_tokens(self, x: Tensor, hidden: int, dtype: torch.dtype) -> NoReturn:
        if self.raw.runtime is None:
            raise BufferClosedError("a call on a destroyed buffer", fix="Build a new buffer.")
        check_dtype(x, dtype, "V2")
        raise LimitError("hidden", got=hidden, expected=f"at most the {self._hidden} of the buffer")

    def _check_streams(self, arguments: dict[str, Any]) -> None:
        event, on_comm_stream = arguments.get("previous_event"), arguments.get("allocate_on_comm_stream")
        check_event(event, self._event_type, bool(on_comm_stream))
        if self._on_efa and arguments.get("async_with_compute_stream") and not on_comm_stream:
            raise LimitError("asynchronous finish on EFA without allocate_on_comm_stream", fix="Set both.")

    def _check_experts(self, num_experts: int, num_topk: int) -> None:
        num_local = check_num_experts(num_experts, self.raw.num_ranks) // self.raw.num_ranks
        if num_topk > MAX_NUM_TOPK:
            raise LimitError("top-k on DeepEP V2", got=num_topk, expected=f"at most {MAX_NUM_TOPK}")
        if num_experts > MAX_NUM_EXPERTS:
            raise LimitError("experts on DeepEP V2", got=num_experts, expected=f"at most {MAX_NUM_EXPERTS}")
        if num_local > MAX_NUM_LOCAL_EXPERTS:
            raise LimitError(
                "experts a rank on DeepEP V2",
                got=num_local,
                expected=f"at most {MAX_NUM_LOCAL_EXPERTS}",
                fix="Use more expert-parallel ranks.",
            )
        if self.raw.num_scaleout_ranks > 1 and self.raw.num_scaleup_ranks + num_local > MAX_HYBRID_LANES:
            raise LimitError(
                "scale-up ranks plus experts a rank in hybrid mode",
                got=self.raw.num_scaleup_ranks + num_local,
                expected=f"at most {MAX_HYBRID_LANES}",
                fix="Use more expert-parallel ranks, or direct mode.",
            )

    def _hybrid_num_sms(
        self, num_sms: int, handle: Any, num_experts: int, num_topk: int, hidden: int, num_scales: int | None
    ) -> int:
        """An SM count with which a cached dispatch has the channels of the dispatch whose handle it takes."""
        limit: Any = torch.cuda.get_device_properties("cuda")

        def per_sm(width: int, scales: int | None) -> int:
            return channels_per_sm(
                Token(width=width, num_scales=scales, num_topk=num_topk),
                num_ranks=self.raw.num_ranks,
                num_experts=num_experts,
                shared_memory=limit.shared_memory_per_block_optin,
                overlap=self.raw.prefer_overlap_with_compute,
            )

        padded = -(-hidden // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE
        own = per_sm(padded if num_scales is None else hidden, num_scales)
        if handle is not None:
            return cached_num_sms(handle.channel_linked_list.shape[0], own, limit.multi_processor_count)
        if num_scales is None or num_sms <= 0:
            return num_sms
        return sms_of_both(num_sms, own, per_sm(padded, None))[0]


def check_scales(scales: Any, tokens: Tensor) -> None:
    """Scales that the kernels read: ``[T, S]`` of four bytes, float32 or packed int32, of any strides."""
    if not isinstance(scales, Tensor) or scales.dim() != 2 or len(scales) != len(tokens):
        got = list(scales.shape) if isinstance(scales, Tensor) else type(scales).__name__
        raise InputError("scales of FP8 tokens", got=got, expected=f"[{len(tokens)}, S]")
    if scales.dtype not in (torch.float32, torch.int32) or scales.device != tokens.device:
        got, wanted = f"{scales.dtype} on {scales.device}", f"float32 or int32 on {tokens.device}"
        raise InputError("scales of FP8 tokens", got=got, expected=wanted)
