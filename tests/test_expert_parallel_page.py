"""The code of ``docs/expert_parallel.md``, run: gradients and norms under DDP and FSDP2 against one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import RankPool
from torch import Tensor

PAGE = Path(__file__).resolve().parent.parent / "docs" / "expert_parallel.md"
HIDDEN, FFN, EXPERTS, TOP_K = 8, 12, 4, 2
ROWS = {"even": (6, 6), "ragged": (9, 3), "one rank empty": (12, 0)}


def page() -> dict[str, Any]:
    """The names that the page's Python blocks define, in order of appearance."""
    names: dict[str, Any] = {"__name__": "expert_parallel_page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names


def build(names: dict[str, Any], group: Any = None) -> torch.nn.Sequential:
    """A model with the same weights at any rank count."""
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), names["MoE"](HIDDEN, FFN, EXPERTS, TOP_K, group))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = (EXPERTS, *parameter.shape[1:]) if "experts" in name else parameter.shape
            weight = torch.randn(whole, generator=generator) * 0.3
            if "experts" in name:
                first = model[1].dispatcher.group.rank() * parameter.shape[0]
                weight = weight[first : first + parameter.shape[0]]
            parameter.copy_(weight)
    return model


def gradients(rank: int, world: int, wrapper: str, rows: tuple[int, ...]) -> tuple[dict[Any, Tensor], float]:
    """Gradients by name (experts: by name and global number) and the norm before clipping to 1000."""
    names = page()
    mesh = names["make_mesh"]("cpu", 1 if wrapper == "replicated experts" else world)
    model = build(names, mesh["expert"])
    generator = torch.Generator().manual_seed(11)
    data = torch.randn(2, sum(rows), HIDDEN, generator=generator)
    start = sum(rows[:rank]) if world > 1 else 0
    x, target = data[:, start : start + rows[rank]] if world > 1 else data
    expert_names = set(names["expert_names"](model))
    wrapped = names["wrap_fsdp2"](model) if wrapper == "fsdp2" else names["wrap_ddp"](model)
    names["local_objective"](wrapped(x), target).backward()
    if wrapper == "replicated experts":
        names["sum_expert_gradients"](model, expert_names, mesh)
        norm = torch.tensor(0.0)
    else:
        norm = names["clip"](model, expert_names, 1000.0)
    found: dict[Any, Tensor] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if name not in expert_names:
            found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
            continue
        first = model[1].dispatcher.group.rank() * parameter.shape[0]
        found |= {(name, first + local): part.clone() for local, part in enumerate(grad.unbind(0))}
    dist.barrier()
    return found, float(norm)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "replicated experts"])
def test_gradients_are_those_of_one_process(
    wrapper: str, rows: tuple[int, ...], ranks1: RankPool, ranks2: RankPool
) -> None:
    ((expected, expected_norm),) = ranks1.run(gradients, "ddp", rows)
    for found, norm in ranks2.run(gradients, wrapper, rows):
        assert found
        for key, grad in found.items():
            torch.testing.assert_close(grad, expected[key], msg=lambda text, key=key: f"{key}: {text}")
        if wrapper != "replicated experts":
            assert norm == pytest.approx(expected_norm, rel=1e-5)
