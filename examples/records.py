"""The log of a run: one JSON object a step, a progress bar, and the closing line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

Record = dict[str, Any]


def require_writable(script: str, places: list[tuple[str, Path]]) -> None:
    """End this rank, like every other, where the run could not write one of its files; each comes with its option."""
    for option, file in places:
        file = file.absolute()
        there = next(place for place in (file, *file.parents) if os.path.exists(place))
        if there != file and not there.is_dir():
            raise SystemExit(f"{script}: {option}: cannot write {file}: {there} is no folder")
        if not os.access(there, os.W_OK):
            raise SystemExit(f"{script}: {option}: cannot write {file}: {there} is not writable")


def smoothed(losses: list[float], window: int = 10) -> float:
    """Mean of the last ``window`` losses."""
    tail = losses[-window:]
    return sum(tail) / len(tail)


def trajectory_line(records: list[Record]) -> str:
    """First step's loss against the mean of the last ten."""
    losses = [record["loss"] for record in records]
    if not losses:
        return "loss trajectory: no step was taken"
    first, last = losses[0], smoothed(losses)
    return f"loss trajectory: first={first:.2f} last={last:.2f} decreased={last < first}"


def pretraining_text(record: Record) -> str:
    """What the progress bar says of a pretraining step."""
    busiest = max(max(shares) * len(shares) for shares in record["load"])
    return (
        f"loss {record['loss']:.3f}, grad norm {record['grad_norm']:.2f}, "
        f"{record['tokens_per_s']:,.0f} tokens/s, busiest expert {busiest:.1f}x"
    )


def read_log(path: Path) -> list[Record]:
    """The records of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class StepLog:
    """Writes records to a file and shows progress; on ranks other than the first it does nothing.

    Args:
        path: JSON lines; records of steps after ``start`` are dropped, earlier ones are kept (a resumed run goes on).
        start: steps already taken.
        steps: steps of the whole run.
        active: whether this is the first rank.
        describe: the text beside the bar.
    """

    def __init__(
        self,
        path: Path,
        *,
        start: int,
        steps: int,
        active: bool,
        describe: Callable[[Record], str] = pretraining_text,
    ) -> None:
        self.records: list[Record] = []
        self._active, self._steps, self._bar, self._describe = active, steps, None, describe
        if not active:
            return
        if start and path.exists():
            self.records = [record for record in read_log(path) if record["step"] <= start]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        for record in self.records:
            self._write(record)
        self._bar = _progress_bar(start, steps)

    def _write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def add(self, record: Record) -> None:
        if not self._active:
            return
        self.records.append(record)
        self._write(record)
        text = self._describe(record)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(1)
        elif record["step"] % 10 == 0 or record["step"] in (1, self._steps):
            print(f"step {record['step']}/{self._steps}: {text}", flush=True)

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._active:
            self._file.close()
        if self._bar is not None:
            self._bar.close()


def _progress_bar(start: int, steps: int) -> Any:
    """A tqdm bar on a terminal, None where tqdm is missing or output goes to a file."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True)
