"""Checkpoints that any number of ranks can read.

A checkpoint is a directory of :mod:`torch.distributed.checkpoint`. A replicated tensor is stored once under its name;
a stacked expert tensor is stored expert by expert under the expert's *global* number, so the ranks that read it may
own other experts than those that wrote it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_model import Experts, MoELanguageModel
from optimizers import create_state, set_step
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
DESCRIPTION = "description.json"


def entries(model: MoELanguageModel, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Name → tensor of all this rank holds; the tensors share memory with the model and the optimizer, if given."""
    owners = {
        f"{name}.{short}": module
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for short, _ in module.named_parameters()
    }
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        kinds = {"model": parameter.detach()}
        if optimizer is not None:
            kinds |= {f"optimizer.{moment}": optimizer.state[parameter][moment] for moment in MOMENTS}
        for kind, tensor in kinds.items():
            if name not in owners:
                found[f"{kind}.{name}"] = tensor
                continue
            for local, part in enumerate(tensor.unbind(0)):
                found[f"{kind}.{name}.expert_{owners[name].first + local}"] = part
    return found


def save(
    out: Path,
    step: int,
    model: MoELanguageModel,
    optimizer: torch.optim.Optimizer,
    description: dict[str, Any],
    keep: int,
) -> Path:
    """Write ``out/step_NNNNNNN`` and remove all but the newest ``keep`` checkpoints. Collective over the group.

    Args:
        description: JSON values; the next :func:`load` refuses another ``description["model"]``.
    """
    path = out / f"step_{step:07d}"
    if dist.get_rank() == 0:  # an earlier run's; the ranks plan together before any of them writes data
        shutil.rmtree(path, ignore_errors=True)
    state: dict[str, Any] = entries(model, optimizer)
    state["progress.step"] = torch.tensor(step)
    write_tensors(state, checkpoint_id=path)
    if dist.get_rank() == 0:
        (path / DESCRIPTION).write_text(json.dumps(description, indent=1))
        for old in complete(out)[:-keep]:
            shutil.rmtree(old)
    return path


def complete(out: Path) -> list[Path]:
    """The finished checkpoints below ``out``, oldest first; an interrupted one lacks its last file and is left out."""
    files = sorted(out.glob(f"step_*/{DESCRIPTION}"), key=lambda file: file.stat().st_mtime_ns)
    return [file.parent for file in files]


def load(
    path: Path, model: MoELanguageModel, optimizer: torch.optim.Optimizer, description: dict[str, Any]
) -> tuple[int, list[str]]:
    """Read a checkpoint written by any number of ranks. Collective over the group.

    Returns:
        The number of steps taken, and lines on what differs from the run that wrote it.

    Raises:
        ValueError: the checkpoint is of a model of another shape.
    """
    written = json.loads((path / DESCRIPTION).read_text())
    if written["model"] != description["model"]:
        raise ValueError(f"--resume {path}: got a model {description['model']}, expected {written['model']}")
    notes = [
        f"{key} was {written.get(key)}, is {value}"
        for key, value in description.items()
        if key != "model" and written.get(key) != value
    ]
    create_state(optimizer)
    state: dict[str, Any] = entries(model, optimizer)
    state["progress.step"] = torch.tensor(0)
    read_tensors(state, checkpoint_id=path)
    step = int(state["progress.step"])
    set_step(optimizer, step)
    return step, notes


def load_model(path: Path, model: MoELanguageModel) -> None:
    """Read the weights alone. Collective over the group."""
    state: dict[str, Any] = entries(model)
    read_tensors(state, checkpoint_id=path)
