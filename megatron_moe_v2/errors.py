"""The error tree.

Every error of the package is a :class:`MoEError`. Wrong values are also ``ValueError``, missing or broken libraries
and failures between ranks also ``RuntimeError``. Each message says what is wrong, what was got, what was expected and
what to change. An error can be sent to other ranks as text (:func:`to_wire`) and raised there with its own type
(:func:`from_wire`).
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BackendError",
    "BufferClosedError",
    "CapacityError",
    "CaptureError",
    "CapturedBufferError",
    "CommunicationError",
    "HandleError",
    "InputError",
    "LimitError",
    "MegatronError",
    "MissingRankError",
    "MoEError",
    "RankMismatchError",
    "SettingsError",
    "from_wire",
    "rank_table",
    "to_wire",
]


class MoEError(Exception):
    """Root of the tree.

    Args:
        what: the field or fact that is wrong.
        got: the value that was found.
        expected: what would have been right.
        fix: what the reader can change.
    """

    def __init__(self, what: str, *, got: object = None, expected: object = None, fix: str = "") -> None:
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if expected is not None:
            parts.append(f"expected {expected}")
        message = ": ".join([parts[0], ", ".join(parts[1:])]) if parts[1:] else what
        super().__init__(f"{message}. {fix}" if fix else message)


class SettingsError(MoEError, ValueError):
    """An environment variable or a setting passed as argument has a value that is not allowed."""


class InputError(MoEError, ValueError):
    """A tensor or argument of a call has the wrong shape, dtype, device or content."""


class LimitError(InputError):
    """The input is sound, but the chosen backend cannot carry it."""


class CapacityError(LimitError):
    """More rows than the ceiling that the buffer was built for."""


class HandleError(MoEError, ValueError):
    """A dispatch handle is used with another buffer, layout or row count, after close, or where it cannot serve."""


class BackendError(MoEError, RuntimeError):
    """A communication library is missing or broken."""


class MegatronError(MoEError, RuntimeError):
    """megatron-core is missing, lacks a name that is replaced, or is configured in a way that cannot work here."""


class BufferClosedError(MoEError, RuntimeError):
    """The buffer was closed, or its process group is gone."""


class CaptureError(MoEError, RuntimeError):
    """Something that cannot be captured was asked for inside a CUDA graph capture."""


class CapturedBufferError(MoEError, RuntimeError):
    """A buffer cannot be closed while a CUDA graph uses it."""


class CommunicationError(MoEError, RuntimeError):
    """A collective failed underneath, usually because another rank died."""


class RankMismatchError(MoEError, RuntimeError):
    """Ranks disagree on what must be equal; the message holds a table of who has what."""


class MissingRankError(RankMismatchError):
    """A rank did not take part within the time-out; the message names it."""


def to_wire(error: BaseException) -> str:
    """``type name: text`` of an error, for another rank."""
    return f"{type(error).__name__}: {error}"


def from_wire(text: str, rank: int) -> MoEError:
    """Rebuild another rank's error with its own type where it is one of ours, else as :class:`RankMismatchError`."""
    name, _, message = text.partition(": ")
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, MoEError):
        return kind(f"on rank {rank}: {message}")
    return RankMismatchError(f"rank {rank} failed with {text}")


def rank_table(entries: Mapping[int, str]) -> str:
    """One line for each different text, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(entries.items()):
        ranks.setdefault(text, []).append(rank)
    return "\n".join(f"  rank {_ranges(have)}: {text}" for text, have in ranks.items())


def _ranges(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)
