"""The reward curve of a fine-tuning run, and how far the policy went from the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from plots import STYLE, smooth
from records import Record


def draw(records: list[Record], out: Path) -> list[Path]:
    """Write ``reward.png``; an empty list where matplotlib is missing or no step was taken."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    if not records:
        return []
    mpl.use("Agg")
    with mpl.rc_context(STYLE):
        return [_reward(records, out / "reward.png")]


def _reward(records: list[Record], path: Path) -> Path:
    from matplotlib.figure import Figure

    steps = np.array([record["step"] for record in records])
    reward, kl = (np.array([record[name] for record in records]) for name in ("reward", "kl"))
    figure = Figure(figsize=(9, 6.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    top.plot(steps, reward, color="#a1d99b", linewidth=0.9, label="each step")
    top.plot(steps, smooth(reward), color="#006d2c", linewidth=2.2, label="smoothed")
    for step, value in ((0, float(reward[:10].mean())), (-1, float(reward[-10:].mean()))):
        top.annotate(f"{value:.2f}", (steps[step], value), (6, 8), textcoords="offset points", color="#006d2c")
    ranks = records[-1]["ranks"]
    title = f"Fraction of sampled answers that are right, {ranks} rank{'s' * (ranks > 1)}"
    top.set(title=title, ylabel="mean reward", ylim=(0, 1.05))
    top.legend(loc="lower right")
    bottom.plot(steps, kl, color="#fdbe85", linewidth=0.9)
    bottom.plot(steps, smooth(kl), color="#d94701", linewidth=1.8)
    bottom.set(title="Divergence from the reference", xlabel="step", ylabel="nats per byte")
    for axes in (top, bottom):
        axes.margins(x=0.01)
    figure.savefig(path)
    return path
