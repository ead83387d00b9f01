"""What a check of the doctor is: a function that returns findings, and never keeps the others from running."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = [
    "FAIL",
    "OK",
    "SKIP",
    "WARN",
    "Check",
    "Finding",
    "Status",
    "guarded",
    "numbers",
    "one_line",
    "output_of",
    "worst",
]

Status = Literal["ok", "warn", "fail", "skip"]
OK: Status = "ok"
WARN: Status = "warn"
FAIL: Status = "fail"
SKIP: Status = "skip"

_RANK: dict[Status, int] = {"skip": 0, "ok": 1, "warn": 2, "fail": 3}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One answer.

    Attributes:
        id: stable name of the check.
        group: what it is about, for the reader: system, nccl, deep_ep, libraries, jit, environment, backend, ...
        status: ``ok``; ``warn`` works, but look; ``fail`` does not work; ``skip`` does not apply here.
        found: what is here.
        needed: what should be, where that says something.
        fix: what to do, where there is something to do.
    """

    id: str
    group: str
    status: Status
    found: str
    needed: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


Check = Callable[[], Iterable[Finding]]


def guarded(name: str, group: str, check: Check) -> list[Finding]:
    """The findings of a check; if it raises, one that says so."""
    try:
        return list(check())
    except (Exception, SystemExit) as error:
        text = one_line(f"{type(error).__name__}: {error}")
        return [
            Finding(
                id=name,
                group=group,
                status=WARN,
                found=f"this check could not run: {text}",
                needed="a check that runs",
                fix="Report it; the other findings do not depend on it.",
            )
        ]


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest status; ``ok`` where nothing applies."""
    return max((finding.status for finding in findings), key=_RANK.__getitem__, default=OK)


def one_line(text: str, limit: int = 400) -> str:
    """Text without line breaks, its middle cut out where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def numbers(version: str | None) -> tuple[int, ...]:
    """``"2.30.4+cuda13"`` as ``(2, 30, 4)``, to compare."""
    found = re.match(r"\D*(\d+(?:\.\d+)*)", version or "")
    return tuple(map(int, found[1].split("."))) if found else ()


def output_of(command: Sequence[str], timeout: float = 10.0) -> str | None:
    """Standard output of a command; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
