"""The benchmark's results as one page with charts: HTML, or Markdown with an SVG file beside it for each chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import tables
from .charts import bars, lines
from .measure import PHASES

__all__ = ["SUFFIXES", "write"]

SUFFIXES = (".html", ".md")

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>megatron-moe-v2 bench</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}
pre{{overflow-x:auto;background:#f6f6f6;padding:.8em;font-size:13px}}</style>
<h1>megatron-moe-v2 bench</h1>
{body}
</html>
"""

Record = dict[str, Any]


def write(path: Path, facts: Record, found: Sequence[Record], swept: Sequence[Record]) -> None:
    """Write the page, and with Markdown its charts ``NAME-1.svg``, ... beside it."""
    sections = [*_results(facts, found), *_sweeps(swept)]
    machine, _, method = tables.header(facts).partition("\n\n")
    if path.suffix == ".html":
        body = [f"<pre>{escape(machine)}</pre>", f"<p>{escape(method)}</p>"]
        for title, drawn, text in sections:
            body += [f"<h2>{escape(title)}</h2>", *drawn, f"<pre>{escape(text)}</pre>"]
        body.append(f"<details><summary>header</summary><pre>{escape(json.dumps(facts, indent=1))}</pre></details>")
        path.write_text(_PAGE.format(body="\n".join(body)), encoding="utf-8")
        return
    lines_of_text = ["# megatron-moe-v2 bench", "", "```text", machine, "```", "", method]
    number = 0
    for title, drawn, text in sections:
        lines_of_text += ["", f"## {title}", ""]
        for chart in drawn:
            number += 1
            name = f"{path.stem}-{number}.svg"
            path.with_name(name).write_text(chart, encoding="utf-8")
            lines_of_text += [f"![{title}, chart {number}]({name.replace(' ', '%20')})", ""]
        lines_of_text += ["```text", text, "```"]
    path.write_text("\n".join(lines_of_text) + "\n", encoding="utf-8")


Section = tuple[str, list[str], str]  # title, charts, table


def _results(facts: Record, found: Sequence[Record]) -> list[Section]:
    drawn = []
    for phase in PHASES:
        rows = [
            (one["dispatcher"], one["p10_us"], one["p50_us"], one["p90_us"]) for one in found if one["phase"] == phase
        ]
        if rows:
            drawn.append(bars(f"{phase}: µs, p50 with p10 to p90 (shorter is better)", rows))
    return [("Results", drawn, tables.table(found, by_rank="beside" in facts))]


def _sweeps(swept: Sequence[Record]) -> list[Section]:
    sections = []
    for over in dict.fromkeys(one["over"] for one in swept):
        some = [one for one in swept if one["over"] == over]
        series: dict[str, list[tuple[float, float]]] = {}
        for one in some:
            series.setdefault(one["dispatcher"], []).append((one[over], one["p50_us"] / 1e3))
        chart = lines(f"forward+backward: ms, p50, by {tables.SWEPT[over]}", tables.SWEPT[over], series)
        sections.append((f"Sweep over {tables.SWEPT[over]}", [chart], tables.sweep_table(some)))
    return sections
