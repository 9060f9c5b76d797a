"""What several_gpus.py found: the tables of a report."""

from __future__ import annotations

from typing import Any

from atom.bench.report import markdown_table

# Sums over the ranks of a layer: behind attention, and behind the experts.
_SUMS_OF_A_LAYER = 2


def named(row: dict[str, Any]) -> str:
    parts = [f"{row['op']} of {row['size']} by {row['implementation']}"]
    if "rows" in row:
        parts.append(f"{row['rows']} rows")
    return ", ".join(parts)


def line_of(row: dict[str, Any]) -> str:
    """A row in words, for whoever watches."""
    return f"{named(row)}: {1e6 * row['seconds']:.1f} us"


def to_markdown(report: dict[str, Any]) -> str:
    """The table of a report, as this program writes it to JSON."""
    sums = {
        (row["implementation"], row["rows"]): row["seconds"]
        for row in report["results"]
        if row["op"] == "all_reduce_add_rms_norm"
    }
    rows = [
        (
            row["op"],
            row["implementation"],
            row["rows"],
            f"{1e6 * row['seconds']:.1f}",
            _share(row, sums),
        )
        for row in report["results"]
    ]
    parts = [f"{report['ranks']} ranks."]
    if rows:
        parts.append(markdown_table(["op", "by", "rows", "us", "its two sums"], rows))
    if report["faults"]:
        parts.append("Wrong:\n\n" + "\n".join(f"- {fault}" for fault in report["faults"]))
    if report["left_out"]:
        left = [f"- {named(row)}: {row['why']}" for row in report["left_out"]]
        parts.append("Not run:\n\n" + "\n".join(left))
    return "\n\n".join(parts)


def _share(row: dict[str, Any], sums: dict[tuple[str, int], float]) -> str:
    """Of a layer's time, what its sums took when they were measured alone."""
    alone = sums.get((row["implementation"], row["rows"]))
    if row["op"] != "layer" or alone is None:
        return ""
    return f"{100 * _SUMS_OF_A_LAYER * alone / row['seconds']:.0f} %"
