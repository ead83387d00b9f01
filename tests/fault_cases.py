"""Small calls, right and wrong, and what must come of a wrong one: the typed error on every rank, in time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from launch import Failure
from scene import CEILING, raised_by

from megatron_moe_v2 import fused_combine, fused_dispatch

__all__ = ["HANG", "LIMIT", "Seen", "attempt", "bad_calls", "check", "dispatch", "good_step", "inputs"]

LIMIT = 10.0
"""Seconds in which every rank must have raised."""

HANG = 16.0
"""Seconds after which a call counts as hung."""

NUM_EXPERTS = 12


def inputs(rows: int = 3, hidden: int = 8, topk: int = 2) -> dict[str, Any]:
    idx = 5 * torch.arange(rows * topk).view(rows, topk) % NUM_EXPERTS
    return {"x": torch.ones(rows, hidden), "token_indices": idx, "token_probs": torch.ones(rows, topk)}


def dispatch(arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    options = {"num_experts": NUM_EXPERTS, "group": None} | options
    return fused_dispatch(**(inputs() if arguments is None else arguments), **options)


def good_step(**options: Any) -> None:
    recv, *_, handle = dispatch(**options)
    y, _ = fused_combine(recv, None, handle)
    assert y.eq(y[:, :1]).all()
    assert y.ge(1).all()


Seen = tuple[Failure | None, float]


def attempt(action: Callable[[], Any]) -> Seen:
    start = time.monotonic()
    return raised_by(action), time.monotonic() - start


def check(outcomes: list[Seen], kind: str, *parts: str) -> None:
    """All ranks raised ``kind`` in time, and every text has all ``parts``."""
    for rank, (failure, seconds) in enumerate(outcomes):
        assert failure is not None, f"rank {rank} raised nothing"
        assert failure.isa(kind), (rank, failure.type_name, failure.text)
        for part in parts:
            assert part in failure.text, (rank, failure.text)
        assert seconds < LIMIT


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(1, 8)])  # its shape cannot be asked for


def bad_calls(bad: bool, handle: Any = None) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Error and call; the call is wrong where ``bad``."""

    def other(name: str, value: Any) -> Callable[[], Any]:
        return lambda: dispatch(inputs() | ({name: value} if bad else {}))

    idx = inputs()["token_indices"]
    calls: dict[str, tuple[str, Callable[[], Any]]] = {
        "integer x": ("InputError", other("x", torch.ones(3, 8, dtype=torch.int64))),
        "float8 x": ("InputError", other("x", torch.ones(3, 8).to(torch.float8_e4m3fn))),
        "flat x": ("InputError", other("x", torch.ones(24))),
        "no x": ("InputError", other("x", None)),
        "more rows of x": ("InputError", other("x", torch.ones(4, 8))),
        "floating indices": ("InputError", other("token_indices", idx.float())),
        "boolean indices": ("InputError", other("token_indices", idx.bool())),
        "integer weights": ("InputError", other("token_probs", idx)),
        "weights of another shape": ("InputError", other("token_probs", torch.ones(3, 1))),
        "no selections": ("InputError", lambda: dispatch(inputs(topk=0 if bad else 2))),
        "index out of range": ("InputError", other("token_indices", idx + 9)),
        "an unknown layout": ("InputError", lambda: dispatch(layout="rows" if bad else "token")),
        "alignment in the token layout": ("InputError", lambda: dispatch(expert_alignment=8 if bad else 1)),
        "alignment as a float": ("InputError", lambda: dispatch(layout="expert", expert_alignment=4.0 if bad else 4)),
        "experts as a float": ("InputError", lambda: dispatch(num_experts=12.0 if bad else 12)),
        "a nested x": ("InputError", other("x", _nested())),
        "indices of three dimensions": ("InputError", other("token_indices", idx[..., None])),
        "selections of three dimensions": (
            "InputError",
            lambda: dispatch(
                inputs() | ({"token_indices": idx[..., None], "token_probs": torch.ones(3, 2, 1)} if bad else {})
            ),
        ),
        "sparse indices": ("InputError", other("token_indices", idx.to_sparse())),
        "sparse weights": ("InputError", other("token_probs", torch.ones(3, 2).to_sparse())),
        "all on meta": (
            "InputError",
            lambda: dispatch({name: one.to("meta") for name, one in inputs().items()} if bad else None),
        ),
        "indices on another device": ("InputError", other("token_indices", idx.to("meta"))),
        "weights on another device": ("InputError", other("token_probs", torch.ones(3, 2, device="meta"))),
        "alignment 0": ("InputError", lambda: dispatch(layout="expert", expert_alignment=0 if bad else 4)),
        "a ceiling that is a list": ("InputError", lambda: dispatch(num_max_tokens_per_rank=[12] if bad else None)),
        "a ceiling as a float": ("InputError", lambda: dispatch(num_max_tokens_per_rank=12.0 if bad else 12)),
        "a flag that is a word": ("InputError", lambda: dispatch(async_finish="no" if bad else False)),
        "static shapes as a number": ("InputError", lambda: dispatch(static_shapes=1 if bad else True)),
        "no flag": ("InputError", lambda: dispatch(async_finish=None if bad else False)),
        "wait as a word": ("InputError", lambda: dispatch(wait="no" if bad else True)),
        "True experts": ("InputError", lambda: dispatch(num_experts=True if bad else 12)),
        "rows above the ceiling": ("CapacityError", lambda: dispatch(inputs(rows=CEILING + 1 if bad else 3))),
        "another layout": ("RankMismatchError", lambda: dispatch(layout="expert" if bad else "token")),
        "another alignment": ("RankMismatchError", lambda: dispatch(layout="expert", expert_alignment=8 if bad else 4)),
        "another dtype": ("RankMismatchError", other("x", torch.ones(3, 8, dtype=torch.bfloat16))),
    }
    if handle is not None:

        def combined(value: Any = None, **options: Any) -> Callable[[], Any]:
            def call() -> Any:
                rows = torch.ones(handle.num_rows, 8)
                if not bad:
                    return fused_combine(rows, None, handle)
                return fused_combine(value(rows) if value else rows, None, handle, **options)

            return call

        calls |= {
            "combine: a row more": ("HandleError", combined(lambda rows: torch.cat([rows, rows[:1]]))),
            "combine: a flag that is a word": ("InputError", combined(async_finish="no")),
            "combine: no flag": ("InputError", combined(async_finish=None)),
            "combine: wait as a word": ("InputError", combined(wait="no")),
            "combine: flat": ("HandleError", combined(lambda rows: rows.flatten())),
            "combine: integers": ("MoEError", combined(lambda rows: rows.long())),
            "combine: nothing": ("InputError", combined(lambda rows: None)),
            "combine: sparse": ("InputError", combined(lambda rows: rows.to_sparse())),
            "combine: on meta": ("InputError", combined(lambda rows: rows.to("meta"))),
            "combine: no handle": (
                "HandleError",
                lambda: fused_combine(torch.ones(handle.num_rows, 8), None, None if bad else handle),
            ),
            "combine: another hidden size": ("RankMismatchError", combined(lambda rows: rows[:, :4].contiguous())),
            "combine against dispatch": (
                "RankMismatchError",
                lambda: dispatch() if bad else fused_combine(torch.ones(handle.num_rows, 8), None, handle),
            ),
        }
    return calls
