"""``check_capacity`` exactly at each bound and one over, and what the message says."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_moe_v2 import CapacityError, InputError, check_capacity

PREFILL, DECODE = "MCORE_DEEPEP_V2_MAX_TOKENS_PER_RANK", "MCORE_DEEPEP_V2_DECODE_MAX_TOKENS_PER_RANK"
CHUNK, GRAPH, REQUESTS = "a smaller prefill chunk or micro-batch", "smaller graph batches", "fewer concurrent requests"


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFILL, "1000")
    monkeypatch.setenv(DECODE, "100")


# what fits exactly, what is one over, the rows that the message must name, the variable, the knob
BOUNDS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str, str]] = {
    "prefill": ({"prefill_rows": 1000}, {"prefill_rows": 1001}, 1001, PREFILL, CHUNK),
    "prefill, rows shared by 4": (
        {"prefill_rows": 4000, "sequence_parallel": 4},
        {"prefill_rows": 4001, "sequence_parallel": 4},
        1001,
        PREFILL,
        CHUNK,
    ),
    "one graph, width 1": ({"decode_max_batch": 100}, {"decode_max_batch": 101}, 101, DECODE, GRAPH),
    "one graph, width 4": (
        {"decode_max_batch": 25, "speculative_width": 4},
        {"decode_max_batch": 26, "speculative_width": 4},
        104,
        DECODE,
        GRAPH,
    ),
    "several graphs": ({"decode_max_batch": (1, 100, 8)}, {"decode_max_batch": [1, 101, 8]}, 101, DECODE, GRAPH),
    "requests, graphs off": ({"running_requests": 100}, {"running_requests": 101}, 101, DECODE, REQUESTS),
    "requests, no graph sizes": (
        {"running_requests": 100, "decode_max_batch": ()},
        {"running_requests": 101, "decode_max_batch": ()},
        101,
        DECODE,
        REQUESTS,
    ),
    "requests over 3 ranks, evenly": (
        {"running_requests": 300, "dp_size": 3},
        {"running_requests": 303, "dp_size": 3},
        101,
        DECODE,
        REQUESTS,
    ),
    "requests over 3 ranks, unevenly": (
        {"running_requests": 299, "dp_size": 3},
        {"running_requests": 301, "dp_size": 3},
        101,
        DECODE,
        REQUESTS,
    ),
    "requests over 3 ranks, width 4": (
        {"running_requests": 75, "dp_size": 3, "speculative_width": 4},
        {"running_requests": 76, "dp_size": 3, "speculative_width": 4},
        104,
        DECODE,
        REQUESTS,
    ),
    "ceilings as arguments": (
        {"prefill_rows": 10, "max_tokens_per_rank": 10, "decode_max_batch": 7, "decode_max_tokens_per_rank": 7},
        {"prefill_rows": 10, "max_tokens_per_rank": 10, "decode_max_batch": 8, "decode_max_tokens_per_rank": 7},
        8,
        DECODE,
        GRAPH,
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_holds_exactly(name: str) -> None:
    fits, over, rows, variable, knob = BOUNDS[name]
    check_capacity(**fits)
    with pytest.raises(CapacityError) as raised:
        check_capacity(**over)
    first, *lines = str(raised.value).splitlines()
    assert first == "the rollout does not fit"
    assert len(lines) == 1
    ceiling = 1000 if variable == PREFILL else over.get("decode_max_tokens_per_rank", 100)
    assert f": {rows} rows a rank, ceiling {ceiling}: set {variable} to at least {rows}, or use {knob}" in lines[0]


def test_every_bound_exceeded_is_listed() -> None:
    with pytest.raises(CapacityError) as raised:
        check_capacity(prefill_rows=1001, decode_max_batch=(64, 128), running_requests=1000, dp_size=3)
    _, *lines = str(raised.value).splitlines()
    wanted = [("1001 rows", PREFILL, CHUNK), ("128 rows", DECODE, GRAPH), ("334 rows", DECODE, REQUESTS)]
    assert len(lines) == len(wanted)
    for line, parts in zip(lines, wanted, strict=True):
        assert all(part in line for part in parts), line


def test_nothing_asked_fits() -> None:
    check_capacity()


def test_the_default_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PREFILL)
    monkeypatch.delenv(DECODE)
    check_capacity(prefill_rows=8192, decode_max_batch=128)
    with pytest.raises(CapacityError, match=r"8193 rows(.|\n)*129 rows"):
        check_capacity(prefill_rows=8193, decode_max_batch=129)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill_rows": -1},
        {"decode_max_batch": -1},
        {"decode_max_batch": [8, -1]},
        {"running_requests": 1.5},
        {"dp_size": 0},
        {"speculative_width": 0},
        {"sequence_parallel": 0},
    ],
    ids=str,
)
def test_numbers_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        check_capacity(**wrong)
