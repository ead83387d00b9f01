"""The parts of ``examples/validate.py`` on made inputs: counters, provenance, command line, payloads."""

from __future__ import annotations

import re
import shlex
import sys
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from validate_cases import made_sysfs

from megatron_moe_v2.buffers.embedded import EmbeddedElasticBuffer
from megatron_moe_v2.probe import probe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import fabric_counters
import parallel
import validate
import validate_payloads as payloads
import validate_provenance as provenance
from fabric_counters import Counters


@pytest.mark.parametrize(("kind", "factor"), [("efa", 1), ("infiniband", 4)])
def test_counters_of_a_made_tree(kind: str, factor: int, tmp_path: Path) -> None:
    counter = made_sysfs(tmp_path, kind)
    broken = tmp_path / "class" / "infiniband" / "mlx5_9" / "ports" / "1" / "counters"
    broken.mkdir(parents=True)
    (broken / "port_xmit_data").write_text("N/A (no PMA)\n")
    before = fabric_counters.read_counters(tmp_path)
    counter.write_text("1250\n")
    (tmp_path / "class" / "net" / "eth0" / "statistics" / "tx_bytes").write_text("80\n")
    sent = fabric_counters.sent_between(before, fabric_counters.read_counters(tmp_path))
    assert (sent.fabric, sent.sockets, sent.loopback) == (250 * factor, 30, 0)
    assert sent.devices == [f"{kind} {'rdmap0s6' if kind == 'efa' else 'mlx5_0'}/1"]


def test_counters_that_were_reset_or_came_later() -> None:
    before = Counters(fabric={"efa a/1": 100}, sockets={"lo": 5})
    after = Counters(fabric={"efa a/1": 30, "efa b/1": 9000}, sockets={"lo": 6, "eth0": 1})
    sent = fabric_counters.sent_between(before, after)
    assert (sent.fabric, sent.sockets, sent.loopback, sent.devices) == (30, 0, 1, ["efa a/1"])


def _foreign(self: object) -> None: ...


class _Callable:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("replacement", "origin"),
    [
        (_foreign, "it comes from .+test_validate_parts.py"),
        (wraps(EmbeddedElasticBuffer.combine)(lambda self: None), "it comes from .+test_validate_parts.py"),
        (partial(EmbeddedElasticBuffer.combine), r"it is a functools\.partial, expected a function"),
        (_Callable(), r"it is a .*test_validate_parts\._Callable, expected a function"),
        (staticmethod(_foreign), r"it is a builtins\.staticmethod, expected a function"),
    ],
    ids=["function", "wraps", "partial", "callable", "staticmethod"],
)
@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_replaced_method_is_named(where: str, replacement: Any, origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = object.__new__(EmbeddedElasticBuffer)
    assert provenance.patches(buffer, probe()) == []
    monkeypatch.setattr(EmbeddedElasticBuffer if where == "class" else buffer, "combine", replacement)
    (text,) = provenance.patches(buffer, probe())
    named = "active class EmbeddedElasticBuffer.combine" if where == "class" else "active buffer's own combine"
    assert re.fullmatch(rf"{named} is patched: {origin}", text), text


@pytest.mark.parametrize(
    "flags",
    ["--seq-len 0", "--tokens 0", "--blocks 0", "--expert-ffn 0", "--timeout 0", "--timeout nan", "--pretend-nodes -1"],
)
def test_wrong_flags_are_refused_by_name(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        validate.parse_arguments(shlex.split(flags))
    assert ended.value.code == 2
    assert f"{flags.split()[0]} {float(flags.split()[1]) if 'timeout' in flags else flags.split()[1]}: " in (
        capsys.readouterr().err
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"device cuda: got no GPU \(PyTorch .+\), expected one\. Check nvidia-smi"):
        parallel.start("cuda")


def sizes(experts: int, topk: int, tokens: int = 96) -> payloads.Sizes:
    shape = {"tokens": tokens, "hidden": 64, "experts": experts, "topk": topk}
    return payloads.Sizes(**shape, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (8, 8), (16, 4), (256, 8), (384, 32)])
def test_selections_are_distinct_and_reach_many_experts(experts: int, topk: int) -> None:
    chosen = payloads.selections(torch.arange(4096), sizes(experts, topk))
    assert chosen.shape == (4096, topk)
    assert int(chosen.min()) >= 0
    assert int(chosen.max()) < experts
    assert all(len(set(row)) == topk for row in chosen.tolist())
    assert len(chosen.unique()) == experts


def test_rows_are_exact_in_bfloat16_up_to_32_copies_and_say_whose_they_are() -> None:
    numbers = torch.arange(5000)
    values = payloads.rows(numbers, sizes(8, 2))
    assert torch.equal((values * 32).double(), values.double() * 32)
    assert float(values.abs().max()) <= 8
    assert len(values.unique(dim=0)) == 5000
    powers = payloads.BASE ** torch.arange(payloads.DIGITS)
    assert torch.equal((values[:, : payloads.DIGITS].long() * powers).sum(1), numbers)


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]], ids=["one", "two", "four"])
def test_bytes_that_must_leave_a_node(nodes: list[int]) -> None:
    shape = sizes(16, 4)
    for rank in range(4):
        copies = 0
        for token in range(rank * 96, (rank + 1) * 96):
            experts = payloads.selections(torch.tensor([token]), shape)[0].tolist()
            copies += len({nodes[expert // 4] for expert in experts} - {nodes[rank]})
        assert payloads.crossing_bytes(rank, nodes, shape) == copies * 64 * 2
