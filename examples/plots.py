"""Pictures of a run: the loss curve, and how evenly the router loads the experts."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from records import Record, smoothed

STYLE = {
    "figure.dpi": 130,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
}

Other = tuple[str, list[Record]]
"""Another run to compare with: its name and its records."""


def draw(records: list[Record], out: Path, *, vocab: int, other: Other | None = None) -> list[Path]:
    """Write ``loss.png`` and ``expert_load.png``; an empty list where matplotlib is missing or no step was taken."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    if not records:
        return []
    mpl.use("Agg")
    with mpl.rc_context(STYLE):
        return [_loss(records, out / "loss.png", vocab, other), _load(records, out / "expert_load.png")]


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of about a twentieth of the run: centred, narrower at the start, cut off at the end."""
    position = np.arange(len(values))
    reach = np.minimum(max(1, len(values) // 40), position)
    first, end = position - reach, np.minimum(position + reach + 1, len(values))
    total = np.concatenate(([0.0], np.cumsum(values)))
    mean: np.ndarray = (total[end] - total[first]) / (end - first)
    return mean


def _rank_changes(records: list[Record], axes: Any) -> None:
    """Mark where the run was resumed with another number of ranks."""
    for before, after in itertools.pairwise(records):
        if before["ranks"] != after["ranks"]:
            axes.axvline(after["step"] - 0.5, color="0.4", linestyle="--", linewidth=1)
            label = f" {before['ranks']} → {after['ranks']} ranks"
            axes.text(after["step"] - 0.5, 0.03, label, transform=axes.get_xaxis_transform(), color="0.3")


def _loss(records: list[Record], path: Path, vocab: int, other: Other | None = None) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    steps = np.array([record["step"] for record in records])
    figure = Figure(figsize=(9, 6.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    loss = np.array([record["loss"] for record in records])
    end = smoothed(loss.tolist())
    top.axhline(
        math.log(vocab), color="0.45", linestyle=":", label=f"uniform guess, ln {vocab} = {math.log(vocab):.2f}"
    )
    top.plot(steps, loss, color="#9ecae1", linewidth=0.9, label="each step")
    top.plot(steps, smooth(loss), color="#08519c", linewidth=2.2, label="smoothed")
    if other is not None and other[1]:
        theirs = np.array([record["loss"] for record in other[1]])
        share = end / smoothed(theirs.tolist()) - 1
        label = f"{other[0]}, smoothed; this run ends {share:+.2%} beside it"
        place = [record["step"] for record in other[1]]
        top.plot(place, smooth(theirs), color="#d94701", linewidth=1.4, linestyle="--", label=label)
    top.annotate(f"{end:.2f}", (steps[-1], end), (6, 0), textcoords="offset points", color="#08519c", va="center")
    ranks, rate = records[-1]["ranks"], np.median([record["tokens_per_s"] for record in records])
    top.set(title=f"Training loss on {ranks} rank{'s' * (ranks > 1)}, {rate:,.0f} tokens/s", ylabel="nats per token")
    top.legend(loc="upper right", bbox_to_anchor=(1.0, 0.93))
    norm = np.array([record["grad_norm"] for record in records])
    bottom.plot(steps, norm, color="#fdbe85", linewidth=0.9)
    bottom.plot(steps, smooth(norm), color="#d94701", linewidth=1.8)
    bottom.set(title="Gradient norm before clipping", xlabel="step", yscale="log")
    bottom.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    bottom.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    bottom.yaxis.set_minor_formatter(NullFormatter())
    for axes in (top, bottom):
        axes.margins(x=0.01)
    _rank_changes(records, top)
    figure.savefig(path)
    return path


def _load(records: list[Record], path: Path) -> Path:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    steps = np.array([record["step"] for record in records])
    load = np.array([record["load"] for record in records])
    relative = load * load.shape[2]
    blocks, experts = relative.shape[1:]
    shown = sorted({0, blocks // 2, blocks - 1}) if blocks > 3 else list(range(blocks))
    figure = Figure(figsize=(9, 2.6 + 1.9 * len(shown)), layout="constrained")
    rows = figure.subplots(len(shown) + 1, 1, sharex=True, squeeze=False)[:, 0]
    colours = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=max(2.0, float(np.quantile(relative, 0.995))))
    extent = (steps[0] - 0.5, steps[-1] + 0.5, experts - 0.5, -0.5)
    for axes, block in zip(rows, shown, strict=False):
        image = axes.imshow(
            relative[:, block].T, aspect="auto", cmap="RdBu_r", norm=colours, extent=extent, interpolation="nearest"
        )
        axes.set(title=f"Block {block}", ylabel="expert")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=False)
    bar = figure.colorbar(image, ax=list(rows[:-1]), pad=0.01, aspect=30)
    bar.set_label("load / even share (1 = ideal)")
    last = rows[-1]
    last.axhline(1.0, color="0.3", linestyle=":", label="ideal")
    for name, values, colour in (
        ("busiest expert", relative.max(axis=2), "#b2182b"),
        ("idlest expert", relative.min(axis=2), "#2166ac"),
    ):
        last.fill_between(steps, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.15, linewidth=0)
        last.plot(steps, smooth(values.mean(axis=1)), color=colour, linewidth=1.8, label=f"{name}, mean of blocks")
    last.set(title="Spread over experts (band: all blocks)", xlabel="step", ylabel="load / even share")
    last.set_ylim(0, 1.2 * relative.max())
    last.legend(loc="upper right", ncols=3)
    figure.savefig(path)
    return path
