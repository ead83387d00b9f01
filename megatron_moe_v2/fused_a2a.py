"""Megatron-core's fused all-to-all functions, on any buffer of the contract.

Signatures and results are those of ``megatron.core.transformer.moe.fused_a2a``; what is ours alone is keyword-only
after them. Importing this module looks which ``deep_ep`` is there and initialises nothing.

Legend: T own tokens, H hidden, K top-k, E experts, L local experts, n received tokens, A rows of the expert layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import agree
from .autograd import FusedCombine, FusedDispatch, as_delivered
from .communication import Call, DispatchHandle
from .errors import BufferClosedError, CaptureError, HandleError, InputError, LimitError, MoEError
from .fp8 import ScaleFormat
from .fp8_wire import buffer_hidden, check_gradient, check_options, check_tokens
from .overlap import Pending, launch_pending_combine, launch_pending_dispatch
from .pool import Ceiling, Group, pool, resolve_group
from .probe import probe
from .recompute import RoutingLayout
from .settings import agreement_timeout, name_of
from .telemetry import ExpertLoadStats

__all__ = ["HAVE_DEEP_EP", "HAVE_DEEP_EP_V2", "Layout", "fused_combine", "fused_dispatch", "set_deepep_num_sms"]

Layout = Literal["token", "expert"]

HAVE_DEEP_EP: bool = probe().have_v1
"""DeepEP V1's ``Buffer`` can be imported."""

HAVE_DEEP_EP_V2: bool = probe().have_v2
"""DeepEP V2's ``ElasticBuffer`` can be imported."""

MEGATRON_DEFAULT_NUM_SMS = 20
"""What megatron-core passes to :func:`set_deepep_num_sms` from every layer when its user set nothing."""

_F = TypeVar("_F", bound=Callable[..., Any])

Delivered = tuple[Tensor, Tensor | None, Tensor, Tensor, DispatchHandle]


def _eager(function: _F) -> _F:
    """A graph break around ``function`` under ``torch.compile``, which is imported at the first call, not before."""

    disabled: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return cast(_F, call)


@overload
def fused_dispatch(
    x: Tensor,
    token_indices: Tensor,
    token_probs: Tensor,
    num_experts: int,
    group: Group,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
    *,
    layout: Layout = "token",
    expert_alignment: int = 1,
    num_max_tokens_per_rank: Ceiling = None,
    static_shapes: bool = False,
    layout_cache: RoutingLayout | None = None,
    load_stats: ExpertLoadStats | None = None,
    fp8: ScaleFormat | None = None,
    dequantize: Literal[True] = True,
    fp8_backward: bool = False,
    wait: Literal[True] = True,
) -> Delivered: ...


@overload
def fused_dispatch(
    x: Tensor,
    token_indices: Tensor,
    token_probs: Tensor,
    num_experts: int,
    group: Group,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
    *,
    layout: Layout = "token",
    expert_alignment: int = 1,
    num_max_tokens_per_rank: Ceiling = None,
    static_shapes: bool = False,
    layout_cache: RoutingLayout | None = None,
    load_stats: ExpertLoadStats | None = None,
    fp8: ScaleFormat | None = None,
    dequantize: Literal[True] = True,
    fp8_backward: bool = False,
    wait: Literal[False],
) -> Pending[Delivered]: ...


@overload
def fused_dispatch(
    x: Tensor,
    token_indices: Tensor,
    token_probs: Tensor,
    num_experts: int,
    group: Group,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
    *,
    layout: Layout = "token",
    expert_alignment: int = 1,
    num_max_tokens_per_rank: Ceiling = None,
    static_shapes: bool = False,
    layout_cache: RoutingLayout | None = None,
    load_stats: ExpertLoadStats | None = None,
    fp8: ScaleFormat | None = None,
    dequantize: bool,
    fp8_backward: bool = False,
    wait: bool = True,
) -> Any: ...


