"""``ExpertLoadStats``: how many tokens each expert receives, counted where they arrive, without a synchronisation.

    stats = ExpertLoadStats(num_experts=64, group=group)                  # one for each layer
    dispatcher = FlexTokenDispatcher(num_experts=64, group=group, load_stats=stats)
    ...
    if step % 100 == 0:
        log(stats.snapshot(all_ranks=True))                               # this waits for the device
        stats.reset()

DeepEP V2 adds to the counters in its dispatch kernel; elsewhere one addition is launched. A dispatch inside a backward
is the recomputation of one that was counted, under every kind of checkpointing, and one that repeats a
:class:`~megatron_moe_v2.RoutingLayout` exchanges no counts: neither counts.

Legend: R ranks, E experts, L = E / R local experts, M the ceiling.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buffers.checks import check_num_experts
from .errors import InputError
from .pool import Group, on_cuda, resolve_group

__all__ = ["ExpertLoadStats", "in_backward"]

_WRAP = 2**32


def in_backward() -> bool:
    """A backward runs on this thread, so that a forward in it is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class ExpertLoadStats:
    """Tokens received by each local expert since construction or :meth:`reset`, padding left out.

    Counters live on the device from the construction on, so a dispatch under a CUDA graph capture counts at each
    replay. What is counted on the device in 32 bits is carried over to 64 before it can run over.

    Args:
        num_experts: E over all ranks, a multiple of them.
        group: process group, one-dimensional ``DeviceMesh``, or None for the default group.
        device: of the tokens; the current CUDA device if the group communicates CUDA tensors, else the CPU.

    Raises:
        InputError: a number that cannot be, or no process group.
    """

    def __init__(
        self, *, num_experts: int, group: Group = None, device: torch.device | str | int | None = None
    ) -> None:
        self.group = resolve_group(group)
        self.num_experts = num_experts
        self.num_local_experts = check_num_experts(num_experts, self.group.size()) // self.group.size()
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if on_cuda(self.group) else "cpu"
        with torch.inference_mode(False):  # they must be writable in and outside of it
            self._counters = torch.zeros(self.num_local_experts, dtype=torch.int32, device=device)
            self._carried_over = torch.zeros_like(self._counters)
            self._total = torch.zeros_like(self._counters, dtype=torch.int64)
        self._uncarried = 0

    def check(self, num_experts: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Whether a dispatch can be counted here.

        Raises:
            InputError: it has other experts, another group or device.
        """
        if num_experts != self.num_experts or group is not self.group:
            raise InputError(
                "load_stats",
                got=f"of {self.num_experts} experts",
                expected=f"of {num_experts} experts over the group of the dispatch",
                fix="Make one ExpertLoadStats for each layer.",
            )
        if device != self._counters.device:
            raise InputError("device of load_stats", got=self._counters.device, expected=f"{device}, that of x")

    def counters(self, most: int) -> Tensor | None:
        """int32 ``[L]`` for the next dispatch to add to, or None where it must not count.

        Args:
            most: R * M, more than which no expert can receive in it.
        """
        if in_backward():
            return None
        self._uncarried += most
        capturing = self._counters.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._uncarried >= _WRAP // 2 or capturing:  # replays are not seen here: each carries the last one's over
            self._carry_over()
        return self._counters

    def snapshot(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """The counts as plain numbers, for any logger. Waits for the device.

        Args:
            all_ranks: add the key ``global``. Collective over the group.

        Returns:
            ``first_expert`` of this rank, ``tokens_per_expert`` (L numbers), ``tokens`` (their sum) and ``imbalance``
            (largest over mean; 1.0 where nothing was received). ``global`` holds ``tokens_per_expert`` (E numbers),
            ``tokens``, ``imbalance``, and ``rank_imbalance``, the same of the ranks' sums. A token counts once for each
            expert that it selects. A dispatch with ``wait=False`` is counted when it was waited for, or before.
        """
        self._carry_over()
        found: dict[str, Any] = {"first_expert": self.group.rank() * self.num_local_experts}
        found |= _summary(self._total.tolist())
        if all_ranks:
            every = [torch.empty_like(self._total) for _ in range(self.group.size())]
            dist.all_gather(every, self._total, group=self.group)
            ranks = torch.stack(every).cpu()
            found["global"] = _summary(ranks.flatten().tolist())
            found["global"]["rank_imbalance"] = _imbalance(ranks.sum(1).tolist())
        return found

    def reset(self) -> None:
        """Start from zero, in stream order, without waiting."""
        self._carry_over()
        self._total.zero_()

    def _carry_over(self) -> None:
        """Add what came since the last time to the total.

        The counters are read once and never lowered: another stream may be adding to them.
        """
        now = self._counters.clone()
        self._total += (now.long() - self._carried_over.long()) % _WRAP
        self._carried_over.copy_(now)
        self._uncarried = 0


def _summary(counts: list[int]) -> dict[str, Any]:
    return {"tokens_per_expert": counts, "tokens": sum(counts), "imbalance": _imbalance(counts)}


def _imbalance(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
