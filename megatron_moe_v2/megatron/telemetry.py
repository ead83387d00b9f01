"""Tokens per expert in Megatron's own MoE metrics tracker (``moe_logging``, in megatron-core 0.19)."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch

from ..telemetry import in_backward
from . import core

__all__ = ["METRICS", "count_tokens"]

logger = logging.getLogger(__name__)

METRICS = ("max_tokens_per_expert", "mean_tokens_per_expert")
"""Names in the tracker. Each is a sum over the micro-batches of a step, as Megatron's own; ranks are averaged."""

_TRACKER = "megatron.core.transformer.moe.moe_logging"


def count_tokens(model: torch.nn.Module) -> int:
    """Record both metrics after each forward of each MoE layer in training mode; how many layers that is.

    A recomputation is left out, under every kind of checkpointing. Megatron's fine-grained overlap calls the parts of a
    layer itself, so nothing is recorded there. A second call adds nothing.
    """
    if importlib.util.find_spec(_TRACKER) is None:
        logger.info("megatron-core %s has no MoE metrics tracker", core.version())
        return 0
    layers = [one for one in model.modules() if hasattr(getattr(one, "token_dispatcher", None), "_comm_manager")]
    for layer in layers:
        if _record not in layer._forward_hooks.values():
            layer.register_forward_hook(_record)
    return len(layers)


def _record(layer: Any, _inputs: Any, _outputs: Any) -> None:
    counts = getattr(layer.token_dispatcher._comm_manager, "tokens_per_expert", None)
    if not layer.training or counts is None or in_backward():
        return
    tracker = core.module(_TRACKER).get_moe_metrics_tracker()
    device = next(layer.parameters()).device
    num_layers = layer.config.num_layers + (getattr(layer.config, "mtp_num_layers", None) or 0)
    for name, value in zip(METRICS, (counts.max(), counts.float().mean()), strict=True):
        tracker.record(name, value.float().to(device), layer.layer_number, num_layers)
