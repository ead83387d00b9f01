"""``examples/validate.py`` as its readers run it, made to pass and made to fail, and its parts on made inputs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import fabric_counters  # noqa: E402
import validate_payloads as payloads  # noqa: E402
from fabric_counters import Counters  # noqa: E402

SECONDS = 90
SMALL = shlex.split(
    "--device cpu --hidden 64 --tokens 64 --seq-len 32 --blocks 1 --expert-ffn 32 --warmup-steps 1 --steps 6"
)


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settled = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "MCORE_DEEPEP_V2_AGREE_SECS": "20"}
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    return {name: value for name, value in os.environ.items() if name not in launcher} | settled | more


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How each rank ended: exit codes, and what the first rank printed and all wrote to stderr."""

    codes: list[int]
    printed: str
    errors: str

    @property
    def last(self) -> str:
        return self.printed.strip().splitlines()[-1] if self.printed.strip() else self.errors


def run(world: int, *flags: object, fault: Path | None = None, kill: int | None = None) -> Ended:
    """Start every rank by itself, without a launcher, so that each one's exit code is seen.

    Args:
        fault: a script to run in the place of validate.py, which it starts.
        kill: a rank to kill once the first step was taken.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        line = [sys.executable, str(fault or EXAMPLES / "validate.py"), *SMALL, *map(str, flags)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(line, env=environment(**own), **pipes))  # type: ignore[call-overload]
    try:
        head = ""
        if kill is not None:
            assert ranks[0].stdout is not None
            for printed in ranks[0].stdout:
                head += printed
                if printed.startswith("WARMUP"):
                    break
            ranks[kill].send_signal(signal.SIGKILL)
        outputs = [process.communicate(timeout=SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    errors = "".join(stderr for _, stderr in outputs)
    return Ended(codes=[process.returncode for process in ranks], printed=head + outputs[0][0], errors=errors)


def expected(warmup: int, steps: int) -> tuple[str, ...]:
    """Patterns of the lines, in their order."""
    return (
        r"validation: 2 ranks on 1 node, cpu",
        r"nodes: 0 \(.+\)",
        r"commit: .+; sources [0-9a-f]{8}",
        r"versions: python 3\.\d+\.\d+, torch .+, megatron_moe_v2 .+ at .+",
        r"deep_ep: .+",
        r"backend: embedded, because .+",
        r"active class: EmbeddedElasticBuffer, module megatron_moe_v2\.buffers\.embedded, file /.+/embedded\.py",
        r"per-expert payloads: exact 32/32, wrong sums 0, wrong gradients 0",
        r"model: .+ expert parameters, 16 experts, top-4",
        rf"WARMUP 1/{warmup} loss=\d\.\d+ grad_norm=\d+\.\d+ step_ms=\d+\.\d",
        rf"STEP 1/{steps} loss=\d\.\d+ grad_norm=\d+\.\d+ step_ms=\d+\.\d",
        rf"STEP {steps}/{steps} loss=.+",
        r"loss trajectory: first=\d\.\d\d last=\d\.\d\d decreased=True",
        r"fabric: [\d,]+ bytes sent; sockets: [\d,]+ bytes sent, loopback [\d,]+",
        r"VALIDATION PASS",
    )


def assert_lines(printed: str, patterns: Sequence[str]) -> None:
    """Each pattern matches a whole line, in this order."""
    lines = iter(printed.splitlines())
    for pattern in patterns:
        assert any(re.fullmatch(pattern, line) for line in lines), f"{pattern} is not in its place in\n{printed}"


def test_two_ranks_under_torchrun_pass_with_the_expected_lines() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "validate.py")]
    line = [sys.executable, *launch, *SMALL, "--expect-backend", "embedded"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_lines(done.stdout, expected(1, 6))
    assert done.stdout.splitlines()[-1] == "VALIDATION PASS"


def test_the_page_shows_these_lines() -> None:
    page = (ROOT / "docs" / "validation.md").read_text()
    (block,) = re.findall(r"^```text\n(validation: .+?)^```", page, re.MULTILINE | re.DOTALL)
    assert_lines(block, expected(2, 20))


@pytest.mark.slow
def test_one_rank_without_a_launcher_passes_in_the_expert_layout() -> None:
    line = [sys.executable, str(EXAMPLES / "validate.py"), *SMALL, "--layout", "expert"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "per-expert payloads: exact 16/16" in done.stdout
    assert done.stdout.splitlines()[-1] == "VALIDATION PASS"


@pytest.mark.slow
def test_another_backend_than_expected_fails_on_all_ranks() -> None:
    ended = run(2, "--expect-backend", "deepep_v2")
    assert ended.codes == [1, 1]
    assert ended.last.startswith("VALIDATION FAIL: backend embedded, expected deepep_v2: the group has no CUDA device")


FAULTS = {
    "class": """
        import megatron_moe_v2.buffers.embedded as embedded
        class EmbeddedElasticBuffer(embedded.EmbeddedElasticBuffer):
            pass
        embedded.EmbeddedElasticBuffer = EmbeddedElasticBuffer
    """,
    "method": """
        import megatron_moe_v2.buffers.embedded as embedded
        original = embedded.EmbeddedElasticBuffer.combine
        embedded.EmbeddedElasticBuffer.combine = lambda self, *args, **kwargs: original(self, *args, **kwargs)
    """,
    "payload": """
        import torch.distributed as dist
        original = dist.all_to_all_single
        def flipped(got, sent, rows_in=None, *args, **kwargs):
            work = original(got, sent, rows_in, *args, **kwargs)
            if rows_in is not None and RANK == 1 and len(got) > 3:
                got[3, 7] += 1
            return work
        dist.all_to_all_single = flipped
    """,
    "raises": """
        import pretrain
        original = pretrain.Trainer.step
        def step(self, number, stop):
            if RANK == 1 and number == 3:
                raise OverflowError("made to fail")
            return original(self, number, stop)
        pretrain.Trainer.step = step
    """,
    "hangs": """
        import time, pretrain
        original = pretrain.Trainer.step
        def step(self, number, stop):
            if RANK == 1 and number == 3:
                time.sleep(1000)
            return original(self, number, stop)
        pretrain.Trainer.step = step
    """,
    "loss": """
        import pretrain
        pretrain.learning_rate = lambda step, **schedule: -1e-3
    """,
    "sources": """
        import validate_provenance
        validate_provenance.source_digest = lambda: RANK
    """,
    "deep_ep": """
        import deep_ep
        class Buffer:
            def dispatch(self): ...
            def combine(self): ...
        deep_ep.Buffer = Buffer
    """,
    "deep_ep-late": """
        from megatron_moe_v2.probe import probe
        import deep_ep
        probe()
        deep_ep.ElasticBuffer = type("ElasticBuffer", (deep_ep.ElasticBuffer,), {})
    """,
}


@pytest.fixture
def fault(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A script that imports a module which breaks something, then runs validate.py in the same process."""
    start = "import os\nRANK = int(os.environ['RANK'])\n"
    (tmp_path / "broken.py").write_text(start + textwrap.dedent(FAULTS[request.param]))
    script = tmp_path / "start.py"
    script.write_text(
        f"import sys, runpy\nsys.path.insert(0, {str(EXAMPLES)!r})\nimport broken\n"
        f"runpy.run_path({str(EXAMPLES / 'validate.py')!r}, run_name='__main__')\n"
    )
    return script


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param("class", r"active class broken\.EmbeddedElasticBuffer is patched: it comes from \S+broken\.py"),
        pytest.param(
            "method",
            r"active class EmbeddedElasticBuffer\.combine is patched: it comes from \S+broken\.py",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "payload", r"rank 1: wrong payloads in the token layout: \d+ of 8 experts, \d+ sums, \d+ gradients"
        ),
        pytest.param("raises", r"rank 1: OverflowError at STEP 2/6: made to fail"),
        pytest.param(
            "loss",
            r"the loss did not fall: loss trajectory: first=\S+ last=\S+ decreased=False",
            marks=pytest.mark.slow,
        ),
        pytest.param("sources", r"the ranks run different sources of megatron_moe_v2", marks=pytest.mark.slow),
    ],
    indirect=["fault"],
    ids=["class", "method", "payload", "raises", "loss", "sources"],
)
def test_made_to_fail_names_the_reason_on_every_rank(fault: Path, reason: str) -> None:
    ended = run(2, fault=fault)
    assert ended.codes == [1, 1], ended.errors
    assert re.match(rf"VALIDATION FAIL: (.*; )?{reason}", ended.last), ended.printed + ended.errors
    assert "VALIDATION PASS" not in ended.printed
    counted = re.search(r"exact (\d+)/32, wrong sums (\d+), wrong gradients (\d+)", ended.printed)
    assert counted is not None
    exact, sums, gradients = map(int, counted.groups())
    wrong = "wrong payloads" in reason
    assert (exact < 32, sums + gradients > 0) == (wrong, wrong)
    assert exact > 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs"], indirect=True)
