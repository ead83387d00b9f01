"""``ExpertLayoutManager``: the expert layout in the place of Megatron's ``_DeepepManager``.

The buffer delivers rows grouped by expert and padded as quantised GEMMs want them, so what ``_DeepepManager`` does
between dispatch and experts (multi-hot conversion, padding of the routing map, permute) and between experts and combine
(un-permute) is nothing here: the experts read what the dispatch wrote, and the combine reads what they write.

Legend: T own tokens, H hidden, K top-k times expert tensor parallelism, E experts times the same, L local experts, A
rows at the experts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ..communication import DispatchHandle
from ..errors import MegatronError
from ..fused_a2a import MEGATRON_DEFAULT_NUM_SMS
from ..pool import pool
from ..selection import select_experts
from .core import module
from .functions import Functions

__all__ = ["ExpertLayoutManager", "alignment_for", "num_sms_for"]

_PADDED_BY = (
    "fp8",
    "fp4",
    "moe_router_padding_for_quantization",
    "moe_router_padding_for_fp8",
    "use_transformer_engine_op_fuser",
)


class ExpertLayoutManager:
    """Dispatch and combine of one MoE layer; the interface is ``_DeepepManager``'s.

    Several micro-batches may be in flight, a backward may run after later dispatches: what a backward needs is in the
    graph, and the attributes serve the forward alone.

    Attributes:
        token_probs: ``[T, K]``; a schedule may put a detached copy in its place before :meth:`dispatch`.
        token_indices: int64 ``[T, K]``, -1 for a dropped selection.
        dispatched_probs: float32 ``[A]``; a detached copy may take its place before the permute.
        tokens_per_expert: int64 ``[L]`` on the CPU, with padding; sums to A.
        handle: from dispatch to combine.

    Raises:
        MegatronError: a configuration that this layout cannot serve.
    """

    functions: ClassVar[Functions] = Functions()

    def __init__(
        self, group: dist.ProcessGroup, num_local_experts: int, router_topk: int, num_experts: int, config: Any
    ) -> None:
        self.group, self.num_local_experts, self.config = group, num_local_experts, config
        self.router_topk, self.num_experts = router_topk, num_experts
        self.router_dtype = config.moe_router_dtype
        self.expert_alignment = alignment_for(config)
        self.token_probs: Tensor | None = None
        self.token_indices: Tensor | None = None
        self.dispatched_indices: None = None
        self.dispatched_probs: Tensor | None = None
        self.tokens_per_expert: Tensor | None = None
        self.handle: DispatchHandle | None = None
        if num_sms := num_sms_for(config):
            pool.wished_num_sms = num_sms

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Indices and weights of what the map selects, E entries a token; what a capacity dropped, it does not."""
        shape = routing_map.shape[0], self.num_experts
        self.token_probs, self.token_indices = select_experts(
            probs.reshape(shape), routing_map.reshape(shape), self.router_topk
        )

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """``[T, H]`` to ``[A, H]``, grouped by local expert. Collective over the group."""
        assert self.token_indices is not None
        assert self.token_probs is not None
        rows, _, self.dispatched_probs, _, self.handle = self.functions.dispatch(
            hidden_states,
            self.token_indices,
            self.token_probs,
            self.num_experts,
            self.group,
            async_finish,
            allocate_on_comm_stream,
            layout="expert",
            expert_alignment=self.expert_alignment,
        )
        self.tokens_per_expert = self.handle.padded_tokens_per_expert
        return rows

    def get_dispatched_metadata(self) -> tuple[None, Tensor | None]:
        """Indices, of which this layout has none, and probabilities of the rows."""
        return None, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> Tensor | None:
        return self.tokens_per_expert

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The rows as they are, and their weights ``[A]``."""
        assert self.dispatched_probs is not None
        probs = self.dispatched_probs
        return hidden_states, probs.double() if self.router_dtype == "fp64" else probs

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """``[A, H]`` to ``[T, H]``, complete over the group. Collective over the group."""
        handle, self.handle, self.dispatched_probs = self.handle, None, None
        if handle is None:
            raise MegatronError("combine without a dispatch", fix="Call dispatch() of this layer first.")
        return self.functions.combine(hidden_states, self.group, handle, async_finish, allocate_on_comm_stream)[0]


def alignment_for(config: Any) -> int:
    """What each expert's rows are padded to a multiple of: Megatron's number where a GEMM is quantised, else 1."""
    if not any(getattr(config, name, None) for name in _PADDED_BY):
        return 1
    utilities = module("megatron.core.transformer.moe.moe_utils")
    if hasattr(utilities, "get_align_size_for_quantization"):
        return max(int(utilities.get_align_size_for_quantization(config)), 1)
    return int(module("megatron.core.fp8_utils").get_fp8_align_size(config.fp8_recipe))  # before 0.16


def num_sms_for(config: Any) -> int:
    """SM count that the user set in Megatron's configuration, 0 where nobody did."""
    if hasattr(config, "moe_flex_dispatcher_num_sms"):
        return config.moe_flex_dispatcher_num_sms or 0
    older = getattr(config, "moe_deepep_num_sms", None) or 0
    return 0 if older == MEGATRON_DEFAULT_NUM_SMS else older  # nobody set it
