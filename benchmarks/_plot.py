"""Pictures of reports. matplotlib is imported when one is drawn, not before."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_acceptance(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A column for each group of prompts: acceptance by position above, speeds below.

    Args:
        results: those of acceptance.py.
        path: of the PNG; its folder must exist.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[str, list[Mapping[str, Any]]] = {}
    for r in results:
        label = f"{r['prompts']}, T={r['temperature']:g}, batch {r['batch_size']}"
        groups.setdefault(label, []).append(r)
    figure = Figure(figsize=(max(6.0, 4.5 * len(groups)), 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(groups), squeeze=False, sharey="row")
    for column, (label, group) in enumerate(groups.items()):
        _draw_positions(axes[0][column], label, group)
        _draw_speeds(axes[1][column], group)
    axes[0][0].set_ylabel("share of verified steps")
    axes[1][0].set_ylabel(f"tokens/s against {results[0]['arm']}")
    figure.savefig(path, dpi=120)
    print(f"wrote {path}", file=sys.stderr)


def _draw_positions(axis: Any, label: str, group: Sequence[Mapping[str, Any]]) -> None:
    drafting = [r for r in group if r["verified_steps"]]
    for r in drafting:
        shares = r["acceptance_per_position"]
        name = f"{r['arm']}: {r['tokens_per_forward']:.2f} tokens/forward"
        axis.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axis.set(title=label, xlabel="draft position", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    if drafting:
        axis.legend(fontsize=8)


def _draw_speeds(axis: Any, group: Sequence[Mapping[str, Any]]) -> None:
    ratios = [r["speedup"] for r in group]
    bars = axis.bar(range(len(group)), ratios)
    axis.bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios])
    axis.set_xticks(range(len(group)), [r["arm"] for r in group], rotation=30, ha="right")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.grid(axis="y", alpha=0.3)


def plot_steps(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Milliseconds of a decode step over the number of sequences, measured and at the roofline, a
    line for each context, a picture for each model.

    Args:
        reports: those of `cpu_roofline.py --growth`.
        path: of the PNG; its folder must exist.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(reports), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(reports), squeeze=False)[0]
    for axis, report in zip(axes, reports, strict=True):
        contexts: dict[int, list[Mapping[str, Any]]] = {}
        for row in report["steps"]:
            contexts.setdefault(row["context"], []).append(row)
        for context, rows in contexts.items():
            batches, seconds = [r["batch"] for r in rows], [r["seconds"] for r in rows]
            least = [1e3 * r["seconds"] * r["of_roofline"] for r in rows]
            (line,) = axis.plot(
                batches, [1e3 * s for s in seconds], marker="o", label=f"{context} tokens"
            )
            axis.plot(batches, least, linestyle=":", color=line.get_color())
        axis.set(title=report["model"], xlabel="sequences", ylabel="ms a step (dotted: roofline)")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}", file=sys.stderr)
