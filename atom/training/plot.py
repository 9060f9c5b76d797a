"""Plots a training run."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from atom.training.trainer import read_log

logger = logging.getLogger(__name__)


def plot_log(log: Path, picture: Path) -> Path | None:
    """Plot loss and held-out acceptance of each draft step over the number of rows.

    Returns None, with a warning, if matplotlib is not installed: the training must not fail for it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("no %s: install matplotlib (the `train` extra) to have it drawn", picture)
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_log(log)
    measured = [line for line in lines if line.get("held_out")]
    figure, (losses, shares) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for j in range(len(lines[0]["loss"]) if lines else 0):
        losses.plot(
            [x["rows"] for x in lines], [x["loss"][j] for x in lines], label=f"step {j + 1}"
        )
        shares.plot(
            [x["rows"] for x in measured],
            [x["held_out"]["acceptance"][j] for x in measured],
            marker=".",
            label=f"first {j + 1} right",
        )
    for axes, title in ((losses, "soft cross-entropy"), (shares, "held-out acceptance")):
        axes.set(title=title, xlabel="trained rows seen")
        axes.grid(alpha=0.3)
        axes.legend()
    shares.set_ylim(bottom=0)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
    return picture
