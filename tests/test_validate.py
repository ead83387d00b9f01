"""``examples/validate.py`` as its readers run it, made to pass and made to fail."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from validate_cases import FAULTS, made_sysfs

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
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


def run(
    world: int,
    *flags: object,
    fault: Path | None = None,
    absent: int | None = None,
    printed: Callable[[str], object] | None = None,
    kill: int | None = None,
) -> Ended:
    """Start every rank by itself, without a launcher, so that each one's exit code is seen.

    Args:
        fault: a script to run in the place of validate.py, which it starts.
        absent: a rank that is not started.
        printed: called with each line that the first rank prints.
        kill: a rank to kill once the first step was taken.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks: dict[int, subprocess.Popen[str]] = {}
    for rank in set(range(world)) - {absent}:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        line = [sys.executable, str(fault or EXAMPLES / "validate.py"), *SMALL, *map(str, flags)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks[rank] = subprocess.Popen(line, env=environment(**own), **pipes)  # type: ignore[call-overload]
    try:
        head, first = "", ranks[min(ranks)].stdout
        assert first is not None
        if kill is not None or printed is not None:
            for text in first:
                head += text
                if printed is not None:
                    printed(text)
                elif text.startswith("WARMUP"):
                    break
        if kill is not None:
            ranks[kill].send_signal(signal.SIGKILL)
        outputs = [process.communicate(timeout=SECONDS) for process in ranks.values()]
    finally:
        for process in ranks.values():
            process.kill()
    errors = "".join(stderr for _, stderr in outputs)
    return Ended(codes=[one.returncode for one in ranks.values()], printed=head + outputs[0][0], errors=errors)


def torchrun(script: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    """Two ranks under the launcher."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    line = [sys.executable, *launch, *SMALL, *map(str, flags)]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)


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
    done = torchrun(EXAMPLES / "validate.py", "--expect-backend", "embedded")
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
        pytest.param(
            "class",
            r"active class broken\.EmbeddedElasticBuffer is patched: it comes from \S+broken\.py",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "wraps",
            r"active class EmbeddedElasticBuffer\.combine is patched: it comes from \S+broken\.py",
            marks=pytest.mark.slow,
        ),
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
    ids=["class", "wraps", "method", "payload", "raises", "loss", "sources"],
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


@pytest.mark.parametrize("fault", ["start"], indirect=True)
def test_a_rank_that_fails_before_the_group_exists_reaches_the_verdict(fault: Path) -> None:
    ended = run(2, fault=fault)
    assert ended.codes == [1, 1], ended.errors
    assert ended.last == "VALIDATION FAIL: rank 1: RuntimeError at starting the process group: made to fail"


@pytest.mark.parametrize("fault", ["destroy"], indirect=True)
def test_a_failure_to_leave_the_group_comes_before_the_verdict(fault: Path) -> None:
    ended = run(2, fault=fault)
    assert ended.codes == [1, 1], ended.errors
    assert ended.last == "VALIDATION FAIL: rank 1: RuntimeError at leaving the process group: made to fail"
    assert "VALIDATION PASS" not in ended.printed


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1], ids=["first", "second"])
def test_an_absent_rank_ends_the_others_in_time(absent: int) -> None:
    started = time.monotonic()
    ended = run(2, "--timeout", 8, absent=absent)
    assert ended.codes == [1]
    if absent == 0:
        assert re.search(
            r"^VALIDATION FAIL: .+ at connecting to the store of the process group.*; rank 1 never reached "
            "the others$",
            ended.errors,
            re.MULTILINE,
        )
    else:
        assert ended.last == (
            "VALIDATION FAIL: rank 0: not finished within 8 s, at starting the process group; no word from rank 1"
        )
    assert time.monotonic() - started < 40


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stopped"], indirect=True)
def test_sigterm_is_seen_inside_the_rendezvous(fault: Path) -> None:
    ended = run(2, fault=fault, absent=1)
    assert ended.codes == [1]
    assert ended.last == (
        "VALIDATION FAIL: rank 0: stopped by SIGTERM, at starting the process group; no word from rank 1"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stream"), [("first-dies", "stderr"), ("second-dies-first-blocks", "stdout")], indirect=["fault"]
)
def test_a_rank_that_dies_under_torchrun_leaves_a_verdict(fault: Path, stream: str) -> None:
    started = time.monotonic()
    done = torchrun(fault)
    assert done.returncode == 1
    assert "VALIDATION FAIL: " in getattr(done, stream), done.stdout + done.stderr
    assert "VALIDATION PASS" not in done.stdout
    assert "forcefully exiting" not in done.stderr
    assert time.monotonic() - started < 40


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs"], indirect=True)
def test_a_rank_that_hangs_ends_all_in_time(fault: Path) -> None:
    started = time.monotonic()
    ended = run(2, "--timeout", 15, fault=fault)
    assert ended.codes == [1, 1], ended.errors
    assert "VALIDATION FAIL: not finished within 15 s, at STEP 2/6" in ended.last
    assert time.monotonic() - started < 60


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1], ids=["first", "second"])
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


def test_only_what_the_round_trip_sent_by_fabric_counts(tmp_path: Path) -> None:
    counter = made_sysfs(tmp_path, "efa")

    def printed(line: str) -> None:
        """A fabric that carries the gradients of the steps, and none of the round trip's tokens."""
        if line.startswith("STEP 1/"):
            counter.write_text("1_000_000_000\n")

    ended = run(2, "--pretend-nodes", 2, "--sysfs", tmp_path, printed=printed)
    assert ended.codes == [1, 1]
    assert_lines(ended.printed, [r"validation: 2 ranks on 2 nodes, cpu", r"nodes: PRETENDED, 0 \(.+\), 1 \(.+\)"])
    assert re.search(r"^fabric: 1,999,998,000 bytes sent;", ended.printed, re.MULTILINE)
    reason = r"VALIDATION FAIL: no fabric bytes: node 0 \(.+\), round trip: 0 bytes sent by efa rdmap0s6/1, "
    found = re.match(reason + r"0 by sockets; at least ([\d,]+) had to leave it", ended.last)
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
