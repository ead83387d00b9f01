"""What is called in the place of Megatron's functions: ours, with the ceiling and, on request, NVTX ranges.

A range covers the launch alone: the returned tensors' ``grad_fn`` stays the communication's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..communication import DispatchHandle
from ..fp8 import ScaleFormat
from ..fused_a2a import Delivered, Layout, fused_combine, fused_dispatch, set_deepep_num_sms
from ..pool import Group, pool, resolve_group
from .ceiling import ceiling

__all__ = ["MARKER", "Functions"]

MARKER = "__megatron_moe_v2__"
"""Attribute of what was put in the place of a name of megatron-core: the layout."""


class Functions:
    """Dispatch and combine as they are installed.

    Attributes:
        max_tokens_per_rank: the ceiling that was installed, None to find it when the first buffer is built.
        prepared: the ceiling of the buffers that ``prepare`` built last.
        nvtx: put NVTX ranges around the launches, on CUDA.
        fp8: tokens travel in FP8 with scales of this format, and are de-quantised on arrival.
        fp8_backward: so does the gradient of the combine.
    """

    def __init__(
        self,
        *,
        max_tokens_per_rank: int | None = None,
        nvtx: bool = False,
        fp8: ScaleFormat | None = None,
        fp8_backward: bool = False,
    ) -> None:
        self.max_tokens_per_rank, self.nvtx = max_tokens_per_rank, nvtx
        self.fp8, self.fp8_backward = fp8, fp8_backward
        self.prepared: int | None = None

    def dispatch(
        self,
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
    ) -> Delivered:
        """:func:`megatron_moe_v2.fused_dispatch` with the ceiling. Collective over the group."""
        try:
            found = ceiling(self.prepared or self.max_tokens_per_rank)
        except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
            pool.fail(resolve_group(group), "dispatch", error)
        if pool.pinned is None:
            found.log()
        with self._range("moe dispatch", x):
            return fused_dispatch(
                x,
                token_indices,
                token_probs,
                num_experts,
                group,
                async_finish,
                allocate_on_comm_stream,
                layout=layout,
                expert_alignment=expert_alignment,
                num_max_tokens_per_rank=found.tokens,
                fp8=self.fp8,
                fp8_backward=self.fp8_backward,
            )

    def combine(
        self,
        x: Tensor,
        group: Group,
        handle: DispatchHandle,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None]:
        """:func:`megatron_moe_v2.fused_combine`. Collective over the group."""
        with self._range("moe combine", x):
            return fused_combine(x, group, handle, async_finish, allocate_on_comm_stream)

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Functions with Megatron's names and signatures."""

        def dispatch(
            x: Tensor,
            token_indices: Tensor,
            token_probs: Tensor,
            num_experts: int,
            group: Group,
            async_finish: bool = False,
            allocate_on_comm_stream: bool = False,
        ) -> Delivered:
            return self.dispatch(
                x, token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream
            )

        dispatch.__doc__ = fused_dispatch.__doc__
        return {"fused_dispatch": dispatch, "fused_combine": self.combine, "set_deepep_num_sms": set_deepep_num_sms}

    def _range(self, name: str, x: Tensor) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name) if self.nvtx and x.is_cuda else nullcontext()
