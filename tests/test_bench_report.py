"""``bench``: what it measures beside ours, its sweeps, its bandwidth convention and its pages."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import gpu_cases
import pytest
import torch
import torch.distributed as dist
from launch import RankPool
from scene import buffers, raised_by
from test_gpu import on_gpus

from megatron_moe_v2 import LimitError, prepare_buffer
from megatron_moe_v2.cli import bench, tables
from megatron_moe_v2.cli.beside import chosen, embedded_buffer, embedded_subject, raw_subjects
from megatron_moe_v2.cli.charts import bars, lines
from megatron_moe_v2.cli.measure import LAYOUTS, PHASES, PLAIN, PLAIN_KEPT
from megatron_moe_v2.cli.verify import Oracle, make_inputs

TOKENS, HIDDEN, EXPERTS, TOPK = 48, 64, 8, 3
SIZES = ["--tokens", str(TOKENS), "--hidden", str(HIDDEN), "--experts", str(EXPERTS), "--topk", str(TOPK)]
SIZES += ["--iters", "2", "--warmup", "1"]
SWEEPS = ["--sweep-tokens", "16,32", "--sweep-hidden", "32,128", "--sweep-topk", "1,4"]
BESIDE = ["raw-token", "raw-expert", "embedded"]


def job_bench(rank: int, world: int, arguments: list[str]) -> tuple[str, float]:
    """What the command printed, and the tokens that a rank receives, each once, counted by hand."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        bench._rank(torch.device("cpu"), bench._parse([*SIZES, *arguments]))
    inputs = make_inputs(TOKENS, HIDDEN, EXPERTS, TOPK, dtype=torch.bfloat16, device=torch.device("cpu"), seed=rank)
    sent = sum(len({expert * world // EXPERTS for expert in token}) for token in inputs.topk_idx.tolist())
    every = torch.tensor(float(sent))
    dist.all_reduce(every)
    return printed.getvalue(), float(every) / world


def test_everything_beside_and_every_sweep(ranks2: RankPool, tmp_path: Path) -> None:
    page, target = tmp_path / "a page.md", tmp_path / "lines"
    arguments = [*SWEEPS, "--beside", "embedded,raw", "--report", str(page), "--json", str(target)]
    (printed, rows), _ = ranks2.run(job_bench, arguments, timeout=120)
    header, *found = [json.loads(line) for line in target.read_text().splitlines()]
    assert header["beside"] == ["raw", "embedded"]
    names = [*LAYOUTS, *BESIDE, PLAIN, PLAIN_KEPT]
    results = {(one["dispatcher"], one["phase"]): one for one in found if one["record"] == "result"}
    assert list(dict.fromkeys(name for name, _ in results)) == names
    assert set(results) == {(name, phase) for name in names for phase in PHASES}
    assert {one["wrong_values"] for one in found} == {0}
    for phase in PHASES:  # our own calls put on the wire what the buffer's own do
        sent = {results[name, phase]["sent_bytes_per_rank"] for name in ("expert", "raw-expert", "embedded")}
        assert len(sent) == 1
        one = results["raw-token", phase]
        row = 2 * HIDDEN
        per_token = {"dispatch": row + 12 * TOPK, "combine": row, "forward+backward": 4 * row + 16 * TOPK}[phase]
        assert one["rank_gb_per_s"] == pytest.approx(rows * per_token / one["p50_us"] / 1e3)
    for over, values in (("tokens", [16, 32]), ("hidden", [32, 128]), ("topk", [1, 4])):
        swept = [one for one in found if one.get("over") == over]
        assert [(one[over], one["dispatcher"]) for one in swept] == [
            (value, name) for value in values for name in names
        ]
        for one in swept:
            base = {"tokens": TOKENS, "hidden": HIDDEN, "topk": TOPK} | {over: one[over]}
            assert {name: one[name] for name in base} == base
    for text in ("a rank", "raw-expert", "by hidden, p50", "by top-k, p50"):
        assert text in printed
    charts = re.findall(r"!\[.*\]\((.*)\)", page.read_text())
    assert charts == [f"a%20page-{number}.svg" for number in range(1, 7)]
    for name in charts:
        assert ElementTree.parse(tmp_path / name.replace("%20", " ")).getroot().tag.endswith("svg")


def test_default_has_nothing_beside_and_a_page_of_html(ranks1: RankPool, tmp_path: Path) -> None:
    page, target = tmp_path / "page.html", tmp_path / "lines"
    ((printed, _),) = ranks1.run(job_bench, ["--report", str(page), "--json", str(target)])
    header, *found = [json.loads(line) for line in target.read_text().splitlines()]
    assert "beside" not in header
    assert {one["dispatcher"] for one in found} == {*LAYOUTS, PLAIN, PLAIN_KEPT}
    assert "a rank " not in printed.split(tables.METHOD)[1]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".svg"] == []
    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == len(PHASES)
    assert "<script" not in text
    assert "EmbeddedElasticBuffer" in text


def test_float64_beside_the_buffer_s_own_calls(ranks1: RankPool, tmp_path: Path) -> None:
    target = tmp_path / "lines"
    ranks1.run(job_bench, ["--dtype", "fp64", "--beside", "raw", "--json", str(target)])
    _, *found = [json.loads(line) for line in target.read_text().splitlines()]
    assert {one["wrong_values"] for one in found} == {0}
    assert "raw-token" in {one["dispatcher"] for one in found}


def job_faults(rank: int, world: int) -> dict[str, Any]:
    """Wrong values that the oracle counts in each subject's step, sound and with one value of each output changed."""
    group = dist.group.WORLD
    assert group is not None
    inputs = make_inputs(TOKENS, HIDDEN, EXPERTS, TOPK, dtype=torch.bfloat16, device=torch.device("cpu"), seed=rank)
    oracle = Oracle(inputs, EXPERTS, group)
    found: dict[str, Any] = {}
    with buffers(MAX_TOKENS_PER_RANK=TOKENS):
        entry = prepare_buffer(hidden=HIDDEN, num_topk=TOPK)
        for subject in raw_subjects(entry, EXPERTS, TOPK, visible=True):
            assert subject.step is not None
            combined, grad_x, grad_weights = subject.step(inputs)
            for broken in (None, combined, grad_x, grad_weights):
                if broken is not None:
                    broken.view(-1)[0] += 1
                wrong = subject.wrong_sums(combined, inputs.x, oracle)
                wrong += subject.wrong_sums(grad_x, inputs.grad, oracle) + oracle.wrong_weight_gradients(grad_weights)
                found.setdefault(subject.name, []).append(wrong)
        with embedded_buffer(entry) as second:
            embedded_subject(second, EXPERTS)
            assert second.buffer is not entry.buffer
        found["closed"] = second.closed, entry.closed
    return found


def test_wrong_values_of_raw_calls_are_counted(ranks2: RankPool) -> None:
    for found in ranks2.run(job_faults):
        assert found == {"raw-token": [0, 1, 2, 3], "raw-expert": [0, 1, 2, 3], "closed": (True, False)}


@pytest.mark.parametrize(
    ("backend", "hidden", "wanted", "want"),
    [
        ("deepep_v2", 2048, None, ["raw", "embedded"]),
        ("deepep_v2", 2040, None, ["embedded"]),
        ("deepep_v1", 2048, None, ["embedded"]),
        ("embedded", 2048, None, []),
        ("embedded", 8, ["embedded", "raw"], ["raw", "embedded"]),
        ("deepep_v2", 2048, [], []),
        ("deepep_v2", 2040, ["raw"], LimitError),
        ("deepep_v1", 2048, ["raw"], LimitError),
    ],
    ids=str,
)
def test_what_is_measured_beside(backend: str, hidden: int, wanted: list[str] | None, want: Any) -> None:
    entry: Any = SimpleNamespace(backend=SimpleNamespace(name=backend))
    if isinstance(want, list):
        assert chosen(wanted, entry, hidden) == want
    else:
        assert raised_by(lambda: chosen(wanted, entry, hidden)).isa(want)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--beside", "deepep"], "choose of raw,embedded, or none"),
        (["--sweep-topk", "2,33"], "--sweep-topk 33 is above"),
        (["--sweep-hidden", "0"], "--sweep-hidden"),
        (["--report", "page.pdf"], ".html, .md"),
        (["--report", "/no/such/folder/page.md"], "/no/such/folder"),
        (["--json", "/no/such/folder/lines"], "/no/such/folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def numbers(svg: str, tag: str, *names: str) -> list[tuple[float, ...]]:
    found = ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}")
    return [
        tuple(float(one.attrib[name]) for name in names) for one in found if one.attrib.get(names[0], "%")[-1] != "%"
    ]


def test_bars_are_as_long_as_their_values() -> None:
    svg = bars("<&>", [("a", 5.0, 10.0, 40.0), ("b", 20.0, 20.0, 20.0)])
    (short,), (long,) = numbers(svg, "rect", "width")
    assert long == pytest.approx(2 * short)
    (first, *_), ends = numbers(svg, "line", "x1", "x2"), numbers(svg, "rect", "x", "width")[0]
    assert (first[0] - ends[0], first[1] - ends[0]) == pytest.approx((short / 2, short * 4), abs=0.2)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_lines_rise_with_their_values(scale: float) -> None:
    svg = lines("title", "size", {"a": [(4, scale), (1, 0.5 * scale), (2, 0.75 * scale)], "b": [(2, scale)]})
    points = numbers(svg, "circle", "cx", "cy")
    (x1, y1), (x2, y2), (x4, y4), (xb, yb) = points
    assert x2 - x1 == pytest.approx(x4 - x2)
    assert y1 - y2 == pytest.approx(y2 - y4, abs=0.2)
    assert (xb, yb) == (x2, y4)
    assert all(0 < x < 720 and 0 < y < 370 for x, y in points)
    assert len(numbers(lines("one", "size", {"a": [(8, scale)]}), "circle", "cx")) == 1


def on_gpu(rank: int, world: int, report: str | None) -> list[dict[str, Any]]:
    """The command on the real buffer; its results."""
    gpu_cases.join_nccl(rank, world)
    collected: list[dict[str, Any]] = []
    measured: Callable[..., Any] = bench._measure

    def collect(*args: Any) -> Any:
        found = measured(*args)
        collected.extend(found)
        return found

    bench._measure = collect
    arguments = ["--tokens", "256", "--hidden", str(gpu_cases.H), "--experts", str(gpu_cases.E), "--topk", "4"]
    arguments += ["--iters", "3", "--warmup", "2", "--sweep-hidden", "512"]
    arguments += [] if report is None or rank else ["--report", report]
    bench._rank(torch.device("cuda", torch.cuda.current_device()), bench._parse(arguments))
    dist.destroy_process_group()
    return collected


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_on_gpus(world: int, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for found in on_gpus(world, on_gpu, str(page), timeout=400.0):
        assert {one["dispatcher"] for one in found} == {*LAYOUTS, *BESIDE, PLAIN, PLAIN_KEPT}
        assert {one["wrong_values"] for one in found} == {0}
    assert page.read_text().count("<svg") == len(PHASES) + 1


def test_a_sweep_shows_what_was_not_measured() -> None:
    common = {"over": "hidden", "tokens": 4, "p50_us": 1000.0}
    found = [
        {**common, "hidden": 256, "dispatcher": "expert"},
        {**common, "hidden": 256, "dispatcher": "raw-expert"},
        {**common, "hidden": 200, "dispatcher": "expert"},
    ]
    assert tables.sweep_table(found).splitlines()[-1].split() == ["200", "1.00", "-", "250.00", "-"]
