"""What of megatron-core has to be made CPU-capable, each with its reason.

    python examples/megatron_cpu.py     # prints the list

megatron-core trains on GPUs alone: it asks ``torch.cuda`` for devices, streams and random states without looking
whether there is one. :func:`make_cpu_capable` puts a stand-in for each of these names, process-wide, and does nothing
where CUDA is available. What Megatron computes and communicates is left as it is; every process group is gloo's.

Known to work with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")


class CpuStream:
    """A stream of a device without streams: everything is finished when the call returns."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or CpuEvent()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class CpuEvent:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


CURRENT_STREAM = CpuStream()


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _stream_context(stream: Any = None) -> AbstractContextManager[None]:
    return nullcontext()


def _get_rng_state(device: Any = None) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with ``device="cuda"`` read as the CPU, and without pinned memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _tensor_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def kind(self: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return kind


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return barrier


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG:
            return original(tensor, op, group, async_op)
        original(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))
        return CpuEvent() if async_op else None

    return all_reduce


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({one.shape for one in tensor_list}) == 1:
            return original(tensor_list, tensor, group, async_op)
        for rank, place in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                place.copy_(tensor)
            dist.broadcast(place, group_src=rank, group=group)
        return CpuEvent() if async_op else None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter(output: Tensor, input_list: list[Tensor], *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if len({one.shape for one in input_list}) == 1:
            return original(output, input_list, *args, group=group, **kwargs)
        for rank, part in enumerate(input_list):
            whole = part.clone()
            dist.all_reduce(whole, group=group)
            if rank == dist.get_rank(group):
                output.copy_(whole)
        return CpuEvent() if kwargs.get("async_op") else None

    return reduce_scatter


def _torch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _share_storage() -> Callable[[Tensor, Tensor], None]:
    def share(target: Tensor, source: Tensor) -> None:
        storage, other = target.untyped_storage(), source.untyped_storage()
        storage.resize_(other.nbytes())
        storage.copy_(other)

    return share


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """One replaced name.

    Attributes:
        where: module or class that holds the name.
        names: what is replaced; a name that this version lacks is left out.
        put: the stand-in, or with ``wraps`` a function from the original to it.
        reason: who needs it.
        adds: the name is put where it is missing, and only there.
    """

    where: str
    names: tuple[str, ...]
    put: Any
    reason: str
    wraps: bool = False
    adds: bool = False


FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")

STAND_INS = (
    StandIn(
        where="torch.cuda",
        names=("current_device",),
        put=lambda: CPU,
        reason="device of every parameter, buffer, mask and gathered tensor",
    ),
    StandIn(
        where="torch.cuda",
        names=("Stream",),
        put=CpuStream,
        reason="alltoall dispatcher's copies to the host, shared experts' overlap, gradient reduction",
    ),
    StandIn(where="torch.cuda", names=("Event",), put=CpuEvent, reason="waits between those streams, and timers"),
    StandIn(
        where="torch.cuda",
        names=("current_stream", "default_stream"),
        put=lambda device=None: CURRENT_STREAM,
        reason="what those streams wait for",
    ),
    StandIn(where="torch.cuda", names=("stream",), put=_stream_context, reason="blocks that run on those streams"),
    StandIn(
        where="torch.cuda",
        names=("synchronize", "empty_cache", "reset_peak_memory_stats"),
        put=_nothing,
        reason="timers, schedules and offloading wait for the device",
    ),
    StandIn(
        where="torch.cuda",
        names=("manual_seed",),
        put=torch.default_generator.manual_seed,
        reason="CudaRNGStatesTracker seeds a state for tensor-parallel, expert and data-parallel regions",
    ),
    StandIn(where="torch.cuda", names=("get_rng_state",), put=_get_rng_state, reason="the same tracker reads it"),
    StandIn(where="torch.cuda.random", names=("get_rng_state",), put=_get_rng_state, reason="the same, where it forks"),
    StandIn(where="torch.cuda", names=("set_rng_state",), put=_set_rng_state, reason="the rerun state machine sets it"),
    StandIn(
        where="megatron.core.tensor_parallel.random",
        names=("_set_cuda_rng_state",),
        put=_set_rng_state,
        reason="forks and recompute set the state through CUDA's generators, which a CPU has none of",
    ),
    StandIn(
        where="torch",
        names=FACTORIES,
        put=_on_cpu,
        wraps=True,
        reason='device="cuda" literals: schedules, optimizer, clipping, loss scale, MoE metrics, causal masks',
    ),
    StandIn(
        where="torch.Tensor",
        names=("to",),
        put=_tensor_to,
        wraps=True,
        reason='device="cuda" literals: routing maps, buffers of the optimizer',
    ),
    StandIn(
        where="torch.Tensor",
        names=("cuda",),
        put=_tensor_cuda,
        reason="tied embedding weights, the optimizer's state, broadcast of the batch",
    ),
    StandIn(where="torch.nn.Module", names=("cuda",), put=_tensor_cuda, reason="launch scripts move the model"),
    StandIn(
        where="torch.Tensor",
        names=("type",),
        put=_tensor_type,
        wraps=True,
        reason='the bf16 and the distributed optimizer compare it with "torch.cuda.BFloat16Tensor" and others',
    ),
    StandIn(
        where="torch.Tensor",
        names=("record_stream",),
        put=_nothing,
        reason="fine-grained overlap and shared experts mark what another stream uses",
    ),
    StandIn(
        where="torch.distributed",
        names=("barrier",),
        put=_barrier,
        wraps=True,
        reason="parallel_state passes device_ids, which gloo refuses",
    ),
    StandIn(
        where="torch.distributed",
        names=("all_reduce",),
        put=_all_reduce,
        wraps=True,
        reason="the MoE metrics average over ranks, which gloo cannot",
    ),
    StandIn(
        where="torch.distributed",
        names=("all_gather",),
        put=_all_gather,
        wraps=True,
        reason="the alltoall dispatcher gathers uneven parts over an expert's tensor parallel ranks, gloo even ones",
    ),
    StandIn(
        where="torch.distributed",
        names=("reduce_scatter",),
        put=_reduce_scatter,
        wraps=True,
        reason="and scatters their sums",
    ),
    StandIn(
        where="megatron.core.transformer.torch_norm.WrappedTorchNorm",
        names=("__new__",),
        put=_torch_norm,
        wraps=True,
        reason="the norm without Transformer Engine refuses sequence parallelism, and with it TP of an MoE layer; "
        "its parameters are marked, so that Megatron sums their gradients over tensor parallel ranks",
    ),
    StandIn(
        where="megatron.core.transformer.moe.token_dispatcher",
        names=("maybe_move_tensor_to_cpu",),
        put=_to_host,
        reason="it leaves tensors of the CPU as they are, but all_to_all_single wants numbers as split sizes",
    ),
    StandIn(
        where="megatron.core.transformer.moe.moe_utils",
        names=("te_general_gemm",),
        put=None,
        reason="the router asks for it and 0.16 defines it only where Transformer Engine is",
        adds=True,
    ),
    StandIn(
        where="megatron.core.tensor_parallel.random",
        names=("_get_share_storage",),
        put=_share_storage,
        reason="selective recompute compiles a C++ extension for it (0.19); the copy needs no compiler",
    ),
)

_applied: list[str] = []


def _quiet(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _holder(path: str) -> Any:
    """The module or class of that dotted path; megatron-core is imported when one of its modules is named."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def make_cpu_capable() -> list[str]:
    """Put the stand-ins, once a process; call it before anything of megatron-core runs.

    ``torch.compile`` is made eager as well: what Megatron fuses is small, and compiling it takes a C++ compiler and
    minutes. The tracker's warning that a CPU random state changed is dropped: here that state is the one it manages.

    Returns:
        The dotted names that were replaced; empty where CUDA is available.
    """
    if torch.cuda.is_available() or _applied:
        return list(_applied)
    torch.compiler.set_stance("force_eager")
    # What sits in torch goes first: importing megatron-core already uses it.
    for one in sorted(STAND_INS, key=lambda item: item.where.startswith("megatron")):
        holder = _holder(one.where)
        for name in one.names:
            if hasattr(holder, name) == one.adds:
                continue
            setattr(holder, name, one.put(getattr(holder, name)) if one.wraps else one.put)
            _applied.append(f"{one.where}.{name}")
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_quiet)
    return list(_applied)


def start_parallel(*, tensor: int = 1, expert: int = 1, expert_tensor: int | None = None, pipeline: int = 1) -> None:
    """Megatron's process groups over the default group, which exists already. Collective over the world."""
    from megatron.core import parallel_state

    assert dist.is_initialized()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )


if __name__ == "__main__":
    for item in STAND_INS:
        print(f"{item.where}: {', '.join(item.names)}\n    {item.reason}")
