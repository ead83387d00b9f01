"""Bad calls on the embedded buffer: the typed error on every rank, whoever made the mistake, then all as before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from embedded_inputs import CEILING
from launch import Failure, Launch, RankPool

Arguments = dict[str, Any]
Fault = Callable[[Arguments], Arguments]

TOKENS, HIDDEN, TOPK = 5, 8, 2


def _matrix(rows: int = TOKENS, columns: int = TOPK, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=dtype)


def _scaled(scales: torch.Tensor) -> Fault:
    return lambda a: a | {"x": (a["x"], scales)}


def _with(**changes: Any) -> Fault:
    return lambda arguments: arguments | changes


def _cached(**changes: Any) -> Fault:
    """Arguments of a good cached dispatch, then the mistake."""
    good = ("topk_idx", "topk_weights", "num_experts")
    return lambda a: {k: v for k, v in a.items() if k not in good} | {"handle": a["previous"]} | changes


# What is wrong: the error's type, and how good arguments become bad ones.
DISPATCH: dict[str, tuple[str, Fault]] = {
    "x is no tensor": ("InputError", _with(x=[1.0])),
    "x is None": ("InputError", _with(x=None)),
    "x has one dimension": ("InputError", _with(x=torch.zeros(TOKENS))),
    "x is not contiguous": ("InputError", _with(x=torch.zeros(HIDDEN, TOKENS).t())),
    "x is a tuple of three": ("InputError", _with(x=(torch.zeros(TOKENS, HIDDEN),) * 3)),
    "scales are no tensor": ("InputError", _scaled(None)),  # type: ignore[arg-type]
    "scales have one dimension": ("InputError", _scaled(torch.ones(TOKENS))),
    "scales of another row count": ("InputError", _scaled(_matrix(TOKENS + 1))),
    "scales of two bytes": ("InputError", _scaled(_matrix(dtype=torch.bfloat16))),
    "no indices": ("InputError", _with(topk_idx=None)),
    "int32 indices": ("InputError", _with(topk_idx=_matrix(dtype=torch.int32))),
    "indices of another row count": ("InputError", _with(topk_idx=_matrix(TOKENS - 1, dtype=torch.int64))),
    "indices of one dimension": ("InputError", _with(topk_idx=torch.zeros(TOKENS, dtype=torch.int64))),
    "indices not contiguous": ("InputError", _with(topk_idx=torch.zeros(TOPK, TOKENS, dtype=torch.int64).t())),
    "weights of one dimension": ("InputError", _with(topk_weights=torch.ones(TOKENS))),
    "weights of another row count": ("InputError", _with(topk_weights=_matrix(TOKENS + 1))),
    "weights of another top-k": ("InputError", _with(topk_weights=_matrix(TOKENS, TOPK + 1))),
    "bf16 weights": ("InputError", _with(topk_weights=_matrix(dtype=torch.bfloat16))),
    "weights not contiguous": ("InputError", _with(topk_weights=_matrix(TOPK, TOKENS).t())),
    "statistics of another length": (
        "InputError",
        _with(cumulative_local_expert_recv_stats=torch.zeros(3, dtype=torch.int32)),
    ),
    "int64 statistics": ("InputError", _with(cumulative_local_expert_recv_stats=torch.zeros(2, dtype=torch.int64))),
    "statistics not contiguous": (
        "InputError",
        _with(cumulative_local_expert_recv_stats=torch.zeros(4, dtype=torch.int32)[::2]),
    ),
    "an expert too many": ("InputError", lambda a: a | {"topk_idx": a["topk_idx"] + a["num_experts"]}),
    "no expert count": ("InputError", _with(num_experts=None)),
    "experts do not divide": ("InputError", lambda a: a | {"num_experts": a["num_experts"] + 0.5}),
    "zero experts": ("InputError", _with(num_experts=0)),
    "alignment 0": ("InputError", _with(expert_alignment=0)),
    "more rows than the ceiling": ("CapacityError", _with(num_max_tokens_per_rank=TOKENS - 1)),
    "ceiling beyond the buffer": ("LimitError", _with(num_max_tokens_per_rank=2**20)),
    "zero padding of the token layout": ("InputError", _with(do_zero_padding=True)),
    "more queue pairs than allocated": ("InputError", _with(num_qps=18)),
    "negative SM count": ("InputError", _with(num_sms=-1)),
    "event without the comm stream": ("InputError", lambda a: a | {"previous_event": a["buffer"].capture()}),
    "event of the wrong class": ("InputError", _with(previous_event="now", allocate_on_comm_stream=True)),
    "handle beside indices": ("HandleError", lambda a: a | {"handle": a["previous"]}),
    "handle and CPU sync": ("HandleError", _cached(do_cpu_sync=True)),
    "handle and statistics": (
        "HandleError",
        _cached(cumulative_local_expert_recv_stats=torch.zeros(2, dtype=torch.int32)),
    ),
    "handle of other experts": ("HandleError", _cached(num_experts=64)),
    "handle of another alignment": ("HandleError", _cached(expert_alignment=2)),
    "handle of another ceiling": ("HandleError", _cached(num_max_tokens_per_rank=CEILING + 1)),
    "handle of another row count": ("HandleError", _cached(x=torch.zeros(TOKENS - 1, HIDDEN))),
    "handle of the other layout": ("HandleError", _cached(do_expand=True)),
    "handle of another buffer": ("HandleError", lambda a: _cached(handle=a["foreign"])(a)),
    "handle is no handle": ("HandleError", _cached(handle="handle")),
    "cached weights of another shape": ("InputError", _cached(topk_weights=_matrix(TOKENS, TOPK + 1))),
}

COMBINE: dict[str, tuple[str, Fault]] = {
    "x is None": ("InputError", _with(x=None)),
    "x has one dimension": ("InputError", lambda a: a | {"x": a["x"][:, 0]}),
    "x is not contiguous": ("InputError", lambda a: a | {"x": a["x"].repeat_interleave(2, dim=1)[:, ::2]}),
    "integer x": ("InputError", lambda a: a | {"x": a["x"].int()}),
    "one row too many": ("HandleError", lambda a: a | {"x": torch.cat([a["x"], a["x"][:1]])}),
    "one row too few": ("HandleError", lambda a: a | {"x": a["x"][:-1]}),
    "no handle": ("HandleError", _with(handle=None)),
    "handle of another buffer": ("HandleError", lambda a: a | {"handle": a["foreign"]}),
    "weights of one dimension": ("InputError", lambda a: a | {"topk_weights": torch.ones(len(a["x"]))}),
    "weights of another top-k": ("InputError", lambda a: a | {"topk_weights": _matrix(len(a["x"]), TOPK + 1)}),
    "bf16 weights": ("InputError", lambda a: a | {"topk_weights": _matrix(len(a["x"]), dtype=torch.bfloat16)}),
    "bias of another row count": ("InputError", _with(bias=_matrix(TOKENS - 1, HIDDEN))),
    "bias of another width": ("InputError", _with(bias=_matrix(TOKENS, HIDDEN + 1))),
    "bias of another dtype": ("InputError", _with(bias=_matrix(TOKENS, HIDDEN, torch.bfloat16))),
    "bias not contiguous": ("InputError", _with(bias=_matrix(HIDDEN, TOKENS).t())),
    "three biases": ("InputError", _with(bias=(_matrix(TOKENS, HIDDEN),) * 3)),
    "bias is no tensor": ("InputError", _with(bias=1.0)),
    "more queue pairs than allocated": ("InputError", _with(num_qps=18)),
    "event without the comm stream": ("InputError", lambda a: a | {"previous_event": a["buffer"].capture()}),
}

COMBINE_EXPERTS: dict[str, tuple[str, Fault]] = {
    "fewer rows than slots": ("HandleError", lambda a: a | {"x": a["x"][:-1]}),
    "weights of two dimensions": ("InputError", lambda a: a | {"topk_weights": _matrix(len(a["x"]))}),
    "weights of another length": ("InputError", lambda a: a | {"topk_weights": torch.ones(len(a["x"]) + 1)}),
}

COMBINE_UNREDUCED: dict[str, tuple[str, Fault]] = {
    "weights without multiple reduction": ("LimitError", lambda a: a | {"topk_weights": torch.ones(len(a["x"]))}),
}

KINDS = {
    "dispatch": DISPATCH,
    "combine": COMBINE,
    "combine of experts": COMBINE_EXPERTS,
    "combine of experts, unreduced": COMBINE_UNREDUCED,
}


def _attempt(call: Callable[..., Any], arguments: Arguments) -> Failure | None:
    named = {name: value for name, value in arguments.items() if name not in ("buffer", "previous", "foreign")}
    try:
        call(**named)
    except Exception as error:
        return Failure.of(error)
    return None


def make_mistakes(rank: int, world: int, kind: str, bad: list[int]) -> dict[str, Failure | None]:
    """Each mistake of a table, made on the ranks ``bad`` while the others call correctly; what was raised here."""
    from embedded_cases import buffer_of

    options: Arguments = {"allow_hybrid_mode": False, "allow_multiple_reduction": "unreduced" not in kind}
    buffer, other = buffer_of(**options), buffer_of(**options)
    tokens: Arguments = {
        "x": torch.ones(TOKENS, HIDDEN),
        "topk_idx": torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % (2 * world),
        "topk_weights": _matrix(),
        "num_experts": 2 * world,
        "do_expand": "experts" in kind,
    }
    recv, _, _, handle, _ = buffer.dispatch(**tokens)
    good = tokens if kind == "dispatch" else {"x": recv, "handle": handle}
    good = good | {"buffer": buffer, "previous": handle, "foreign": other.dispatch(**tokens)[3]}
    call = buffer.dispatch if kind == "dispatch" else buffer.combine
    raised: dict[str, Failure | None] = {}
    for name, (_, spoil) in KINDS[kind].items():
        raised[name] = _attempt(call, spoil(good) if rank in bad else good)
        back = buffer.combine(buffer.dispatch(**tokens)[0], handle)[0]
        assert bool((back >= 1).all()), f"after '{name}' the buffer no longer works"
    return raised


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_on_every_rank(ranks: RankPool, kind: str) -> None:
    for raised in ranks.run(make_mistakes, kind, list(range(ranks.world))):
        assert {name: failure and failure.type_name for name, failure in raised.items()} == {
            name: expected for name, (expected, _) in KINDS[kind].items()
        }
        for failure in raised.values():
            assert failure is not None
            assert failure.isa("MoEError")
            assert failure.isa(ValueError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_on_one_rank_is_raised_on_all(ranks2: RankPool, kind: str) -> None:
    innocent, guilty = ranks2.run(make_mistakes, kind, [1])
    for name, (expected, _) in KINDS[kind].items():
        own, told = guilty[name], innocent[name]
        assert own is not None, name
        assert told is not None, name
        assert (own.type_name, told.type_name) == (expected, expected), name
        assert "on rank 1" in told.text, name
        assert "on rank" not in own.text, name


# Arguments that are right by themselves and differ between ranks.

DIFFERENCES: dict[str, Fault] = {
    "hidden": _with(x=torch.ones(TOKENS, HIDDEN + 1)),
    "dtype": lambda a: a | {"x": a["x"].bfloat16()},
    "top-k": lambda a: a | {"topk_idx": a["topk_idx"][:, :1].contiguous(), "topk_weights": None},
    "weights": _with(topk_weights=None),
    "scales": _scaled(_matrix()),
    "experts": lambda a: a | {"num_experts": 2 * a["num_experts"]},
    "ceiling": _with(num_max_tokens_per_rank=CEILING - 1),
    "layout": _with(do_expand=True),
    "alignment": _with(expert_alignment=4),
    "cached": _cached(),
}


def differ(rank: int, world: int) -> dict[str, Failure | None]:
    """Each difference between rank 1 and the others; what was raised here."""
    from embedded_cases import buffer_of

    buffer = buffer_of()
    good: Arguments = {
        "x": torch.ones(TOKENS, HIDDEN),
        "topk_idx": torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % (2 * world),
        "topk_weights": _matrix(),
        "num_experts": 2 * world,
    }
    handle = buffer.dispatch(**good)[3]
    raised = {}
    for name, change in DIFFERENCES.items():
        arguments = change(good | {"previous": handle}) if rank == 1 else good
        raised[name] = _attempt(buffer.dispatch, arguments)
        assert buffer.dispatch(**good)[0].shape[1] == HIDDEN
    rows = {"x": torch.ones(handle.num_recv_tokens, HIDDEN), "handle": handle}
    raised["operation"] = _attempt(*((buffer.combine, rows) if rank == 1 else (buffer.dispatch, good)))
    return raised


def test_ranks_that_differ_all_learn_who_has_what(ranks2: RankPool) -> None:
    for raised in ranks2.run(differ):
        assert {name: failure and failure.type_name for name, failure in raised.items()} == dict.fromkeys(
            [*DIFFERENCES, "operation"], "RankMismatchError"
        )
        for failure in raised.values():
            assert failure is not None
            assert "rank 0" in failure.text
            assert "rank 1" in failure.text


CONSTRUCTORS: dict[str, Arguments] = {
    "zero bytes": {"num_bytes": 0},
    "negative bytes": {"num_bytes": -(2**21)},
    "bytes not in granules": {"num_bytes": 2**21 + 1},
    "no ceiling": {"num_max_tokens_per_rank": 0},
    "no hidden": {"hidden": 0},
}


def construct_badly(rank: int, world: int) -> dict[str, Failure | None]:
    from embedded_cases import buffer_of

    return {name: _attempt(buffer_of, options) for name, options in CONSTRUCTORS.items()}


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_a_buffer_without_a_size_is_refused(ranks: RankPool) -> None:
    for raised in ranks.run(construct_badly):
        for name, failure in raised.items():
            assert failure is not None, name
            assert failure.isa("MoEError"), name
            assert failure.isa(ValueError), name


def lose_a_peer(rank: int, world: int, operation: str) -> None:
    """Rank 1 is killed before the operation, rank 0 goes into it."""
    from embedded_cases import buffer_of

    buffer = buffer_of()
    tokens: Arguments = {"x": torch.ones(2, 8), "topk_idx": torch.tensor([[0], [1]]), "num_experts": 2}
    recv, *_, handle, _ = buffer.dispatch(**tokens)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if operation == "dispatch":
        buffer.dispatch(**tokens)
    else:
        buffer.combine(recv, handle)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_killed_peer_is_a_communication_error(operation: str) -> None:
    survivor, killed = Launch.fresh(2, lose_a_peer, operation, timeout=20)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.failure is not None
    assert survivor.failure.type_name == "CommunicationError"
    assert operation in survivor.failure.text
    assert survivor.seconds < 10
