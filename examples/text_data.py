"""Byte-level text in fixed windows, in an order that depends on the seed and the batch number alone.

The text is the Python standard library's own sources, found on the machine, or any file or directory. Batch ``b``
holds the same windows at any rank count; rank ``r`` of ``R`` takes the ``r``-th share of it. The last batch of a pass
over the text is short, so the last ranks may get no window: they take part in the step with zero tokens.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's share of a batch.

    Attributes:
        inputs: int64 ``[B, S]``, B may be 0.
        targets: int64 ``[B, S]``, the byte after each input byte.
        global_tokens: number of targets over all ranks.
    """

    inputs: Tensor
    targets: Tensor
    global_tokens: int


def standard_library() -> Path:
    """Directory of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_text(path: Path | None) -> bytes:
    """Read a file, or every file below a directory in sorted order; None reads the standard library's ``.py`` files.

    Raises:
        FileNotFoundError: there is nothing at ``path``, or nothing in it.
    """
    if path is not None and path.is_file():
        return path.read_bytes()
    root = standard_library() if path is None else path
    files = sorted(file for file in root.rglob("*.py" if path is None else "*") if file.is_file())
    if path is None:
        files = [file for file in files if SKIPPED.isdisjoint(file.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"--data: found no text in {root}; name a file or a directory with --data")
    return b"\n".join(file.read_bytes() for file in files)


class Windows:
    """Shuffled windows over a text.

    Args:
        text: the bytes.
        seq_len: S; a window is S + 1 bytes, and the next one starts S bytes later.
        global_batch: windows in a full batch, over all ranks.
        rank, world: whose share :meth:`batch` returns.
        seed: of the order of windows.

    Raises:
        ValueError: the text is shorter than one window.
    """

    def __init__(self, text: bytes, *, seq_len: int, global_batch: int, rank: int, world: int, seed: int) -> None:
        self.seq_len, self.global_batch, self.seed = seq_len, global_batch, seed
        self.num_windows = (len(text) - 1) // seq_len
        if self.num_windows < 1:
            raise ValueError(f"text: got {len(text)} bytes, expected at least --seq-len + 1 ({seq_len + 1})")
        self.digest = zlib.crc32(text)
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._first, self._end = (global_batch * r // world for r in (rank, rank + 1))
        self._pass, self._order = -1, torch.empty(0, dtype=torch.int64)

    @property
    def batches_per_pass(self) -> int:
        return -(-self.num_windows // self.global_batch)

    def batch(self, number: int) -> Batch:
        """This rank's share of batch ``number`` (from 0)."""
        which_pass, place = divmod(number, self.batches_per_pass)
        if which_pass != self._pass:
            generator = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, "order", which_pass)).encode()))
            self._pass, self._order = which_pass, torch.randperm(self.num_windows, generator=generator)
        windows = self._order[place * self.global_batch : (place + 1) * self.global_batch]
        starts = windows[self._first : self._end] * self.seq_len
        rows = self._bytes[starts[:, None] + torch.arange(self.seq_len + 1)].long()
        return Batch(inputs=rows[:, :-1], targets=rows[:, 1:], global_tokens=windows.numel() * self.seq_len)
