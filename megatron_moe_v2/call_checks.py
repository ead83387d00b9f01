"""A dispatch's arguments become a ``Call``, checked; what was checked once is not checked again.

Whatever is wrong on one rank raises on all that would wait for it. Legend as in ``fused_a2a``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import agree
from .communication import Call, DispatchHandle, check_flags
from .errors import CaptureError, HandleError, InputError, LimitError, MoEError
from .fp8 import ScaleFormat
from .fp8_wire import buffer_hidden, check_gradient, check_options, check_tokens
from .pool import Ceiling, pool, typed
from .recompute import RoutingLayout
from .settings import agreement_timeout, name_of
from .telemetry import ExpertLoadStats

__all__ = ["Layout", "check_each", "check_handle", "compare", "recall", "refuse_check_in_capture", "resolve"]

Layout = Literal["token", "expert"]


def recall(
    group: dist.ProcessGroup, x: Tensor, idx: Tensor, weights: Tensor, options: tuple[Any, ...]
) -> tuple[Any, Call | None]:
    """The key under which ``pool.calls`` holds a call that succeeded, and that call, if there was one.

    The key is all that :func:`resolve` checks but what each call brings anew; None where something is wrong with that.
    """
    try:
        num_tokens, hidden = x.shape
        rows, num_topk = shape = idx.shape
        device = x.device
        if rows != num_tokens or weights.shape != shape or idx.device != device or weights.device != device:
            return None, None
        kinds = tuple(map(type, options))  # 8 equals 8.0, and 1 True
        key = (group, hidden, num_topk, device, x.dtype, idx.dtype, weights.dtype, options, kinds)
        call = pool.calls.get(key)
        if call is None or call.entry.closed:
            return key, None
        dist.get_group_rank(group, call.entry.rank)  # raises where the group was destroyed
    except Exception:  # whatever it is, the checks find it, and tell the other ranks
        return None, None
    pool.used(call.entry)
    return key, call


def resolve(
    group: dist.ProcessGroup,
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    num_experts: int,
    layout: Layout,
    expert_alignment: int,
    num_max_tokens_per_rank: Ceiling,
    static_shapes: bool,
    async_finish: bool,
    allocate_on_comm_stream: bool,
    fp8: ScaleFormat | None,
    dequantize: bool,
    fp8_backward: bool,
) -> Call:
    """Check the arguments of a dispatch and find its buffer. Collective over the group where there is none yet."""
    try:
        for name, number in (("num_experts", num_experts), ("expert_alignment", expert_alignment)):
            if type(number) is not int:
                raise InputError(name, got=repr(number), expected="an integer")
        check_flags(static_shapes=static_shapes)
        check_flags(async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
        _check_tensors(x, idx, weights, layout, expert_alignment)
        if fp8 is not None or dequantize is not True or fp8_backward is not False:
            check_options(fp8, dequantize, fp8_backward)
            check_tokens(x)
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        pool.fail(group, "dispatch", error)
    entry = pool.obtain(
        group,
        hidden=x.shape[1] if fp8 is None else buffer_hidden(x.shape[1]),
        num_topk=idx.shape[1],
        num_max_tokens_per_rank=num_max_tokens_per_rank,
    )
    return Call(
        entry=entry,
        num_experts=num_experts,
        expert_layout=layout == "expert",
        expert_alignment=expert_alignment,
        static_shapes=static_shapes,
        async_finish=async_finish,
        allocate_on_comm_stream=allocate_on_comm_stream,
        fp8=fp8,
        dequantize=dequantize,
        fp8_backward=fp8_backward,
    )


def check_each(
    call: Call,
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    layout_cache: RoutingLayout | None,
    load_stats: ExpertLoadStats | None,
) -> Call:
    """The call, counted where ``load_stats`` are given. Raises what can be wrong though sizes and options are right.

    Collective over the group.
    """
    entry, repeats = call.entry, False
    failure: MoEError | None = None
    if entry.check:
        refuse_check_in_capture(x)
    try:
        if isinstance(layout_cache, RoutingLayout):
            repeats = layout_cache.handle is not None
            failure = layout_cache.mismatch(call, idx, compare=entry.check)
        elif layout_cache is not None:
            raise InputError("layout_cache", got=type(layout_cache).__name__, expected="a RoutingLayout or None")
        if load_stats is not None:
            _check_load_stats(load_stats, call.num_experts, entry.group, x)
            call = call.counted_by(load_stats)
        if call.fp8 is not None:
            failure = failure or _fp8_limit(call, x)
        if entry.check:
            failure = failure or _index_error(idx, call.num_experts)
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        failure = typed(error, "dispatch")
    if entry.check:
        compare("dispatch", call, x, weights, repeats=repeats, failure=failure)
    elif failure is not None:
        entry.fail("dispatch", failure)
    return call


def _check_tensors(x: Tensor, idx: Tensor, weights: Tensor, layout: str, alignment: int) -> None:
    for name, tensor in (("x", x), ("token_indices", idx), ("token_probs", weights)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(name, got=got, expected="a 2-D tensor")
        if tensor.layout is not torch.strided:
            raise InputError(name, got=tensor.layout, expected="a dense tensor")
        if tensor.device != x.device:
            raise InputError(f"device of {name}", got=tensor.device, expected=f"{x.device}, that of x")
    if x.device.type not in ("cpu", "cuda"):
        raise InputError("device of x", got=x.device, expected="the CPU or a GPU")
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


def check_handle(x: Tensor, group: object, handle: DispatchHandle) -> None:
    if not isinstance(handle, DispatchHandle):
        raise HandleError("handle", got=type(handle).__name__, expected="what fused_dispatch returned")
    handle.call.entry.require_usable()
    if not isinstance(x, Tensor):
        raise InputError("x of combine", got=type(x).__name__, expected="a tensor")
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


def refuse_check_in_capture(x: Tensor) -> None:
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


def compare(
    operation: str, call: Call, *tensors: Tensor, repeats: bool = False, failure: MoEError | None = None
) -> None:
    """What ``MCORE_DEEPEP_V2_CHECK=1`` adds: this call compared between all ranks. Collective over the group.

    Where the buffer can tell its ranks it does: one that is in a backward, which is not compared, then hears of it too.
    """
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
    entry = call.entry
    if not entry.has_channel:
        agree(entry.group, operation, facts, timeout=agreement_timeout(), failure=failure)
        return
    if failure is not None:
        entry.fail(operation, failure)
    entry.announce(", ".join([operation, *(f"{name}={value}" for name, value in facts.items())]))
