"""AdamW, in the fastest form this machine has: Transformer Engine's, NVIDIA apex's, or PyTorch's fused one.

All three keep ``exp_avg`` and ``exp_avg_sq`` per parameter, which is what checkpoints rely on.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

BETAS = (0.9, 0.95)

# PyPI's "apex" is another project: only NVIDIA's has apex.optimizers.FusedAdam.
FOREIGN = (
    ("Transformer Engine FusedAdam", "transformer_engine.pytorch.optimizers"),
    ("NVIDIA apex FusedAdam", "apex.optimizers"),
)


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float, device: torch.device
) -> tuple[torch.optim.Optimizer, str]:
    """AdamW with weight decay on matrices only.

    Returns:
        The optimizer, and a line that says which it is and why the ones before it were not taken.
    """
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if device.type != "cuda":
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)
        return optimizer, "torch.optim.AdamW(fused=True) (Transformer Engine and apex need CUDA)"
    reasons = []
    for label, module in FOREIGN:
        try:
            fused_adam = importlib.import_module(module).FusedAdam
            return fused_adam(groups, lr=lr, betas=BETAS, adam_w_mode=True), label
        # A broken installation may raise anything at import or construction; its text goes into the line printed.
        except Exception as error:
            reasons.append(f"{label}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)
    return optimizer, f"torch.optim.AdamW(fused=True) ({'; '.join(reasons)})"


def learning_rate(step: int, *, peak: float, warmup: int, steps: int, floor: float = 0.1) -> float:
    """Linear warm-up over ``warmup`` steps, then a cosine to ``floor * peak`` at ``steps``; ``step`` is from 1."""
    if step <= warmup:
        return peak * step / max(warmup, 1)
    progress = min(1.0, (step - warmup) / max(steps - warmup, 1))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer create its state without moving any parameter, so that a checkpoint can be read into it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the number of steps taken, kept per parameter (PyTorch) or per group (Transformer Engine, apex)."""
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = torch.full_like(group["step"], step) if torch.is_tensor(group["step"]) else step
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)
