"""What DeepEP V1 and V2 share: the communicator brought up, checks of a call, and errors in words."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BackendError, CommunicationError, HandleError, InputError, LimitError, MoEError

__all__ = ["bring_up", "check_cached", "check_dtype", "check_event", "explained"]


def bring_up(group: dist.ProcessGroup) -> None:
    """Make the group's NCCL communicator exist: DeepEP reads its pointer, which is 0 before the first collective.

    Collective over the group.
    """
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()


def check_dtype(x: Tensor, wanted: torch.dtype, version: str) -> None:
    """Tokens on a GPU in the one dtype that DeepEP carries."""
    if not x.is_cuda:
        raise InputError("device of x", got=x.device, expected="CUDA: DeepEP runs on GPUs alone")
    if x.dtype != wanted:
        raise LimitError(f"dtype of x on DeepEP {version}", got=x.dtype, expected=wanted, fix="Cast the tokens before.")


def check_cached(x: Tensor, handle: Any, do_expand: bool) -> None:
    """A cached dispatch repeats the routing of ``handle``: as many rows, and no layout that it does not have."""
    if do_expand and not handle.do_expand:
        raise HandleError("do_expand with a handle of the token layout", fix="Dispatch with do_expand=True first.")
    if x.shape[0] != handle.topk_idx.shape[0]:
        raise HandleError("rows of x", got=x.shape[0], expected=f"the {handle.topk_idx.shape[0]} dispatched")


def check_event(event: Any, kind: type, on_comm_stream: bool) -> None:
    """``previous_event`` is a raw event handle, and goes only with comm-stream allocation."""
    if event is None:
        return
    if not isinstance(event, kind):
        raise InputError("previous_event", got=type(event).__name__, expected="a raw EventHandle")
    if not on_comm_stream:
        raise InputError("previous_event without allocate_on_comm_stream", fix="Set allocate_on_comm_stream=True.")


def explained(error: BaseException, rank: int, num_ranks: int) -> BaseException:
    """What an exception of DeepEP means.

    Returns:
        A :class:`CommunicationError`: another rank did not come in time, or the CUDA context is lost. A
        :class:`BackendError`: one of DeepEP's own assertions. Any other exception as it is.
    """
    if isinstance(error, MoEError) or not isinstance(error, (RuntimeError, AssertionError)):
        return error
    text = str(error)
    first = text.splitlines()[0] if text else type(error).__name__
    if "CPU wait" in text or "timeout" in text.lower():
        return CommunicationError(
            f"rank {rank} of {num_ranks} waited in vain for another rank",
            got=first,
            fix="Look for the first error in the other ranks' logs.",
        )
    if "CUDA error" in text:
        return CommunicationError(
            f"the CUDA context of rank {rank} is lost",
            got=first,
            fix="A kernel waited longer than the GPU time-out, or failed; this process can only end.",
        )
    if isinstance(error, AssertionError) or "assert" in text.lower():
        return BackendError(f"DeepEP refused the call: {first}")
    return error