@_eager
def fused_dispatch(
    x: Tensor,
    token_indices: Tensor,
    token_probs: Tensor,
    num_experts: int,
    group: Group,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
    *,
    layout: Layout = "token",
    expert_alignment: int = 1,
    num_max_tokens_per_rank: Ceiling = None,
    static_shapes: bool = False,
    layout_cache: RoutingLayout | None = None,
    load_stats: ExpertLoadStats | None = None,
    fp8: ScaleFormat | None = None,
    dequantize: bool = True,
    fp8_backward: bool = False,
    wait: bool = True,
) -> Any:
    """Send each token to the ranks of its experts. Collective over the group.

    Args:
        x: ``[T, H]``, floating point; T from 0 to the ceiling, different on each rank.
        token_indices: integer ``[T, K]``, global experts; negative entries select nothing.
        token_probs: floating ``[T, K]``; carried as float32, its gradient comes back in its own dtype.
        num_experts: E, a multiple of the ranks; rank r owns experts ``[r * L, (r + 1) * L)``.
        group: process group, one-dimensional ``DeviceMesh``, or None for the default group.
        async_finish, allocate_on_comm_stream: DeepEP's stream flags; results are ready for the current stream.
        layout: ``"token"``: a row for each received token. ``"expert"``: a row for each (token, local expert), grouped
            by expert: nothing is left to permute.
        expert_alignment: pad each expert's rows to a multiple of this, with zeros (expert layout only).
        num_max_tokens_per_rank: the ceiling of the buffer to use, where there are several; ``"decode"`` is the
            environment's for decoding.
        static_shapes: as many rows as the ceiling allows, whatever arrives, and no host synchronisation, so that the
            call can be captured in a CUDA graph (DeepEP V2).
        layout_cache: filled by the first dispatch that it is passed to; a later one, a recomputation, repeats that
            one's routing without exchanging counts. One for each micro-batch and layer.
        load_stats: counts what each local expert receives; see :mod:`megatron_moe_v2.telemetry`.
        fp8: tokens (bfloat16; float32 on the embedded buffer) travel in FP8, in groups of 128 channels with scales that
            are received in this format; see :mod:`megatron_moe_v2.fp8`. The gradient passes the rounding as if it were
            the identity, and travels as without FP8.
        dequantize: False hands the FP8 rows on as they are, for an FP8 grouped GEMM: ``recv_x`` is then a
            :class:`~megatron_moe_v2.fp8.QuantizedRows`, whose ``anchor`` ``[n, H]`` is the differentiable input of what
            computes with them.
        fp8_backward: the gradient of the combine travels in FP8 too, quantised in the same way.
        wait: False returns at once, with a :class:`Pending` whose ``wait()`` returns the rest.

    Returns:
        ``(recv_x, recv_indices, recv_probs, tokens_per_expert, handle)``.

        Token layout: ``[n, H]``; local expert or -1, int64 ``[n, K]``; float32 ``[n, K]``, the whole source row, so
        mask it by ``recv_indices >= 0``; exact counts, int64 ``[L]`` on the CPU.

        Expert layout: ``[A, H]``; None; float32 ``[A]``; exact counts, int64 ``[L]`` on the CPU, or with alignment
        above 1 int32 ``[L]`` on the device of ``x``, while ``handle.padded_tokens_per_expert`` is what a grouped GEMM
        walks by.

        Static shapes: ``n`` and ``A`` are what the ceiling allows, counts are int32 ``[L]`` on the device. Rows that
        nobody sent are undefined and must not be read: their ``recv_indices`` are -1, and they lie past the last
        expert's padded end.

    Raises:
        CaptureError: inside a CUDA graph capture, where this call cannot be captured; says why.
        InputError, LimitError, CapacityError: on every rank, if the call is wrong on any.
        SettingsError, BackendError, RankMismatchError, MissingRankError: from building the buffer at the first call.
    """
    group = resolve_group(group)
    try:
        if not isinstance(layout_cache, RoutingLayout | None):
            raise InputError("layout_cache", got=type(layout_cache).__name__, expected="a RoutingLayout or None")
        _check_tensors(x, token_indices, token_probs, layout, expert_alignment)
        if load_stats is not None:
            _check_load_stats(load_stats, num_experts, group, x)
        if fp8 is not None or dequantize is not True or fp8_backward is not False:
            check_options(fp8, dequantize, fp8_backward)
            check_tokens(x)
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        pool.fail(group, "dispatch", error)
    entry = pool.obtain(
        group,
        hidden=x.shape[1] if fp8 is None else buffer_hidden(x.shape[1]),
        num_topk=token_indices.shape[1],
        num_max_tokens_per_rank=num_max_tokens_per_rank,
    )
    call = Call(
        entry=entry,
        num_experts=num_experts,
        expert_layout=layout == "expert",
        expert_alignment=expert_alignment,
        static_shapes=static_shapes,
        async_finish=async_finish or not wait,
        allocate_on_comm_stream=allocate_on_comm_stream,
        fp8=fp8,
        dequantize=dequantize,
        fp8_backward=fp8_backward,
    )
    if load_stats is not None:
        call = call.counted_by(load_stats)
    if entry.check:
        _refuse_check_in_capture(x)
    repeats = layout_cache is not None and layout_cache.handle is not None
    failure = layout_cache.mismatch(call, token_indices, compare=entry.check) if layout_cache is not None else None
    if fp8 is not None:
        failure = failure or _fp8_limit(call, x)
    if entry.check:
        failure = failure or _index_error(token_indices, num_experts)
        _compare("dispatch", call, x, token_probs, repeats=repeats, failure=failure)
    elif failure is not None:
        entry.fail("dispatch", failure)
    if not wait:
        return launch_pending_dispatch(call, x, token_indices, token_probs, layout_cache)
    returned = FusedDispatch.apply(x, token_indices, token_probs, call, layout_cache)  # type: ignore[no-untyped-call]
    return as_delivered(returned)


