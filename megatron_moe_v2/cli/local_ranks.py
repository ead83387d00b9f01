"""A process group for a command: joined where a launcher started it, or of local ranks that it starts itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

__all__ = ["joined", "launched", "num_cores", "spawn"]


def launched() -> int | None:
    """World size if a launcher such as ``torchrun`` started this process, else None."""
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return int(world_size) if rank and world_size else None


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def joined(device: str, **meeting: Any) -> Iterator[torch.device]:
    """The default process group for the block, and this rank's device.

    Args:
        device: ``"cpu"`` (gloo), ``"cuda"`` (NCCL), or ``"auto"``: CUDA if each local rank has a GPU of its own.
        meeting: of ``init_process_group``; by default the launcher's environment.
    """
    local_ranks = meeting.get("world_size") or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    local_rank = int(meeting["rank"] if "rank" in meeting else os.environ.get("LOCAL_RANK", "0"))
    on_cuda = device == "cuda" or (device == "auto" and local_ranks <= torch.cuda.device_count())
    # Ranks may share a GPU where "cuda" is asked for.
    place = torch.device("cuda", local_rank % torch.cuda.device_count()) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(place)
    torch.set_num_threads(max(1, num_cores() // local_ranks))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", **meeting)
    try:
        yield place
    finally:
        dist.destroy_process_group()


def spawn(job: Callable[..., None], num_ranks: int, device: str, *args: Any) -> None:
    """Run ``job(device, *args)`` on as many local ranks, each in its own process with the default group joined.

    Raises:
        ProcessRaisedException, ProcessExitedException: of ``torch.multiprocessing``, when a rank fails; the others are
            ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/meeting"
        start_processes(_enter, (job, num_ranks, address, device, args), num_ranks, start_method="spawn")


def _enter(
    rank: int, job: Callable[..., None], num_ranks: int, address: str, device: str, args: tuple[Any, ...]
) -> None:
    with joined(device, init_method=address, rank=rank, world_size=num_ranks) as place:
        job(place, *args)
