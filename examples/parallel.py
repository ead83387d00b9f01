"""Data and expert parallelism over one group: process group, gradient sums, clipping, stopping together.

The objective is a *sum over ranks* of local terms, each already divided by the global token count. Then

* a replicated (dense) parameter's gradient is the sum of the ranks' gradients, and
* an expert's gradient is complete on the rank that owns it: the backward of dispatch has brought the contributions of
  all ranks there, and nothing is reduced or scaled.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

BUCKET_ELEMENTS = 1 << 25


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def start(device: str, *, timeout: timedelta | None = None) -> Ranks:
    """Start the default process group: torchrun's where there is one, else a group of this process alone.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``.
        timeout: for the meeting and for each collective; PyTorch's by default.

    Raises:
        RuntimeError: ``cuda`` where PyTorch sees no GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if device == "cuda":
        gpus = torch.cuda.device_count()
        if gpus == 0:
            built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
            raise RuntimeError(
                f"device cuda: got no GPU (PyTorch {torch.__version__} {built}), expected one. "
                "Check nvidia-smi and CUDA_VISIBLE_DEVICES, or choose the device cpu"
            )
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        torch.cuda.set_device(chosen)
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), device=chosen)


def require_equal(what: str, value: int, ranks: Ranks) -> None:
    """Raise on every rank where ``value`` differs between ranks. Collective over the group.

    Raises:
        RuntimeError: with the values of all ranks.
    """
    values = torch.zeros(ranks.world, dtype=torch.int64, device=ranks.device)
    values[ranks.rank] = value
    dist.all_reduce(values)
    if values.min() < values.max():
        raise RuntimeError(f"{what} differs between ranks: got {values.tolist()}, expected one value")


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of replicated parameters over all ranks, in their own dtype, and leave them in the
    parameter's. Collective over the group.
    """
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(member.numel() for member in bucket) + parameter.numel() > BUCKET_ELEMENTS:
            _sum_bucket(bucket)
            bucket = []
        bucket.append(parameter)
    _sum_bucket(bucket)


def _sum_bucket(parameters: Sequence[nn.Parameter]) -> None:
    grads = [_grad(parameter) for parameter in parameters]
    flat = torch.cat([grad.flatten() for grad in grads])
    if dist.get_world_size() > 1:
        dist.all_reduce(flat)
    parts = flat.to(parameters[0].dtype).split([grad.numel() for grad in grads])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def clip_gradients(dense: Sequence[nn.Parameter], experts: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global norm is at most ``max_norm``. Collective over the group.

    Dense gradients are equal on all ranks and count once; each expert's counts on its owner.

    Returns:
        The norm before scaling, equal on all ranks.
    """
    square = _sum_of_squares(experts)
    dist.all_reduce(square)
    norm = (square + _sum_of_squares(dense)).sqrt().float()
    nn.utils.clip_grads_with_norm_((*dense, *experts), max_norm, norm)
    return float(norm)


def _sum_of_squares(parameters: Sequence[nn.Parameter]) -> Tensor:
    norms = [torch.linalg.vector_norm(_grad(parameter), dtype=torch.float64) for parameter in parameters]
    return torch.stack(norms).square().sum()


def _grad(parameter: nn.Parameter) -> Tensor:
    """The gradient, which every parameter has on every rank, also after a step with zero tokens."""
    assert parameter.grad is not None
    return parameter.grad


class StopRequest:
    """Whether this process was asked to stop; the ranks then agree on it in the step's all-reduce."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take SIGINT (Ctrl-C) and SIGTERM as a request; a second signal acts as it did before."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)

        def request(number: int, frame: FrameType | None) -> None:
            self.requested = True
            restore()

        for number in previous:
            signal.signal(number, request)
        try:
            yield self
        finally:
            restore()
