"""What kernels.py found: the tables of a report."""

from __future__ import annotations

from typing import Any

from _trace_report import kernels_markdown

from atom.bench.report import markdown_table


def line_of(row: dict[str, Any]) -> str:
    """A row in words, for whoever watches."""
    shares = f"{100 * row['of_copy']:.0f} % of copy, {100 * row['of_bound']:.0f} % of the bound"
    return f"{named(row)}: {1e6 * row['seconds']:.1f} us, {shares}"


def details_markdown(row: dict[str, Any]) -> str:
    """Where the time of one row goes."""
    if not row.get("kernels"):
        return "There is no trace of its kernels."
    return kernels_markdown(row["kernels"], "call")


def named(row: dict[str, Any]) -> str:
    parts = [f"{row['op']} ({row['sizes']}) by {row['implementation']}"]
    if row["cache"] != "None":
        parts.append(f"cache {row['cache']}")
    parts += [f"{name} {row[name]}" for name in ("batch", "context") if row.get(name)]
    if row.get("queries", 1) > 1:
        parts.append(f"queries {row['queries']}")
    return ", ".join(parts)


def to_markdown(report: dict[str, Any]) -> str:
    """The tables of a report, as this program writes it to JSON."""
    header = ["op", "sizes", "by", "cache", "batch", "context", "queries", "us", "GB", "GB/s",
              "of copy", "TFLOP/s", "of bound", "torch takes", "error"]  # fmt: skip
    rows = [
        (
            r["op"],
            r["sizes"],
            r["implementation"] + ("" if r["how"] in ("graph", "called") else f" ({r['how']})"),
            r["cache"] if r["context"] else "",
            r["batch"],
            r["context"] or "",
            r["queries"] if r["context"] else "",
            f"{1e6 * r['seconds']:.1f}",
            f"{r['bytes'] / 1e9:.3g}",
            f"{r['bytes_per_s'] / 1e9:.0f}",
            f"{100 * r['of_copy']:.0f} %",
            f"{r['operations_per_s'] / 1e12:.3g}" if r["operations"] else "",
            f"{100 * r['of_bound']:.0f} %",
            f"{r['torch_over_this']:.1f} x" if "torch_over_this" in r else "",
            f"{r['error']:.0e}" if "error" in r else "",
        )
        for r in report["results"]
    ]
    parts = [
        f"A copy within the device moves {report['copy_bytes_per_s'] / 1e9:.0f} GB/s, reads and "
        f"writes together; a large product in 16 bits computes "
        f"{report['product_per_s'] / 1e12:.0f} TFLOP/s. The bound is what these two allow for the "
        f"least bytes and operations of a call.",
        *([markdown_table(header, rows)] if rows else []),
    ]
    if report["warmed"]:
        warmed = [(named(r), f"{r['seconds']:.1f} s") for r in report["warmed"]]
        parts.append(markdown_table(["first call", "time"], warmed))
    if report["faults"]:
        parts.append("Wrong:\n\n" + "\n".join(f"- {fault}" for fault in report["faults"]))
    if report["left_out"]:
        left = [f"- {named(row)}: {row['why']}" for row in report["left_out"]]
        parts.append("Not run:\n\n" + "\n".join(left))
    return "\n\n".join(parts)
