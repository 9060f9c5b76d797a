"""Plots a training run."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from atom_train.trainer import read_log

logger = logging.getLogger(__name__)


def plot_log(log: Path, picture: Path) -> Path | None:
    """Plot the loss of each draft step and the held-out tokens per forward of each temperature.

    Returns None, with a warning, if matplotlib is not installed: the training must not fail for it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("no %s: install matplotlib (`atom-train[plot]`) to have it drawn", picture)
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_log(log)
    figure, (losses, kept) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rows = [line["rows"] for line in lines]
    for j in range(len(lines[0]["loss"]) if lines else 0):
        losses.plot(rows, [line["loss"][j] for line in lines], label=f"draft {j + 1}")
    measured = [line for line in lines if line.get("held_out")]
    for temperature in measured[0]["held_out"] if measured else ():
        tokens = [1 + sum(line["held_out"][temperature]["accepted"]) for line in measured]
        rows = [line["rows"] for line in measured]
        kept.plot(rows, tokens, marker=".", label=f"T = {temperature}")
    for axes, title in ((losses, "loss"), (kept, "held-out tokens per forward")):
        axes.set(title=title, xlabel="trained rows seen")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
    return picture