@overload
def fused_combine(
    x: Tensor,
    group: Group,
    handle: DispatchHandle,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
    *,
    wait: Literal[True] = True,
) -> tuple[Tensor, None]: ...


@overload
def fused_combine(
    x: Tensor,
    group: Group,
    handle: DispatchHandle,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
    *,
    wait: Literal[False],
) -> Pending[tuple[Tensor, None]]: ...


@_eager
def fused_combine(
    x: Tensor,
    group: Group,
    handle: DispatchHandle,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
    *,
    wait: bool = True,
) -> tuple[Tensor, None] | Pending[tuple[Tensor, None]]:
    """Bring rows back to their tokens and sum them. Collective over the group.

    The result is complete over the group: no all-reduce may follow. Weights are not applied here; multiply the rows by
    them before, or let the experts do it.

    Args:
        x: ``[n, H]`` or ``[A, H]``, as the dispatch delivered; padding rows are ignored.
        group: the dispatch's.
        handle: what the dispatch returned; it may be combined more than once.
        async_finish, allocate_on_comm_stream: DeepEP's stream flags; the result is ready for the current stream.
        wait: False returns at once, with a :class:`Pending` whose ``wait()`` returns the rest.

    Returns:
        ``([T, H], None)``; float32 sums, rounded once on each side.

    Raises:
        HandleError, InputError: on every rank, if the call is wrong on any.
        BufferClosedError: the handle's buffer was closed.
    """
    group = resolve_group(group)
    try:
        _check_handle(x, group, handle)
    except BufferClosedError:
        raise
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        pool.fail(group, "combine", error)
    call = handle.call.on_streams(async_finish or not wait, allocate_on_comm_stream)
    if call.entry.check:
        _refuse_check_in_capture(x)
        _compare("combine", call, x)
    if not wait:
        return launch_pending_combine(call, x, handle)
    return FusedCombine.apply(x, handle, call), None  # type: ignore[no-untyped-call]


def set_deepep_num_sms(num_sms: int) -> None:
    """Wish for a number of streaming multiprocessors for communication; 0 is automatic.

    Takes effect when ranks next agree, at the construction of a buffer; the environment variable goes first.
    Megatron-core calls this with 20, V1's default, from every layer though nobody set it: 20 therefore counts as
    automatic here, and whoever wants exactly 20 sets the environment variable.

    Raises:
        InputError: negative or not an integer.
    """
    if not isinstance(num_sms, int) or num_sms < 0:
        raise InputError("num_sms", got=repr(num_sms), expected="an integer from 0")
    pool.wished_num_sms = 0 if num_sms == MEGATRON_DEFAULT_NUM_SMS else num_sms