def test_a_rank_that_hangs_ends_all_in_time(fault: Path) -> None:
    started = time.monotonic()
    ended = run(2, "--timeout", 15, fault=fault)
    assert ended.codes == [1, 1], ended.errors
    assert "VALIDATION FAIL: not finished within 15 s, at STEP 2/6" in ended.last
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["first", "second"])
def test_a_killed_rank_ends_the_others_with_a_verdict(killed: int) -> None:
    started = time.monotonic()
    ended = run(2, "--steps", 100_000, kill=killed)
    assert ended.codes[killed] == -signal.SIGKILL
    assert ended.codes[1 - killed] == 1
    assert "VALIDATION FAIL: " in (ended.errors if killed == 0 else ended.last)
    assert time.monotonic() - started < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"), [("deep_ep", "Buffer"), ("deep_ep-late", "ElasticBuffer")], indirect=["fault"]
)
def test_a_replaced_class_of_deep_ep_is_named(
    fault: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "stand_in" / "deep_ep"
    package.mkdir(parents=True)
    kinds = "".join(
        f"class {kind}:\n    def dispatch(self): ...\n    def combine(self): ...\n"
        for kind in ("Buffer", "ElasticBuffer")
    )
    (package / "__init__.py").write_text(f"__version__ = '9.9'\n{kinds}")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    ended = run(1, fault=fault)
    assert ended.codes == [1]
    assert_lines(ended.printed, [r"deep_ep: 9\.9 at .+", rf"PATCHED: deep_ep\.{name} .+"])
    assert f"deep_ep.{name}" in ended.last
    assert "broken.py" in ended.last


def made_sysfs(root: Path, kind: str, sent: int = 1000) -> Path:
    """One fabric port and two interfaces; returns the fabric's counter."""
    device = root / "class" / "infiniband" / ("rdmap0s6" if kind == "efa" else "mlx5_0") / "ports" / "1"
    counter = device / ("hw_counters/tx_bytes" if kind == "efa" else "counters/port_xmit_data")
    counter.parent.mkdir(parents=True)
    counter.write_text(f"{sent}\n")
    for interface, count in (("eth0", 50), ("lo", 7)):
        statistics = root / "class" / "net" / interface / "statistics"
        statistics.mkdir(parents=True)
        (statistics / "tx_bytes").write_text(f"{count}\n")
    return counter


def test_no_fabric_bytes_on_two_nodes_fail(tmp_path: Path) -> None:
    made_sysfs(tmp_path, "efa")
    ended = run(2, "--pretend-nodes", 2, "--sysfs", tmp_path)
    assert ended.codes == [1, 1]
    assert_lines(ended.printed, [r"validation: 2 ranks on 2 nodes, cpu", r"nodes: PRETENDED, 0 \(.+\), 1 \(.+\)"])
    reason = r"VALIDATION FAIL: no fabric bytes: node 0 \(.+\): 0 bytes sent by efa rdmap0s6/1, 0 by sockets; at least "
    found = re.match(reason + r"([\d,]+) had to leave it", ended.last)
    assert found is not None, ended.last
    assert int(found[1].replace(",", "")) > 64 * 64 * 4


@pytest.mark.parametrize("kind", [pytest.param("efa", marks=pytest.mark.slow), "infiniband"])
def test_fabric_bytes_on_two_nodes_pass_and_are_counted(kind: str, tmp_path: Path) -> None:
    counter = made_sysfs(tmp_path, kind)
    stop = threading.Event()

    def count() -> None:
        """A fabric that sends a megabyte (or a million words) every tenth of a second."""
        sent = 1000
        while not stop.wait(0.1):
            sent += 1_000_000
            fresh = counter.with_name("fresh")
            fresh.write_text(f"{sent}\n")
            fresh.replace(counter)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        ended = run(2, "--pretend-nodes", 2, "--sysfs", tmp_path)
    finally:
        stop.set()
        thread.join()
    assert ended.codes == [0, 0], ended.printed + ended.errors
    found = re.search(r"^fabric: ([\d,]+) bytes sent; sockets: 0 bytes sent, loopback 0$", ended.printed, re.MULTILINE)
    assert found is not None
    total = int(found[1].replace(",", ""))
    assert total > 0
    assert total % (1_000_000 if kind == "efa" else 4_000_000) == 0


@pytest.mark.slow
def test_two_nodes_without_a_fabric_pass_where_that_is_said(tmp_path: Path) -> None:
    ended = run(2, "--pretend-nodes", 2, "--sysfs", tmp_path, "--no-fabric")
    assert ended.codes == [0, 0]
    assert "sent by no fabric device" in ended.printed


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
