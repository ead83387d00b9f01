"""``megatron-moe-v2 doctor``: what is wrong on this machine, and between the ranks of a job.

Changes nothing and needs no network. At module level it uses the standard library alone, and each check is imported
when it runs, so that a broken torch, ``deep_ep`` or part of this package is a finding and not the end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from ... import __version__
from .findings import FAIL, Finding, guarded, output_of, worst

__all__ = ["SCHEMA_VERSION", "main"]

SCHEMA_VERSION = 1
"""Of ``--json``; raised when a field changes its meaning or goes."""

IMPORT_TIMEOUT = 120.0
SELFTEST_TIMEOUT = 55.0
RANKS_TIMEOUT = 90.0
MOST_TIMEOUT = 86400.0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-moe-v2 doctor",
        description="Looks at Python, torch, GPUs, NCCL, deep_ep, nvcc and environment variables; says what to do.",
        epilog="Exit status: 0 nothing fails, 1 something fails, 2 wrong usage.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object (docs/doctor.md has its schema)")
    add("--problems", action="store_true", help="print only what fails or needs a look")
    add("--ranks", action="store_true", help="under torchrun: compare all ranks and print what differs")
    add("--selftest", action="store_true", help="also dispatch and combine with gradients, and count exact payloads")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of --selftest (%(default)s)")
    add("--timeout", type=float, metavar="SECONDS", help="for --selftest (55) and for late ranks (90)")
    args = parser.parse_args(argv)
    if args.ranks and not (os.environ.get("RANK") and os.environ.get("WORLD_SIZE")):
        parser.error("--ranks needs a launcher: torchrun --nproc-per-node N -m megatron_moe_v2 doctor --ranks")
    if args.timeout is not None and not 0 < args.timeout <= MOST_TIMEOUT:
        parser.error(f"--timeout {args.timeout:g} is not above 0 and at most {MOST_TIMEOUT:g}")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the doctor with command-line arguments; the exit status."""
    args = _parse(argv)
    started = time.monotonic()
    findings, environment, gpus, torch_works = _local()
    if args.selftest:
        findings += _checked(
            "selftest", "selftest", lambda part: part.selftest_check(args.device, args.timeout or SELFTEST_TIMEOUT)
        )
    reports: dict[int, Any] | None = None
    meeting = None
    if args.ranks:
        reports = {}
        if torch_works:
            meeting, more = _meet(reports, findings, environment, gpus, args.timeout or RANKS_TIMEOUT)
        else:
            more = [_cannot_meet("torch does not work here, so this rank cannot report; see the finding torch")]
        findings += more
    status = worst(findings)
    if meeting is None or meeting.rank == 0:
        report = {
            "schema": SCHEMA_VERSION,
            "version": __version__,
            "host": socket.gethostname(),
            "seconds": round(time.monotonic() - started, 3),
            "status": "fail" if status == FAIL else "warn" if status == "warn" else "ok",
            "findings": [finding.as_dict() for finding in findings],
            "environment": environment,
            "ranks": None if reports is None else {str(rank): one for rank, one in sorted(reports.items())},
        }
        alone = args.ranks and meeting is None and os.environ["RANK"] != "0"
        text = json.dumps(report, indent=1) if args.json else _text(report, args.problems)
        print(text, file=sys.stderr if alone else sys.stdout, flush=True)
        if alone:  # a launcher ends all ranks when one ends: leave rank 0 the time to say who is missing
            time.sleep((args.timeout or RANKS_TIMEOUT) + 5)
    if meeting is not None:
        try:
            status_text = meeting.conclude(status if meeting.rank == 0 else None)
        except Exception as error:
            print(f"doctor: rank {meeting.rank} did not hear from rank 0: {error}", file=sys.stderr)
            return 1
        return int(status_text == FAIL)
    return int(status == FAIL)


def _checked(part: str, name: str, call: Callable[[ModuleType], Iterable[Finding]]) -> list[Finding]:
    """Findings of ``doctor.<part>``; its import may fail too, which the finding ``check-<name>`` then says."""
    group = "deep_ep" if name == "deep_ep" else part
    return guarded(f"check-{name}", group, lambda: call(importlib.import_module(f".{part}", __name__)))


