"""Communication buffers of the two phases, side by side or in turn, and the memory they leave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from moe_model import ModelConfig
from parallel import Ranks

from megatron_moe_v2 import close_buffers, prepare_buffer, prepare_for_capture


def used_mib(device: torch.device) -> float:
    """MiB in use: of the whole GPU, whoever allocated it, or the most that this process had of the host's memory."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**20
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class PhaseBuffers:
    """The training buffer and the smaller one for decoding.

    Kept side by side, or with ``rebuild`` one at a time: a phase builds its own and closes it, CUDA graph included.

    Args:
        training_rows: tokens of the largest training batch on a rank.
        workload: of :func:`megatron_moe_v2.check_capacity`.
        decode_layout: of the decoding dispatches.
        capture: captures the decoding step.
    """

    def __init__(
        self,
        ranks: Ranks,
        config: ModelConfig,
        *,
        training_rows: int,
        workload: dict[str, Any],
        decode_layout: str,
        capture: Callable[[], None],
        rebuild: bool,
    ) -> None:
        self.ranks, self.config, self.training_rows = ranks, config, training_rows
        self.workload, self.decode_layout, self.capture, self.rebuild = workload, decode_layout, capture, rebuild
        self.memory: dict[str, float] = {}
        self.described = [self._training(), self._rollout()]
        if rebuild:
            close_buffers(release_graphs=True)

    def _training(self) -> str:
        config = self.config
        buffer = prepare_buffer(hidden=config.hidden, num_topk=config.top_k, num_max_tokens_per_rank=self.training_rows)
        return buffer.describe()

    def _rollout(self) -> str:
        config = self.config
        buffer = prepare_for_capture(
            hidden=config.hidden,
            num_topk=config.top_k,
            num_experts=config.experts,
            layouts=(self.decode_layout,),  # type: ignore[arg-type]
            workload=self.workload,
        )
        self.capture()
        return buffer.describe()

    def rollout(self) -> Any:
        """Context in which a rollout can run. Collective over the group."""
        return self._phase("rollout", self._rollout)

    def training(self) -> Any:
        """Context in which a training step can run. Collective over the group."""
        return self._phase("training", self._training)

    @contextmanager
    def _phase(self, name: str, build: Callable[[], str]) -> Iterator[None]:
        if not self.rebuild:
            yield
            return
        build()
        yield
        self.memory[name] = round(used_mib(self.ranks.device), 1)
        close_buffers(release_graphs=True)
        self.memory[f"after {name}"] = round(used_mib(self.ranks.device), 1)
