"""Draws what each layout delivers: docs/img/token_layout.svg and docs/img/expert_layout.svg.

    python scripts/draw_layouts.py            # writes both
    python scripts/draw_layouts.py --check    # exit status 1 if a file is not what would be written

The standard library alone. The pictures are computed from one small routing, ``ROUTING``, by the rules of the layouts.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "img"

ROUTING = (
    {"A": (0, 2), "B": (0, 1), "C": (2, 3)},
    {"D": (1, 3), "E": (0, 2), "F": (2, 3)},
)
"""Of each rank: its tokens and the experts that they chose."""

LOCAL_EXPERTS = 2
ALIGNMENT = 2
COLOURS = {"A": "#3b6ea5", "B": "#c46210", "C": "#3e8242", "D": "#8a5480", "E": "#c23b3e", "F": "#2f7f86"}

ROW, GAP, PITCH = 22, 5, 27
TOP, PANEL_GAP = 64, 26
WIDTH = 860


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a column: a token, or padding (an empty name); ``expert`` where rows are grouped."""

    token: str
    expert: int | None = None


def token_rows(rank: int) -> list[Row]:
    """What ``rank`` receives in the token layout: every token with an expert there, once."""
    owned = range(rank * LOCAL_EXPERTS, (rank + 1) * LOCAL_EXPERTS)
    return [Row(token=name) for own in ROUTING for name, experts in own.items() if set(experts) & set(owned)]


def expert_rows(rank: int, alignment: int) -> list[Row]:
    """The same by expert: a row for each (token, local expert), each group padded to ``alignment``."""
    rows = []
    for expert in range(rank * LOCAL_EXPERTS, (rank + 1) * LOCAL_EXPERTS):
        group = [Row(token=name, expert=expert) for own in ROUTING for name, chosen in own.items() if expert in chosen]
        rows += group + [Row(token="", expert=expert)] * (-len(group) % alignment)
    return rows


@dataclass(frozen=True, kw_only=True)
class Column:
    """Rows of all ranks under one another, ``x`` to ``x + width``."""

    title: str
    x: int
    width: int
    ranks: list[list[Row]]


