"""What decode_roofline.py found: rows, and the tables of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from _decode_shapes import SHAPES
from _trace_report import trace_markdown

from atom.bench.report import markdown_table


@dataclass
class Report:
    """Rows that were measured, what was not run and why, and which kernels ran."""

    copy_bytes_per_s: float
    results: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    ops: dict[str, str] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        """Add what follows from a row's seconds and bytes."""
        row["bytes_per_s"] = row["of_copy"] = None
        if row["bytes"] is not None:
            row["bytes_per_s"] = row["bytes"] / row["seconds"]
            row["of_copy"] = row["bytes_per_s"] / self.copy_bytes_per_s
        row["tokens_per_s"] = row["tokens"] / row["seconds"]
        self.results.append(row)


def named(about: Mapping[str, Any]) -> str:
    parts = [f"shape {about['shape']}", about["by"]]
    keys = ("k", "batch", "context", "mode")
    parts += [f"{name} {about[name]}" for name in keys if name in about]
    return ", ".join(parts)


def line_of(row: Mapping[str, Any]) -> str:
    """A row in words, for whoever watches."""
    parts = [f"{named(row)}: {1e3 * row['seconds']:.2f} ms a step"]
    if row["of_copy"] is not None:
        parts.append(f"{100 * row['of_copy']:.0f} % of copy")
    for name in ("host", "gap"):
        if row[f"{name}_seconds"] is not None:
            parts.append(f"{name} {1e6 * row[f'{name}_seconds']:.0f} us")
    return ", ".join(parts)


def to_markdown(report: Mapping[str, Any]) -> str:
    """The tables of a report, as decode_roofline.py writes it to JSON."""
    parts = [
        f"A copy within the device moves {report['copy_bytes_per_s'] / 1e9:.0f} GB/s, reads and "
        f"writes together."
    ]
    if report["results"]:
        parts.append(_steps(report["results"]))
    if report["starts"]:
        parts.append(_starts(report["starts"]))
    shapes = dict.fromkeys(row["shape"] for row in (*report["results"], *report["starts"]))
    parts += [f"- `{name}`: {SHAPES[name].about}" for name in shapes]
    if report["faults"]:
        parts.append("Failed:\n\n" + "\n".join(f"- {fault}" for fault in report["faults"]))
    if report["left_out"]:
        left = [f"- {named(row)}: {row['why']}" for row in report["left_out"]]
        parts.append("Not run:\n\n" + "\n".join(left))
    parts += [f"Ops, {name}:\n\n```\n{table}\n```" for name, table in report["ops"].items()]
    return "\n\n".join(parts)


def _steps(results: list[dict[str, Any]]) -> str:
    header = ["shape", "by", "batch", "context", "k", "step (ms)", "device (ms)", "host (us)",
              "gap (us)", "on graphs", "GB", "GB/s", "of copy", "tokens/s"]  # fmt: skip
    rows = [
        (
            r["shape"],
            f"{r['by']} ({r['mode']})",
            r["batch"],
            r["context"],
            r["k"],
            f"{1e3 * r['seconds']:.2f}",
            _shown(r["device_seconds"], 1e3, ".2f"),
            _shown(r["host_seconds"], 1e6, ".0f"),
            _shown(r["gap_seconds"], 1e6, ".0f"),
            _shown(r["replayed"], 100, ".0f", " %"),
            _shown(r["bytes"], 1e-9, ".2f"),
            _shown(r["bytes_per_s"], 1e-9, ".0f"),
            _shown(r["of_copy"], 100, ".0f", " %"),
            f"{r['tokens_per_s']:.0f}",
        )
        for r in results
    ]
    return markdown_table(header, rows)


def _starts(starts: list[dict[str, Any]]) -> str:
    header = ["start of", "layers", "k", "seconds", "graphs", "captured in", "kernels compiled"]
    rows = [
        (r["shape"], r["layers"], r["k"], f"{r['seconds']:.1f}", r["graphs"],
         f"{r['capture_seconds']:.1f} s", r["compiled"])
        for r in starts
    ]  # fmt: skip
    return markdown_table(header, rows)


def details_markdown(row: Mapping[str, Any], copy_bytes_per_s: float) -> str:
    """Where the time of one row goes; a sentence if its trace is not there."""
    if row["trace"] is None:
        return f"There is no trace: {row.get('no_trace')}."
    return trace_markdown(row["trace"], copy_bytes_per_s)


def _shown(value: float | None, factor: float, form: str, unit: str = "") -> str:
    return "" if value is None else format(value * factor, form) + unit
