"""Megatron's GPT by plain micro-batches and by its fine-grained 1F1B schedule; functions for the ranks of a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron_cases import LAYOUTS, Case, build_config, compare, differences, installed, megatron
from scene import buffers
from torch import Tensor

VOCABULARY = 32

OVERLAP: dict[str, Any] = {
    "config": {"num_layers": 2, "bf16": True, "overlap_moe_expert_parallel_comm": True},
    "forced": {"bf16": False},
}
"""Options of a case under the schedule, whose check wants bfloat16, in float32."""


def build_gpt(case: Case, dispatcher: str) -> Any:
    """Megatron's GPT with an MoE in each layer, in this rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1234)
    config = build_config(case, dispatcher)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False),
        vocab_size=VOCABULARY,
        max_sequence_length=case.seq_length,
        position_embedding_type="rope",
        parallel_output=True,
    ).train()


def text(case: Case, micro_batch: int) -> dict[str, Tensor | None]:
    """Arguments of the model for a micro-batch of this rank."""
    draw = torch.Generator().manual_seed(100 * micro_batch + dist.get_rank() // case.tensor)
    ids = torch.randint(0, VOCABULARY, (case.micro_batch_size, case.seq_length + 1), generator=draw)
    positions = torch.arange(case.seq_length).expand(case.micro_batch_size, -1)
    return {"input_ids": ids[:, :-1], "position_ids": positions, "attention_mask": None, "labels": ids[:, 1:]}


def run_plain(case: Case, dispatcher: str, micro_batches: int = 3) -> dict[str, Tensor]:
    """Losses and gradients, one micro-batch after the other. Collective over the world."""
    model = build_gpt(case, dispatcher)
    losses = []
    for number in range(micro_batches):
        loss = model(**text(case, number))
        loss.sum().backward()
        losses.append(loss.detach())
    return _of_model(model, losses)


def run_overlapped(case: Case, dispatcher: str, micro_batches: int = 3) -> dict[str, Tensor]:
    """The same by Megatron's fine-grained schedule: each forward beside the backward before it, storages freed."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams

    set_streams()
    model = build_gpt(case, dispatcher)
    losses, previous = [], None
    for number in range(micro_batches + 1):
        plan = model.build_schedule_plan(**text(case, number)) if number < micro_batches else None
        grad = None if previous is None else torch.ones_like(losses[-1])
        loss = TransformerModelChunkSchedulePlan.run(plan, previous, b_grad=grad)
        if plan is not None:
            losses.append(loss.detach())
        previous = plan
    return _of_model(model, losses)


def _of_model(model: Any, losses: list[Tensor]) -> dict[str, Tensor]:
    got = {f"loss {number}": loss for number, loss in enumerate(losses)}
    return got | {f"{name}.grad": one.grad for name, one in model.named_parameters() if one.grad is not None}


def compare_overlapped(rank: int, world: int, layout: str, case: Case, control: bool = False) -> list[str]:
    """Fine-grained overlap in a layout against the plain alltoall dispatcher; what differs, a line each.

    Args:
        control: Megatron's own rule of what may be freed, in the place of ours.
    """
    megatron(case.tensor)
    plain = {name: value for name, value in case.config.items() if name != "overlap_moe_expert_parallel_comm"}
    want = run_plain(Case(**{**vars(case), "config": plain}), "alltoall")
    with installed(layout), buffers(adversary=case.adversary, MAX_TOKENS_PER_RANK=case.ceiling()):
        if control:
            from megatron.core.models.common import utils

            utils.should_free_input = utils.should_free_input.__wrapped__
        got = run_overlapped(case, "flex")
    return differences(got, want, case.dtype)


def other_core(rank: int, world: int, cases: dict[str, Case], overlapped: Case) -> tuple[str, list[str]]:
    """Version, and what differs in :func:`compare` and :func:`compare_overlapped`, in ranks of their own."""
    import megatron.core

    lines = []
    for tensor in (1, 2):
        of_size = {name: Case(**{**vars(case), "tensor": tensor}) for name, case in cases.items()}
        lines += [f"TP{tensor}, {line}" for line in compare(rank, world, tensor, of_size, LAYOUTS)]
    for layout in LAYOUTS:
        lines += [f"{layout} overlapped, {line}" for line in compare_overlapped(rank, world, layout, overlapped)]
    return megatron.core.__version__, lines
