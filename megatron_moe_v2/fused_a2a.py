"""Megatron-core's fused all-to-all functions, on any buffer of the contract.

Signatures and results are those of ``megatron.core.transformer.moe.fused_a2a``; what is ours alone is keyword-only
after them. Importing this module looks which ``deep_ep`` is there and initialises nothing.

Legend: T own tokens, H hidden, K top-k, E experts, L local experts, n received tokens, A rows of the expert layout.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from .autograd import FusedCombine, FusedDispatch, apply, as_delivered
from .call_checks import Layout, check_each, check_handle, compare, recall, refuse_check_in_capture, resolve
from .communication import DispatchHandle, check_flags, eager
from .errors import BufferClosedError, InputError
from .fp8 import ScaleFormat
from .overlap import Pending, launch_pending_combine, launch_pending_dispatch
from .pool import Ceiling, Group, pool, resolve_group
from .probe import probe
from .recompute import RoutingLayout
from .telemetry import ExpertLoadStats

__all__ = ["HAVE_DEEP_EP", "HAVE_DEEP_EP_V2", "Layout", "fused_combine", "fused_dispatch", "set_deepep_num_sms"]

HAVE_DEEP_EP: bool = probe().have_v1
"""DeepEP V1's ``Buffer`` can be imported."""

HAVE_DEEP_EP_V2: bool = probe().have_v2
"""DeepEP V2's ``ElasticBuffer`` can be imported."""

MEGATRON_DEFAULT_NUM_SMS = 20
"""What megatron-core passes to :func:`set_deepep_num_sms` from every layer when its user set nothing."""

Delivered = tuple[Tensor, Tensor | None, Tensor, Tensor, DispatchHandle]


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


@eager
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
    if wait is not True and wait is not False:
        pool.fail(group, "dispatch", InputError("wait", got=repr(wait), expected="True or False"))
    options = (
        num_experts,
        layout,
        expert_alignment,
        num_max_tokens_per_rank,
        static_shapes,
        async_finish if wait else True,
        allocate_on_comm_stream,
        fp8,
        dequantize,
        fp8_backward,
    )
    key, known = recall(group, x, token_indices, token_probs, options)
    call = made = known or resolve(group, x, token_indices, token_probs, *options)
    if layout_cache is not None or load_stats is not None or fp8 is not None or call.entry.check:
        call = check_each(call, x, token_indices, token_probs, layout_cache, load_stats)
    if wait:
        delivered: Any = as_delivered(apply(FusedDispatch, x, token_indices, token_probs, call, layout_cache))
    else:
        delivered = launch_pending_dispatch(call, x, token_indices, token_probs, layout_cache)
    if known is None and key is not None:
        pool.calls[key] = made.made_before(x, token_indices, token_probs)
    return delivered


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


@eager
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
        check_handle(x, group, handle)
        check_flags(wait=wait)
        call = handle.call.on_streams(async_finish if wait else True, allocate_on_comm_stream)
    except BufferClosedError:
        raise
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        pool.fail(group, "combine", error)
    if call.entry.check:
        refuse_check_in_capture(x)
        compare("combine", call, x)
    if wait:
        return apply(FusedCombine, x, handle, call), None
    return launch_pending_combine(call, x, handle)


def set_deepep_num_sms(num_sms: int) -> None:
    """Wish for a number of streaming multiprocessors for communication; 0 is automatic.

    Takes effect when ranks next agree, at the construction of a buffer; the environment variable goes first.
    Megatron-core calls this with 20, V1's default, from every layer though nobody set it: 20 therefore counts as
    automatic here, and whoever wants exactly 20 sets the environment variable.

    Raises:
        InputError: negative or not an integer.
    """
    if type(num_sms) is not int or num_sms < 0:
        raise InputError("num_sms", got=repr(num_sms), expected="an integer from 0")
    pool.wished_num_sms = 0 if num_sms == MEGATRON_DEFAULT_NUM_SMS else num_sms
