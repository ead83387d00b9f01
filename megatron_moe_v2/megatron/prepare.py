"""``prepare``: every buffer of a Megatron model, built and warmed up before step 0 or any CUDA graph capture."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LimitError, MegatronError
from ..fused_a2a import Layout
from ..pool import PooledBuffer, on_cuda, pool
from ..prepare import prepare_buffer
from ..selection import select_experts
from . import core
from .ceiling import ceiling
from .manager import ExpertLayoutManager, alignment_for, num_sms_for
from .patch import current_functions, installed
from .telemetry import count_tokens

__all__ = ["prepare"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Need:
    """What decides which buffer a dispatcher uses and what its warm-up compiles."""

    group: dist.ProcessGroup
    hidden: int
    num_topk: int
    num_experts: int
    expert_alignment: int
    num_sms: int


def prepare(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    *,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    max_tokens_per_rank: int | None = None,
    metrics: bool = False,
) -> list[PooledBuffer]:
    """Build and warm up a buffer for each distinct need of the model's flex dispatchers.

    Afterwards step 0 constructs and compiles nothing. Collective over the group of each dispatcher; the model must be
    built alike on its ranks.

    Args:
        model: the model, or its chunks.
        seq_length, micro_batch_size: what the ceiling is derived from where nobody states it.
        max_tokens_per_rank: the ceiling of a rank's tokens in one call; it goes first.
        metrics: record the tokens of each layer's fullest expert, and the mean over experts, in Megatron's MoE metrics
            tracker, where this version has one.

    Returns:
        The buffers; none on a pipeline stage without MoE layers.

    Raises:
        MegatronError: ``install`` was not called, or a dispatcher cannot run on this package.
        InputError, SettingsError: a ceiling that cannot be.
        LimitError: the buffer that was chosen cannot carry the model's dtype.
        BackendError, RankMismatchError, MissingRankError: from building a buffer.
    """
    layout = installed()
    if layout is None:
        raise MegatronError("prepare() without install()", fix="Call install() before the model is built.")
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    dispatchers = list(_dispatchers(chunks))
    needs = {_need(one, layout): one.config for one in dispatchers}
    functions, entries = current_functions(), []
    stated = functions.max_tokens_per_rank if max_tokens_per_rank is None else max_tokens_per_rank
    for need, config in needs.items():
        try:
            found = ceiling(stated, seq_length=seq_length, micro_batch_size=micro_batch_size, config=config)
        except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
            pool.fail(need.group, "prepare", error)
        found.log()
        entry = prepare_buffer(
            need.group,
            hidden=need.hidden,
            num_topk=need.num_topk,
            num_max_tokens_per_rank=found.tokens,
            num_sms=need.num_sms,
            warmup=True,
            num_experts=need.num_experts,
            layouts=(layout,),
            expert_alignment=need.expert_alignment,
            fp8=functions.fp8,
            fp8_backward=functions.fp8_backward,
        )
        functions.prepared = found.tokens  # every later call then finds these buffers
        if entry.backend.name != "embedded" and config.params_dtype != torch.bfloat16:
            raise LimitError(
                f"params_dtype on {entry.backend.class_name}", got=config.params_dtype, expected=torch.bfloat16
            )
        if layout == "expert":
            _warm_selection(need, _ROUTER_DTYPES.get(config.moe_router_dtype, config.params_dtype))
        entries.append(entry)
    if metrics:
        for chunk in chunks:
            count_tokens(chunk)
    logger.info("prepared %d buffers for %d dispatchers, %s layout", len(entries), len(dispatchers), layout)
    return entries


_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@torch.enable_grad()
def _warm_selection(need: _Need, dtype: torch.dtype) -> None:
    """Compile the selection's kernels, as tokens in multiples of 16 need them."""
    device = "cuda" if on_cuda(need.group) else "cpu"
    probs = torch.zeros(16, need.num_experts, dtype=dtype, device=device, requires_grad=True)
    weights, _ = select_experts(probs, probs == 0, need.num_topk)
    weights.sum().backward()


def _dispatchers(chunks: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """The flex dispatchers of all MoE layers."""
    flex = core.module(core.TOKEN_DISPATCHER).MoEFlexTokenDispatcher
    others = set()
    found = False
    for chunk in chunks:
        for module in chunk.modules():
            # With inference-optimised layers the training dispatcher is kept beside the active one.
            for name in ("_training_token_dispatcher", "token_dispatcher"):
                dispatcher = getattr(module, name, None)
                if isinstance(dispatcher, flex):
                    found = True
                    yield dispatcher
                    break
                if dispatcher is not None:
                    others.add(type(dispatcher).__name__)
    if others and not found:
        raise MegatronError(
            "the model's token dispatcher",
            got=", ".join(sorted(others)),
            expected="MoEFlexTokenDispatcher",
            fix='Set moe_token_dispatcher_type="flex" and moe_flex_dispatcher_backend="deepep".',
        )


def _need(dispatcher: Any, layout: Layout) -> _Need:
    manager, config = dispatcher._comm_manager, dispatcher.config
    backend = getattr(config, "moe_flex_dispatcher_backend", "deepep")
    if backend != "deepep":
        raise MegatronError(
            "moe_flex_dispatcher_backend", got=repr(backend), expected='"deepep"', fix="The others are Megatron's own."
        )
    if isinstance(manager, ExpertLayoutManager) != (layout == "expert"):
        raise MegatronError(
            f"a dispatcher of this model was built without install(layout={layout!r})",
            fix="Call install() before the model is built.",
        )
    return _Need(
        group=manager.group,
        hidden=getattr(config, "moe_latent_size", None) or config.hidden_size,
        num_topk=manager.router_topk,
        num_experts=manager.num_experts,
        expert_alignment=alignment_for(config) if layout == "expert" else 1,
        num_sms=num_sms_for(config),
    )
