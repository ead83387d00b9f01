"""Charts as SVG text, without a library: horizontal bars with a spread, and lines over sizes.

Both return one ``<svg>`` element that scales with the page and needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["bars", "lines"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#8c564b")
_WIDTH, _LEFT, _ROW, _TOP = 720, 120, 26, 44
_TEXT = 'font-family="system-ui, sans-serif" font-size="13" fill="#222"'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'style="max-width:100%;height:auto" role="img" aria-label="{escape(title)}">'
        f'<rect width="100%" height="100%" fill="#fff"/>{_text(12, 22, title, "start", bold=True)}'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False, colour: str | None = None) -> str:
    style = _TEXT.replace("#222", colour) if colour else _TEXT
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}{weight}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#ddd", width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ticks(top: float) -> list[float]:
    """From 0 to at least ``top``, in steps of 1, 2 or 5 times a power of ten."""
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * number for number in range(math.ceil(top / step) + 1)]


def bars(title: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """One bar for each ``(label, low, middle, high)``, as long as the middle, with a mark from low to high."""
    end, right = max(high for *_, high in rows), _WIDTH - 80
    parts = []
    for number, (label, low, middle, high) in enumerate(rows):
        y = _TOP + number * _ROW
        at = [_LEFT + value / end * (right - _LEFT) for value in (low, middle, high)]
        parts += [
            _text(_LEFT - 8, y + 15, label, "end"),
            f'<rect x="{_LEFT}" y="{y + 3}" width="{at[1] - _LEFT:.1f}" height="{_ROW - 8}" fill="{_COLOURS[0]}"/>',
            _line(at[0], y + 12, at[2], y + 12, "#222", 1.5),
            *(_line(x, y + 8, x, y + 16, "#222", 1.5) for x in (at[0], at[2])),
            _text(at[2] + 6, y + 16, _short(middle), "start"),
        ]
    return _svg(_TOP + len(rows) * _ROW + 8, title, parts)


def lines(title: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A line of ``(x, y)`` points for each name; x in powers of two, y from 0."""
    points = [point for one in series.values() for point in one]
    low, high = (bound(math.log2(x) for x, _ in points) for bound in (min, max))
    ticks = _ticks(max(y for _, y in points))
    left, right, bottom = 70, _WIDTH - 130, 320
    span = high - low or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (math.log2(x) - low) / span * (right - left), bottom - y / ticks[-1] * (bottom - _TOP)

    parts = []
    for tick in ticks:
        y = place(2.0**low, tick)[1]
        parts += [_line(left, y, right, y), _text(left - 8, y + 4, _short(tick), "end")]
    for size in sorted({x for x, _ in points}):
        parts.append(_text(place(size, 0)[0], bottom + 18, f"{size:,.0f}", "middle"))
    parts.append(_text((left + right) / 2, bottom + 38, x_label, "middle"))
    for number, (name, one) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        at = [place(*point) for point in sorted(one)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at]
        legend = _TOP + 8 + number * 20
        parts += [
            _line(right + 14, legend, right + 32, legend, colour, 3),
            _text(right + 38, legend + 4, name, "start", colour=colour),
        ]
    return _svg(bottom + 50, title, parts)