class Picture:
    """Columns from left to right, with an arrow from each row to those of the next column that it becomes."""

    def __init__(self, title: str, columns: list[Column]) -> None:
        self.title, self.columns = title, columns
        heights = [max(len(column.ranks[rank]) for column in columns) * PITCH for rank in range(len(ROUTING))]
        self.starts = [TOP + 26 + sum(heights[:rank]) + rank * (PANEL_GAP + 34) for rank in range(len(ROUTING))]
        self.heights = heights
        self.height = self.starts[-1] + heights[-1] + 20

    def svg(self) -> str:
        panels = [part for rank in range(len(ROUTING)) for part in self._panel(rank)]
        titles = [
            f'<text x="{one.x + one.width / 2:g}" y="52" text-anchor="middle" font-weight="bold">{one.title}</text>'
            for one in self.columns
        ]
        arrows = [
            part
            for left, right in zip(self.columns, self.columns[1:], strict=False)
            for part in self._arrows(left, right)
        ]
        rows = [part for column in self.columns for part in self._rows(column)]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
                f'height="{self.height}" font-family="Helvetica, Arial, sans-serif" font-size="13" role="img">',
                f"<title>{self.title}</title>",
                f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="#ffffff"/>',
                f'<text x="{WIDTH / 2:g}" y="26" text-anchor="middle" font-size="16">{self.title}</text>',
                *panels,
                *titles,
                *arrows,
                *rows,
                "</svg>\n",
            ]
        )

    def _panel(self, rank: int) -> list[str]:
        start, first = self.starts[rank] - 30, rank * LOCAL_EXPERTS
        label = f"rank {rank}: experts {first} to {first + LOCAL_EXPERTS - 1}"
        return [
            f'<rect x="10" y="{start}" width="{WIDTH - 20}" height="{self.heights[rank] + 40}" rx="6" fill="#f3f4f6"/>',
            f'<text x="22" y="{start + 19}" fill="#555555">{label}</text>',
        ]

    def _y(self, rank: int, row: int) -> int:
        return self.starts[rank] + row * PITCH

    def _arrows(self, left: Column, right: Column) -> list[str]:
        """Rows of the leftmost column travel to every rank; later columns are made on one rank."""
        parts = []
        for source, rows in enumerate(left.ranks):
            for number, row in enumerate(rows):
                for target, received in enumerate(right.ranks):
                    if left is not self.columns[0] and target != source:
                        continue
                    for place, other in enumerate(received):
                        if other.token == row.token:
                            parts.append(self._arrow(left, right, (source, number), (target, place), row.token))
        return parts

    def _arrow(self, left: Column, right: Column, start: tuple[int, int], end: tuple[int, int], token: str) -> str:
        x0, y0 = left.x + left.width, self._y(*start) + ROW / 2
        x1, y1 = right.x - 2, self._y(*end) + ROW / 2
        bend = (x1 - x0) / 2
        return (
            f'<path d="M{x0:g},{y0:g} C{x0 + bend:g},{y0:g} {x1 - bend:g},{y1:g} {x1:g},{y1:g}" fill="none" '
            f'stroke="{COLOURS[token]}" stroke-width="1.6" stroke-opacity="0.75"/>'
        )

    def _rows(self, column: Column) -> list[str]:
        parts = []
        for rank, rows in enumerate(column.ranks):
            for number, row in enumerate(rows):
                x, y, middle = column.x, self._y(rank, number), column.x + column.width / 2
                fill = COLOURS[row.token] if row.token else "#ffffff"
                edge = "" if row.token else ' stroke="#888888" stroke-dasharray="4 3"'
                colour = "#ffffff" if row.token else "#666666"
                text = f"{row.token}{self._choice(column, row)}" if row.token else "zeros"
                parts += [
                    f'<rect x="{x}" y="{y}" width="{column.width}" height="{ROW}" rx="3" fill="{fill}"{edge}/>',
                    f'<text x="{middle:g}" y="{y + 16}" text-anchor="middle" fill="{colour}">{text}</text>',
                ]
            parts += self._groups(column, rank, rows)
        return parts

    def _choice(self, column: Column, row: Row) -> str:
        """Behind an own token, the experts that it chose."""
        if column is not self.columns[0]:
            return ""
        chosen = next(own[row.token] for own in ROUTING if row.token in own)
        return f" → {', '.join(map(str, chosen))}"

    def _groups(self, column: Column, rank: int, rows: list[Row]) -> list[str]:
        """A bracket with the expert's number beside each group."""
        parts = []
        for expert in sorted({row.expert for row in rows if row.expert is not None}):
            places = [number for number, row in enumerate(rows) if row.expert == expert]
            top, bottom = self._y(rank, places[0]), self._y(rank, places[-1]) + ROW
            x = column.x + column.width + 6
            parts += [
                f'<path d="M{x},{top} h6 V{bottom} h-6" fill="none" stroke="#555555"/>',
                f'<text x="{x + 12}" y="{(top + bottom) / 2 + 5:g}" fill="#333333">expert {expert}</text>',
            ]
        return parts


def pictures() -> dict[str, str]:
    """File name to SVG text."""
    ranks = range(len(ROUTING))
    own = Column(title="own tokens", x=24, width=100, ranks=[[Row(token=name) for name in one] for one in ROUTING])
    received = Column(title="received", x=340, width=90, ranks=[token_rows(rank) for rank in ranks])
    grouped = Column(title="grouped here", x=640, width=90, ranks=[expert_rows(rank, 1) for rank in ranks])
    slots = Column(title="received", x=520, width=90, ranks=[expert_rows(rank, ALIGNMENT) for rank in ranks])
    token = Picture("Token layout: each token once, grouped by expert after it arrived", [own, received, grouped])
    expert = Picture(f"Expert layout: delivered by expert, here padded to multiples of {ALIGNMENT}", [own, slots])
    return {"token_layout.svg": token.svg(), "expert_layout.svg": expert.svg()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    check = parser.parse_args().check
    differing = []
    for name, text in pictures().items():
        path = FOLDER / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        differing.append(name)
        if not check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(f"{'differ' if check else 'written'}: {', '.join(differing) or 'none'}")
    return int(check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