def _local() -> tuple[list[Finding], dict[str, str], int, bool]:
    """Findings of this process's machine, the variables that matter, the number of GPUs, and whether torch imports."""
    from . import imports as looking

    wait = looking.start(IMPORT_TIMEOUT)
    environ = dict(os.environ)
    system = _checked("system", "python", lambda part: part.python_check())
    gpu = False
    try:
        from .system import has_gpu

        gpu = has_gpu()
    except Exception:  # the finding above says why
        pass
    network = [
        *_checked("system", "loopback", lambda part: part.loopback_check()),
        *_checked("system", "network", lambda part: part.network_check(gpu)),
    ]
    libraries = _checked("libraries", "libraries", lambda part: part.library_check())
    states = output_of(["nvidia-smi", "nvlink", "-s", "-i", "0"]) or "" if gpu else ""  # a second, beside the imports
    imports = wait()
    environ_of_deep_ep = {**environ, **imports.of("deep_ep").get("sets", {})}
    wanted = environ.get("MCORE_DEEPEP_V2_BACKEND", "").strip() or "auto"
    findings = [
        *system,
        *_checked("system", "torch", lambda part: part.torch_check(imports, gpu)),
        *_checked("system", "import-time", lambda part: part.import_time_check(imports)),
        *_checked("system", "bytecode", lambda part: part.bytecode_check(imports)),
        *_checked("system", "gpu", lambda part: part.gpu_check(imports, gpu)),
        *_checked("system", "links", lambda part: part.link_check(imports, gpu, states)),
        *network,
        *_checked("nccl", "nccl", lambda part: part.nccl_check(imports, gpu)),
        *_checked("libraries", "deep_ep", lambda part: part.deep_ep_check(imports, gpu, wanted)),
        *libraries,
        *_checked("jit", "jit", lambda part: part.jit_check(environ_of_deep_ep, gpu)),
        *_checked("environment", "environment", lambda part: _environment(part, environ, imports, gpu)),
        *_checked("backend", "backend", lambda part: part.backend_check(imports, gpu)),
    ]
    variables: dict[str, str] = {}
    try:
        from .environment import relevant

        variables = relevant(environ)
    except Exception:  # the finding above says why
        pass
    return findings, variables, len(imports.of("cuda").get("devices") or []), "error" not in imports.of("torch")


def _environment(part: Any, environ: dict[str, str], imports: Any, gpu: bool) -> Iterable[Finding]:
    from ...buffers.fabric import rdma_kind

    loaded = imports.of("nccl_after").get("loaded") or {}
    around = part.Surroundings(
        gpu=gpu,
        v2=bool(imports.of("deep_ep").get("v2")),
        rdma=rdma_kind(),
        nccl=next(iter(loaded.values()), None),
    )
    findings: Iterable[Finding] = part.environment_check(environ, around)
    return findings


def _cannot_meet(found: str) -> Finding:
    return Finding(
        id="ranks",
        group="ranks",
        status=FAIL,
        found=found,
        needed="the launcher's store, reached by every rank",
        fix="Mend this rank first, or run `megatron-moe-v2 doctor` on its host alone.",
    )


def _meet(
    reports: dict[int, Any], findings: list[Finding], environment: dict[str, str], gpus: int, timeout: float
) -> tuple[Any, list[Finding]]:
    """The meeting, if there was one, and findings about the job; fills in the reports of all ranks."""
    held: list[Any] = []

    def job(part: Any) -> Iterable[Finding]:
        meeting = part.Meeting(timeout)
        held.append(meeting)
        mine = {
            "host": socket.gethostname(),
            "gpus": gpus,
            "findings": [finding.as_dict() for finding in findings],
            "environment": environment,
        }
        reports.update(meeting.collect(mine))
        return list(part.differences(reports, meeting.world)) if meeting.rank == 0 else []

    more = _checked("ranks", "ranks", job)
    if not held:
        more = [_cannot_meet(one.found) for one in more]
    return held[0] if held else None, more


def _text(report: dict[str, Any], problems: bool) -> str:
    lines = [f"megatron-moe-v2 doctor {report['version']} on {report['host']}, {report['seconds']:.1f} s"]
    group = None
    for one in report["findings"]:
        bad = one["status"] in ("warn", "fail")
        if problems and not bad:
            continue
        if one["group"] != group:
            group = one["group"]
            lines.append(f"\n{group}")
        lines.append(f"  {one['status']:<5} {one['id']:<22} {one['found']}")
        if bad:
            lines += [f"{'':31}{word}: {one[key]}" for word, key in (("needed", "needed"), ("do", "fix")) if one[key]]
    counts = {
        status: sum(one["status"] == status for one in report["findings"]) for status in ("fail", "warn", "ok", "skip")
    }
    lines.append("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))
    return "\n".join(lines)
