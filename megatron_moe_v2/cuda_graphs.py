"""CUDA graphs over dispatch and combine: everything built and warmed before, and a replay that knows its buffer.

    prepare_for_capture(hidden=2048, num_topk=8, num_experts=128)     # on all ranks: builds, compiles, barrier
    decode = capture(step, tokens)                                    # step uses static_shapes=True throughout
    for tokens in stream:
        logits = decode(tokens)                                       # copies tokens in, replays

What synchronises the host is refused inside a capture: building a buffer, a dispatch without ``static_shapes``, any
call of the embedded buffer or of DeepEP V1, and deterministic mode in the expert layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .agreement import agree
from .capacity import check_capacity
from .errors import BufferClosedError, InputError
from .pool import Ceiling, Group, PooledBuffer, pool, resolve_group
from .prepare import prepare_buffer
from .settings import agreement_timeout

__all__ = ["CapturedCallable", "capture", "prepare_for_capture"]

_WARM_UPS = 3


def prepare_for_capture(
    group: Group = None,
    *,
    hidden: int,
    num_topk: int,
    num_experts: int,
    num_max_tokens_per_rank: Ceiling = "decode",
    layouts: Sequence[Literal["token", "expert"]] = ("token", "expert"),
    expert_alignment: int = 1,
    num_sms: int = 0,
    workload: Mapping[str, Any] | None = None,
) -> PooledBuffer:
    """Build the buffer and compile what a static step needs, forward and backward. Collective over the group.

    All ranks leave together: one that captures while another still compiles would wait in vain inside the capture.

    Args:
        num_max_tokens_per_rank: the ceiling, by default the environment's for decoding.
        workload: arguments of :func:`check_capacity`, which is then made first.

    Raises:
        CapacityError: the workload does not fit; on every rank, if on any.
        MoEError: as :func:`prepare_buffer`.
    """
    group = resolve_group(group)
    if workload is not None:
        try:
            ceiling = None if num_max_tokens_per_rank == "decode" else num_max_tokens_per_rank
            check_capacity(**{"decode_max_tokens_per_rank": ceiling, **workload})
        except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
            pool.fail(group, "check of the capacity", error)
    entry = prepare_buffer(
        group,
        hidden=hidden,
        num_topk=num_topk,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        num_sms=num_sms,
        warmup=True,
        num_experts=num_experts,
        layouts=layouts,
        expert_alignment=expert_alignment,
        static_shapes=True,
    )
    agree(group, "capture", {}, timeout=agreement_timeout())
    return entry


class CapturedCallable:
    """A captured function. Calling it copies the arguments in, replays, and returns the graph's own outputs.

    The outputs are overwritten by the next call: clone what must outlive it.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self._leaves, self._structure = pytree.tree_flatten(inputs)
        self._entries: list[PooledBuffer] = []
        self._graph: Any = torch.cuda.CUDAGraph()
        everyone = pool.entries()
        for entry in everyone:
            entry.capturing = self
        try:
            # NCCL's watchdog asks for events meanwhile, which a global capture would take for its own.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._result = function(*inputs)
        finally:
            for entry in everyone:
                entry.capturing = None
        self._entries = [entry for entry in everyone if self in entry.graphs]

    def __call__(self, *inputs: Any) -> Any:
        """Replay with these inputs. Collective over the groups of the buffers it uses.

        Raises:
            BufferClosedError: a buffer of the graph was closed.
            InputError: the inputs differ in structure, shape, dtype or device from those captured.
        """
        if self._graph is None or not all(entry.usable for entry in self._entries):
            raise BufferClosedError("a buffer of this CUDA graph was closed, or its group went", fix="Capture again.")
        leaves, structure = pytree.tree_flatten(inputs)
        if structure != self._structure:
            raise InputError("inputs of a captured function", got=structure, expected=self._structure)
        for number, (new, kept) in enumerate(zip(leaves, self._leaves, strict=True)):
            if not isinstance(kept, Tensor):
                if new is not kept and new != kept:
                    raise InputError(f"input {number} of a captured function", got=new, expected=f"{kept}, as captured")
            elif new is not kept:
                _copy(number, new, kept)
        self._graph.replay()
        return self._result

    def release(self) -> None:
        """Drop the graph and its memory; a later call raises."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = self._result = None


def _copy(number: int, new: Any, kept: Tensor) -> None:
    if not isinstance(new, Tensor) or (new.shape, new.dtype, new.device) != (kept.shape, kept.dtype, kept.device):
        got = f"{new.dtype} {list(new.shape)} on {new.device}" if isinstance(new, Tensor) else type(new).__name__
        expected = f"{kept.dtype} {list(kept.shape)} on {kept.device}"
        raise InputError(f"input {number} of a captured function", got=got, expected=expected)
    with torch.no_grad():
        kept.copy_(new)


def capture(function: Callable[..., Any], *inputs: Any) -> CapturedCallable | Callable[..., Any]:
    """Capture ``function(*inputs)`` in a CUDA graph; where there is no CUDA, return ``function`` itself.

    It is called a few times on a stream of its own first, as CUDA graphs want it, so all ranks must come with the same
    function. ``inputs`` become the graph's own: a replay copies its arguments into them. Collective over the groups of
    the buffers that the function uses.

    Raises:
        CaptureError: on every rank, if the function makes a call of this package that cannot be captured on any; says
            which. The capture can be tried again. What else CUDA refuses comes as PyTorch's own error.
    """
    if not torch.cuda.is_available():
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*inputs)
        before = {id(entry): entry.operations.number for entry in pool.entries()}
        for _ in range(_WARM_UPS - 1):
            function(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    used = {entry.group: entry for entry in pool.entries() if entry.operations.number != before[id(entry)]}
    for group in used:
        agree(group, "capture", {}, timeout=agreement_timeout())
    failure: Exception | None = None
    captured = None
    try:
        captured = CapturedCallable(function, inputs)
    except Exception as error:  # whatever it is, the other ranks would wait for this one at their first replay
        failure = error
    for group in used:
        agree(group, "captured", {}, timeout=agreement_timeout(), failure=failure)
    if failure is not None:
        raise failure
    assert captured is not None
    return captured
