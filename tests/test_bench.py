"""``megatron-moe-v2 bench``: its command, its baseline, its oracle and its counters."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import RankPool
from scene import buffers
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from megatron_moe_v2 import FlexTokenDispatcher, close_buffers, fused_dispatch
from megatron_moe_v2.cli import bench, local_ranks, tables
from megatron_moe_v2.cli.measure import LAYOUTS, PHASES, PLAIN, PLAIN_KEPT, Measurement, subjects
from megatron_moe_v2.cli.plain_alltoall import PlainDispatcher
from megatron_moe_v2.cli.traffic import Clock, counted
from megatron_moe_v2.cli.verify import Oracle, make_inputs

SIZES = ["--tokens", "64", "--hidden", "64", "--experts", "8", "--topk", "2", "--iters", "3", "--warmup", "1"]
SUBJECTS = {*LAYOUTS, PLAIN, PLAIN_KEPT}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def check_results(found: list[dict[str, Any]], phases: set[str], iterations: int) -> None:
    assert {(one["dispatcher"], one["phase"]) for one in found} == {
        (name, phase) for name in SUBJECTS for phase in phases
    }
    for one in found:
        assert 0 < one["p10_us"] <= one["p50_us"] <= one["p90_us"]
        assert one["logical_gb_per_s"] > 0
        assert one["wrong_values"] == 0
        assert one["iterations"] == iterations


def test_command_with_two_ranks_of_its_own(no_launcher: None) -> None:
    command = [sys.executable, "-m", "megatron_moe_v2", "bench", "--ranks", "2", *SIZES, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    header, *found = [json.loads(line) for line in done.stdout.splitlines()]
    assert header["record"] == "header"
    assert header["ranks"] == 2
    assert "EmbeddedElasticBuffer" in header["buffer"]
    assert {one["record"] for one in found} == {"result"}
    check_results(found, set(PHASES), 3)
    for one in found:
        assert 0 < one["communication_share"] <= 1
        if one["dispatcher"] == PLAIN:
            assert one["time_to_plain"] == one["bytes_to_plain"] == 1
        elif one["dispatcher"] == PLAIN_KEPT:
            assert one["bytes_to_plain"] == 1
        else:
            assert 0 < one["bytes_to_plain"] < 1
    for text in ("megatron-moe-v2", header["torch"], "memory allocator", "logical", "forward+backward", "token-bare"):
        assert text in done.stderr


def job_bench(rank: int, world: int, target: str) -> str:
    """The whole command inside a rank that has its group already; what it printed."""
    printed = io.StringIO()
    arguments = bench._parse([*SIZES, "--dtype", "fp32", "--sweep-tokens", "16,128", "--json", target])
    with contextlib.redirect_stdout(printed):
        bench._rank(torch.device("cpu"), arguments)
    return printed.getvalue()


def test_one_rank_sends_nothing_and_sweeps(ranks1: RankPool, tmp_path: Path) -> None:
    (printed,) = ranks1.run(job_bench, str(tmp_path / "lines"))
    header, *found = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert header["arguments"]["dtype"] == "fp32"
    check_results([one for one in found if one["record"] == "result"], set(PHASES), 3)
    for size in (16, 128):
        swept = [one for one in found if one["record"] == "sweep" and one["tokens"] == size]
        check_results(swept, {"forward+backward"}, 3)
    assert {one["sent_bytes_per_rank"] for one in found} == {0}
    assert {one["bytes_to_plain"] for one in found} == {None}
    assert "token µs/token" in printed


def forward_backward(dispatcher: Any, inputs: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    """Rows, weights, sums and both gradients, with experts that scale each row by its routing weight."""
    x, topk_idx, weights, grad = (one.clone() for one in inputs)
    x.requires_grad_()
    weights.requires_grad_()
    dispatched = dispatcher.dispatch(x, topk_idx, weights)
    combined = dispatcher.combine(dispatched.tokens * dispatched.weights[:, None], dispatched, **options)
    (combined * grad).sum().add(dispatched.weights.square().sum()).backward()
    assert x.grad is not None
    assert weights.grad is not None
    return dispatched.tokens.detach(), dispatched.weights.detach(), combined.detach(), x.grad, weights.grad


def job_compare(rank: int, world: int) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    topk_idx = torch.rand(48, 8, generator=generator).topk(3, dim=1).indices
    x, grad = (torch.randn(48, 32, generator=generator) for _ in range(2))
    inputs = (x, topk_idx, torch.rand(48, 3, generator=generator), grad)
    group = dist.group.WORLD
    assert group is not None
    results = {PLAIN: list(forward_backward(PlainDispatcher(num_experts=8, group=group), inputs))}
    kept = list(forward_backward(PlainDispatcher(num_experts=8, group=group, keep_buffers=True), inputs))
    assert all(torch.equal(one, other) for one, other in zip(results[PLAIN], kept, strict=True))
    for layout in ("token", "expert"):
        ours = FlexTokenDispatcher(num_experts=8, group=group, layout=layout)  # type: ignore[arg-type]
        results[layout] = list(forward_backward(ours, inputs, apply_weights=False))
    close_buffers()
    return results


@pytest.mark.parametrize("ranks", [1, 2], indirect=True, ids=["1-rank", "2-ranks"])
def test_baseline_equals_ours(ranks: RankPool) -> None:
    for results in ranks.run(job_compare):
        for layout in ("token", "expert"):
            for number, (plain, ours) in enumerate(zip(results[PLAIN], results[layout], strict=True)):
                exact = {"rtol": 0, "atol": 0} if number < 2 else {}  # sums are taken in another order
                torch.testing.assert_close(ours, plain, **exact)


def job_faults(rank: int, world: int) -> dict[str, list[int]]:
    """Wrong values that the oracle counts in sound outputs, then in outputs with one value changed on rank 0."""
    group = dist.group.WORLD
    assert group is not None
    inputs = make_inputs(32, 16, 8, 2, dtype=torch.bfloat16, device=torch.device("cpu"), seed=rank)
    oracle = Oracle(inputs, 8, group)
    counts: dict[str, list[int]] = {}
    for subject in subjects(["token-bare", "expert", PLAIN], 8, group, visible=True):
        with torch.no_grad():
            dispatched = subject.dispatch(inputs.x, inputs.topk_idx, inputs.weights)
            combined = subject.combine(dispatched.tokens, dispatched)
            found = [subject.wrong_dispatch(dispatched, oracle), subject.wrong_sums(combined, inputs.x, oracle)]
            for broken in (combined, dispatched.weights, dispatched.tokens):
                broken.view(-1)[0] += 1
            found += [subject.wrong_dispatch(dispatched, oracle), subject.wrong_sums(combined, inputs.x, oracle)]
        counts[subject.name] = found
    found = [oracle.wrong_weight_gradients(inputs.weights.detach()), oracle.wrong_weight_gradients(-inputs.weights)]
    found.append(oracle.wrong_copies(inputs.x[:0], torch.zeros(8 // world, dtype=torch.int64), inputs.weights[:0, 0]))
    counts["others"] = found
    close_buffers()
    return counts


def test_oracle_counts_wrong_values(ranks2: RankPool) -> None:
    for counts in ranks2.run(job_faults):
        right, wrong, missing = counts.pop("others")
        assert (right, wrong) == (0, 64)
        assert missing > 0
        for subject, (rows, sums, broken_rows, broken_sums) in counts.items():
            assert (rows, sums) == (0, 0), subject
            assert broken_rows > 1, subject
            assert broken_sums == 1, subject


def job_counted(rank: int, world: int) -> tuple[int, int, bool]:
    sent, got = torch.zeros(4, 3), torch.zeros(4, 3)
    with counted(Clock(sent.device)) as traffic:
        dist.all_to_all_single(got, sent)
        dist.all_gather([torch.zeros(2) for _ in range(world)], tensor=torch.zeros(2))
        seen = traffic.sent_bytes, len(traffic.spans)
        traffic.reset()
        dist.all_reduce(sent)
    after = traffic.sent_bytes
    dist.all_reduce(sent)
    return *seen, after == traffic.sent_bytes == 48


def job_waited(rank: int, world: int) -> float:
    """Seconds in collectives where rank 1 comes late to a dispatch."""
    clock = Clock(torch.device("cpu"))
    with buffers():
        fused_dispatch(torch.ones(3, 8), torch.zeros(3, 1).long(), torch.ones(3, 1), 2, None)
        with counted(clock) as traffic:
            time.sleep(rank * 0.4)
            fused_dispatch(torch.ones(3, 8), torch.zeros(3, 1).long(), torch.ones(3, 1), 2, None)
    return sum(clock.between(*span) for span in traffic.spans)


def test_waiting_is_time_in_collectives(ranks2: RankPool) -> None:
    waited, late = ranks2.run(job_waited)
    assert waited > 0.3
    assert late < 0.3


def test_counts_bytes_handed_in(ranks2: RankPool) -> None:
    assert ranks2.run(job_counted) == [(48 + 8, 2, True)] * 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--experts", "9"], "no multiple of the 2 ranks"),
        (["--topk", "65"], "--topk 65 is above 32"),
        (["--topk", "4", "--experts", "2"], "--topk 4 is above 2"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "8,8"], "--tokens"),
        (["--layouts", "token,bare"], "--layouts"),
        (["--sweep-tokens", "8,"], "--sweep-tokens"),
        (["--dtype", "int8"], "--dtype"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(no_launcher: None, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_layouts_keep_their_order(no_launcher: None) -> None:
    assert bench._parse(["--layouts", "expert,token-bare"]).layouts == ["token-bare", "expert"]


def test_ranks_differ_from_the_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert bench._parse([]).ranks == 4
    with pytest.raises(SystemExit):
        bench._parse(["--ranks", "2"])
    assert "under a launcher that started 4" in capsys.readouterr().err


def test_failed_rank_is_reported(
    no_launcher: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ProcessRaisedException("rank 1 lost its peers", 1, 0)

    monkeypatch.setattr(local_ranks, "spawn", fail)
    assert bench.main([]) == 1
    assert "rank 1 lost its peers" in capsys.readouterr().err


def test_wrong_values_end_with_status_one(ranks1: RankPool) -> None:
    assert ranks1.run(job_wrong) == [1]


def job_wrong(rank: int, world: int) -> Any:
    arguments = argparse.Namespace(**{**vars(bench._parse([*SIZES, "--layouts", "token"])), "sweep_tokens": []})
    sound, Oracle.wrong_weight_gradients = Oracle.wrong_weight_gradients, lambda *_: 1  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            bench._rank(torch.device("cpu"), arguments)
    except SystemExit as end:
        return end.code
    finally:
        Oracle.wrong_weight_gradients = sound  # type: ignore[method-assign]
    return 0


def test_records_take_quantiles_and_compare_with_plain() -> None:
    def one(subject: str, scale: float, sent: float | None) -> Measurement:
        seconds = [scale * part for part in (0.5, 0.1, 0.2, 0.4, 0.3)]
        return Measurement(
            subject=subject,
            phase="forward+backward",
            num_tokens=100,
            seconds=seconds,
            sent_bytes=sent,
            communication=None if sent is None else 0.5,
            wrong=0,
        )

    ours, plain = tables.records([one("token", 1.0, None), one(PLAIN, 2.0, 10.0)], 8, 1000)
    assert ours["p50_us"] == pytest.approx(0.3e6)
    assert (ours["p10_us"], ours["p90_us"]) == pytest.approx((0.14e6, 0.46e6))
    assert ours["time_to_plain"] == pytest.approx(0.5)
    assert ours["bytes_to_plain"] is None
    assert ours["logical_gb_per_s"] == pytest.approx(100 * 8 * 1000 * 4 / 0.3 / 1e9)
    assert plain["bytes_to_plain"] == 1
    assert "300,000" in tables.table([ours, plain])
    assert "3000.00" in tables.sweep_table([ours, plain])
