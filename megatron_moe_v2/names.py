"""Names as people type them: case and the characters ``-``, ``_`` and ``.`` do not count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

__all__ = ["named", "squashed"]

_DROPPED = str.maketrans("", "", "-_.")


def squashed(text: str) -> str:
    """What counts of a name."""
    return text.lower().translate(_DROPPED)


def named(names: Iterable[str], aliases: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """An argparse ``type``: the one of ``names`` that is meant; other text as it is, for ``choices`` to refuse.

    Args:
        aliases: further words, each with the name that it stands for.
    """
    meant = {squashed(word): name for word, name in (*(aliases or {}).items(), *((name, name) for name in names))}
    return lambda text: meant.get(squashed(text), text)