def _check_tensors(x: Tensor, idx: Tensor, weights: Tensor, layout: str, alignment: int) -> None:
    for name, tensor in (("x", x), ("token_indices", idx), ("token_probs", weights)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(name, got=got, expected="a 2-D tensor")
        if tensor.device != x.device:
            raise InputError(f"device of {name}", got=tensor.device, expected=f"{x.device}, that of x")
    if not x.dtype.is_floating_point or x.element_size() < 2:
        raise InputError("x", got=x.dtype, expected="bfloat16, float16, float32 or float64")
    if idx.dtype.is_floating_point or idx.dtype.is_complex or idx.dtype == torch.bool:
        raise InputError("token_indices", got=idx.dtype, expected="an integer dtype")
    if not weights.dtype.is_floating_point:
        raise InputError("token_probs", got=weights.dtype, expected="a floating dtype")
    if weights.shape != idx.shape or x.shape[0] != idx.shape[0]:
        shapes = [list(one.shape) for one in (x, idx, weights)]
        raise InputError("shapes of x, token_indices, token_probs", got=shapes, expected="[T, H], [T, K], [T, K]")
    if layout not in ("token", "expert"):
        raise InputError("layout", got=repr(layout), expected='"token" or "expert"')
    if alignment < 1 or (layout == "token" and alignment != 1):
        raise InputError(
            "expert_alignment", got=alignment, expected="1 in the token layout, from 1 in the expert layout"
        )


def _check_load_stats(load_stats: ExpertLoadStats, num_experts: int, group: dist.ProcessGroup, x: Tensor) -> None:
    if not isinstance(load_stats, ExpertLoadStats):
        raise InputError("load_stats", got=type(load_stats).__name__, expected="an ExpertLoadStats or None")
    load_stats.check(num_experts, group, x.device)


def _check_handle(x: Tensor, group: object, handle: DispatchHandle) -> None:
    if not isinstance(handle, DispatchHandle):
        raise HandleError("handle", got=type(handle).__name__, expected="what fused_dispatch returned")
    if not handle.call.entry.usable:
        raise BufferClosedError("the buffer of this handle was closed, or its group destroyed", fix="Dispatch again.")
    if handle.call.entry.group is not group:
        raise HandleError("the handle is another group's", fix="Combine over the group that dispatched.")
    if x.dim() != 2 or x.shape[0] != handle.num_rows:
        raise HandleError(
            "x of combine", got=list(x.shape), expected=f"[{handle.num_rows}, H], the rows dispatched here"
        )
    check_gradient(x, handle.call.fp8_backward)
    if torch.is_grad_enabled() and x.requires_grad and handle.ep_handle.topk_idx.is_inference():
        raise HandleError(
            "a handle made in inference_mode cannot be trained with", fix="Dispatch outside torch.inference_mode()."
        )


def _fp8_limit(call: Call, x: Tensor) -> MoEError | None:
    """Why the buffer cannot carry an FP8 dispatch of ``x``, if it cannot: known here, before any kernel."""
    name = call.entry.backend.name
    if name == "deepep_v1":
        return LimitError("FP8 dispatch on DeepEP V1", fix="Use DeepEP V2, or the embedded buffer.")
    if name == "deepep_v2" and x.dtype != torch.bfloat16:
        return LimitError("x of an FP8 dispatch on DeepEP V2", got=x.dtype, expected=torch.bfloat16)
    return None


def _refuse_check_in_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "a call inside a CUDA graph capture", fix=f"Unset {name_of('check')}: its comparisons synchronise the host."
        )


def _index_error(idx: Tensor, num_experts: int) -> MoEError | None:
    """Indices out of range or twice in a row; costs a host synchronisation."""
    if idx.numel() and int(idx.max()) >= num_experts:
        token = int((idx >= num_experts).any(1).nonzero()[0])
        return InputError(f"token_indices of token {token}", got=idx[token].tolist(), expected=f"below {num_experts}")
    ordered = idx.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if bool(twice.any()):
        token = int(twice.nonzero()[0])
        return InputError(f"token_indices of token {token}", got=idx[token].tolist(), expected="each expert once")
    return None


def _compare(
    operation: str, call: Call, *tensors: Tensor, repeats: bool = False, failure: MoEError | None = None
) -> None:
    """What ``MCORE_DEEPEP_V2_CHECK=1`` adds: this call compared between all ranks. Collective over the group."""
    dropped, call.entry.dropped = call.entry.dropped, None
    if dropped is not None:
        failure = InputError(
            f"an earlier {dropped} with wait=False was dropped", fix="Call wait() on what it returned."
        )
    facts = {
        "num_experts": call.num_experts,
        "expert_layout": call.expert_layout,
        "expert_alignment": call.expert_alignment,
        "static_shapes": call.static_shapes,
        "repeats": repeats,
        "hidden": tensors[0].shape[1],
        "dtype": str(tensors[0].dtype),
        "fp8": [str(call.fp8), call.dequantize, call.fp8_backward],
        "gradients": [torch.is_grad_enabled() and one.requires_grad for one in tensors],
    }
    agree(call.entry.group, operation, facts, timeout=agreement_timeout(), failure=failure)
