"""What `_trace.summary` found, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom.bench.report import markdown_table


def trace_markdown(trace: Mapping[str, Any], copy_bytes_per_s: float | None = None) -> str:
    """A line with the step as a whole, a table by class, and one by kernel.

    Args:
        copy_bytes_per_s: what bandwidths are compared with; None leaves the column empty.
    """
    return "\n\n".join(
        (
            _line(trace),
            classes_markdown(trace, copy_bytes_per_s),
            kernels_markdown(trace["kernels"], "step"),
        )
    )


def _line(trace: Mapping[str, Any]) -> str:
    idle = max(trace["step_us"] - trace["busy_us"] - (trace["gap_us"] or 0.0), 0.0)
    gap = "none seen"
    if trace["gap_us"] is not None:
        gap = f"{trace['gap_us']:.0f} us (longest {trace['longest_gap_us']:.0f})"
    return (
        f"A step of the trace takes {trace['step_us']:.0f} us, of which the device works "
        f"{trace['busy_us']:.0f}; gap between steps {gap}; other idle time {idle:.0f} us. "
        f"{trace['launches']:.0f} kernels and copies, {trace['launches'] / trace['layers']:.1f} "
        f"for each of {trace['layers']} layers. {trace['steps']} steps."
    )


def classes_markdown(trace: Mapping[str, Any], copy_bytes_per_s: float | None) -> str:
    rows = [
        (
            row["class"],
            f"{row['calls']:.1f}",
            f"{row['us']:.1f}",
            f"{100 * row['share']:.0f} %",
            "" if row["bytes"] is None else f"{row['bytes'] / 1e9:.3g}",
            "" if row["bytes_per_s"] is None else f"{row['bytes_per_s'] / 1e9:.0f}",
            ""
            if row["bytes_per_s"] is None or copy_bytes_per_s is None
            else f"{100 * row['bytes_per_s'] / copy_bytes_per_s:.0f} %",
        )
        for row in trace["classes"]
    ]
    header = ["class", "calls a step", "us a step", "share", "GB", "GB/s", "of copy"]
    return markdown_table(header, rows)


def kernels_markdown(kernels: list[dict[str, Any]], unit: str) -> str:
    rows = [
        (
            f"`{row['kernel']}`",
            row["class"],
            f"{row['calls']:.1f}",
            f"{row['us']:.1f}",
            f"{row['us'] / row['calls']:.1f}",
            f"{100 * row['share']:.1f} %",
        )
        for row in kernels
    ]
    header = ["kernel", "class", f"calls a {unit}", f"us a {unit}", "us a call", "share"]
    return markdown_table(header, rows)
