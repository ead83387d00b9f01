"""Models of Megatron MoE layers, prepared, refused and counted; functions for the ranks of a test."""

from __future__ import annotations

import importlib
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from megatron_cases import Case, build_layer, inputs, installed, megatron
from scene import buffers, raised_by
from torch import Tensor


def text_of(action: Callable[[], Any]) -> str | None:
    """The message that ``action`` ends in; None if it returns."""
    failure = raised_by(action)
    return None if failure is None else f"{failure.type_name}: {failure.text}"


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """What a logger says, as texts."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def layouts_of_dispatchers(rank: int, world: int) -> dict[str, str | None]:
    """What ``install`` and ``uninstall`` say while a dispatcher of the other layout exists, and when it is gone."""
    from megatron_moe_v2.megatron import install, uninstall

    megatron()
    said: dict[str, str | None] = {}
    for layout, other in (("token", "expert"), ("expert", "token")):
        with installed(layout):
            layer = build_layer(Case(), "flex")
            said[other] = text_of(lambda other=other: install(other))  # type: ignore[misc]
            del layer
    install("token")
    layer = build_layer(Case(), "flex")
    with logged("megatron_moe_v2.megatron.patch") as records:
        uninstall()
    said["uninstall"] = " ".join(records)
    install("token")
    with buffers(MAX_TOKENS_PER_RANK=Case().ceiling()):
        said["again"] = text_of(lambda: layer(inputs(Case(), 0)[0]))
    uninstall()
    return said


class Chunk(torch.nn.Module):
    """A piece of a model: MoE layers one after the other."""

    def __init__(self, cases: Sequence[Case], dispatcher: str = "flex") -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(build_layer(case, dispatcher) for case in cases)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def prepared(rank: int, world: int, layout: str) -> dict[str, Any]:
    """``prepare`` on a model of two chunks, of three layers of which two are alike, and then a step."""
    from megatron_moe_v2.megatron import prepare
    from megatron_moe_v2.pool import pool

    megatron()
    case = Case()
    other = Case(config={"moe_router_topk": 1, "moe_router_pre_softmax": True})
    with installed(layout, max_tokens_per_rank=case.ceiling()), buffers():
        chunks = [Chunk([case, other]), Chunk([case])]
        started = pool.constructions
        entries = prepare(chunks)
        constructions = pool.constructions - started
        built = pool.constructions
        x, _ = inputs(case, 0)
        for chunk in chunks:
            chunk(x).sum().backward()
        in_step, again = pool.constructions - built, prepare(chunks) == entries
        prepare(chunks, max_tokens_per_rank=2 * case.ceiling())
        for chunk in chunks:
            chunk(torch.cat([x, x]))  # more than the first ceiling
        return {
            "constructions": constructions,
            "in step 0": in_step,
            "specs": [(entry.spec.num_topk, entry.spec.num_max_tokens_per_rank) for entry in entries],
            "the same again": again,
            "with another ceiling": pool.constructions - built,
        }


def refused(rank: int, world: int) -> dict[str, str | None]:
    """What ``prepare`` says to models that cannot run on this package."""
    from megatron_moe_v2.megatron import install, prepare, uninstall

    megatron()
    said = {"without install": text_of(lambda: prepare(torch.nn.Linear(2, 2)))}
    install()
    said["alltoall"] = text_of(lambda: prepare(Chunk([Case()], "alltoall")))
    said["nothing to prepare"] = text_of(lambda: prepare(torch.nn.Linear(2, 2)))
    with buffers(MAX_TOKENS_PER_RANK=None):
        said["one of two"] = text_of(lambda: prepare(Chunk([Case()]), seq_length=8))
        said["sequences"] = text_of(lambda: prepare(Chunk([Case()]), seq_length=8 + rank, micro_batch_size=2))
    other = Chunk([Case()])
    other.layers[0].token_dispatcher.config.moe_flex_dispatcher_backend = "hybridep"
    said["another backend"] = text_of(lambda: prepare(other))
    uninstall()
    return said


def counted(rank: int, world: int, layout: str) -> dict[str, Any]:
    """Tokens per expert in Megatron's tracker: a step of each kind of checkpointing, and an evaluation."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    from megatron_moe_v2.megatron import prepare

    megatron()
    case = Case(only_experts=(0, 1))
    destroy_moe_metrics_tracker()
    with installed(layout, max_tokens_per_rank=case.ceiling()), buffers():
        model = Chunk([case]).train()
        prepare(model, metrics=True)
        prepare(model, metrics=True)
        x, _ = inputs(case, 0)
        for reentrant in (False, True):
            with set_checkpoint_early_stop(False):  # recompute the layer to its end, where its hook is called
                y = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
            y.sum().backward()
        model.eval()(x)
        metrics = {name: entry.values.tolist() for name, entry in get_moe_metrics_tracker().metrics.items()}
    destroy_moe_metrics_tracker()
    return metrics


def sm_counts(rank: int, world: int, layout: str, config: dict[str, Any]) -> list[int]:
    """What a buffer was asked for: built by ``prepare``, and by the first dispatch."""
    from megatron_moe_v2 import set_deepep_num_sms
    from megatron_moe_v2.megatron import prepare
    from megatron_moe_v2.pool import pool

    megatron()
    case = Case(config=config)
    counts = []
    with installed(layout, max_tokens_per_rank=case.ceiling()):
        for first in (lambda model: prepare(model), lambda model: model(inputs(case, 0)[0])):
            set_deepep_num_sms(0)
            with buffers():
                model = Chunk([case])
                first(model)
                counts += {entry.wished_num_sms for entry in pool._entries.values()}
    set_deepep_num_sms(0)
    return counts


def _global_vars() -> Any:
    """Megatron's ``megatron.training.global_vars``; the package around it needs Python 3.12 and its GPU libraries."""
    if "megatron.training" not in sys.modules:
        import megatron.core

        package = ModuleType("megatron.training")
        package.__path__ = [str(Path(megatron.core.__file__).parents[1] / "training")]
        sys.modules["megatron.training"] = package
    return importlib.import_module("megatron.training.global_vars")


def from_arguments(rank: int, world: int) -> tuple[list[str], list[int]]:
    """What two layers log, and the ceilings of their buffers, with Megatron's arguments in place."""
    from megatron_moe_v2.pool import pool

    megatron()
    case, global_vars = Case(), _global_vars()
    kept = global_vars._GLOBAL_ARGS
    global_vars._GLOBAL_ARGS = Namespace(seq_length=case.seq_length, micro_batch_size=case.micro_batch_size)
    try:
        with (
            installed("token"),
            buffers(MAX_TOKENS_PER_RANK=None),
            logged("megatron_moe_v2.megatron.ceiling") as records,
        ):
            Chunk([case, case])(inputs(case, 0)[0])
            return records, [entry.spec.num_max_tokens_per_rank for entry in pool._entries.values()]
    finally:
        global_vars._GLOBAL_ARGS = kept
