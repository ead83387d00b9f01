"""Sums to solve, a byte at a time: the prompt ``7+5=`` and the answer ``12`` with a newline.

Whether an answer is right can be checked without a model. All prompts have one length, and so have all answers: what
follows the newline does not count.

Legend: N sums, P bytes of a prompt, A bytes of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEWLINE = ord("\n")


def _bytes(lines: list[str], width: int) -> Tensor:
    """int64 ``[N, width]``; short lines are filled with newlines."""
    rows = [list(line.encode().ljust(width, b"\n")) for line in lines]
    return torch.tensor(rows, dtype=torch.int64).view(len(lines), width)


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums of two numbers of up to ``digits`` digits."""

    digits: int = 1

    @property
    def prompt_len(self) -> int:
        return 2 * self.digits + 2

    @property
    def answer_len(self) -> int:
        return self.digits + 2

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """``count`` pairs of numbers, int64 ``[count, 2]``."""
        return torch.randint(10**self.digits, (count, 2), generator=generator)

    def prompts(self, pairs: Tensor) -> Tensor:
        """int64 ``[N, P]``."""
        return _bytes([f"{a:0{self.digits}}+{b:0{self.digits}}=" for a, b in pairs.tolist()], self.prompt_len)

    def answers(self, pairs: Tensor) -> Tensor:
        """The right ones, int64 ``[N, A]``."""
        return _bytes([f"{a + b}\n" for a, b in pairs.tolist()], self.answer_len)

    def written(self, answers: Tensor) -> Tensor:
        """bool ``[N, A]``: the bytes up to the first newline, and that newline."""
        newlines = (answers == NEWLINE).long()
        return newlines.cumsum(1) - newlines == 0

    def rewards(self, pairs: Tensor, answers: Tensor) -> Tensor:
        """float32 ``[N]``: 1 where the answer is right to the last byte and ended, else 0."""
        right = self.answers(pairs)
        return ((answers == right) | ~self.written(right)).all(1).float()

    def show(self, row: Tensor) -> str:
        """A prompt with its answer, as text."""
        return bytes(row.tolist()).decode(errors="replace").split("\n")[0]
