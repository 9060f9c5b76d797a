"""What compare_peers.py found, as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _peer_process import Peer

from atom.bench.report import environment_markdown, markdown_table

Speeds = Mapping[str, Mapping[str, Sequence[float | None]]]


@dataclass
class Found:
    """Attributes:
    speeds: tokens/s in each round, by engine and case; None where every run was disturbed.
    kept: the share of `decode-1` kept beside a neighbour, by engine.
    bandwidth: bytes/s.
    beside: the bandwidth around each round's `decode-1`, by engine.
    discarded: runs that others disturbed.
    """

    speeds: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    kept: dict[str, list[float]] = field(default_factory=dict)
    bandwidth: list[float] = field(default_factory=list)
    beside: dict[str, list[float]] = field(default_factory=dict)
    discarded: int = 0
    rounds: int = 0


def rows(found: Found, peers: Sequence[Peer], cases: Sequence[str]) -> list[dict[str, Any]]:
    """Medians of every engine; of ours over the best peer of as many bits, within each round, and
    of the share of the bandwidth, the median and the range.
    """
    clean = {
        name: {case: [speed for speed in speeds[case] if speed] for case in cases}
        for name, speeds in found.speeds.items()
    }
    medians = {
        name: {case: statistics.median(values) for case, values in speeds.items() if values}
        for name, speeds in clean.items()
    }
    made: list[dict[str, Any]] = []
    for peer in peers:
        row: dict[str, Any] = {"engine": peer.name, "bits": peer.bits, "speeds": medians[peer.name]}
        if peer.engine == "atom":
            rivals = [p.name for p in peers if peer.is_rival(p)]
            row["ratios"] = _over_the_best(found.speeds, medians, peer.name, rivals)
        if peer.token_bytes is not None and peer.name in found.beside:
            read = [speed and speed * peer.token_bytes for speed in found.speeds[peer.name][_READS]]
            row["share"] = _ratios(read, found.beside[peer.name])
        if peer.name in found.kept:
            row["kept"] = statistics.median(found.kept[peer.name])
        row["runs"] = {case: len(values) for case, values in clean[peer.name].items()}
        made.append(row)
    return made


# The case that reads all weights for each token.
_READS = "decode-1"


def _over_the_best(
    speeds: Speeds, medians: Mapping[str, Mapping[str, float]], name: str, rivals: Sequence[str]
) -> dict[str, tuple[float, float, float]]:
    made = {}
    for case in medians[name]:
        if there := [rival for rival in rivals if case in medians[rival]]:
            best = max(there, key=lambda rival: medians[rival][case])
            if found := _ratios(speeds[name][case], speeds[best][case]):
                made[case] = found
    return made


def _ratios(
    these: Sequence[float | None], those: Sequence[float | None]
) -> tuple[float, float, float] | None:
    """Median, least and most of the rounds that have both."""
    found = [a / b for a, b in zip(these, those, strict=True) if a and b]
    return (statistics.median(found), min(found), max(found)) if found else None


def to_markdown(report: dict[str, Any]) -> str:
    """The table of a report, and where it was made."""
    cases, results = report["cases"], report["results"]
    with_kept = any("kept" in row for row in results)
    with_share = any(row.get("share") for row in results)
    header = ["engine", "bits", *(f"{case} tok/s" for case in cases)]
    header += ["kept beside a neighbour"] if with_kept else []
    header += ["of the bandwidth"] if with_share else []
    lines = []
    for row in results:
        cells = [row["engine"], row["bits"]]
        for case in cases:
            ratio = row.get("ratios", {}).get(case)
            speed = row["speeds"].get(case)
            cells.append("" if speed is None else f"{speed:.1f}")
            if ratio is not None:
                cells[-1] += " ({:.2f}x, {:.2f} to {:.2f})".format(*ratio)
        if with_kept:
            cells.append(f"{row['kept']:.2f}" if "kept" in row else "")
        if with_share:
            share = row.get("share")
            cells.append("" if share is None else "{:.2f} ({:.2f} to {:.2f})".format(*share))
        lines.append(cells)
    note = (
        "In brackets: over the best peer of as many bits, in each round, the median and the range. "
        f"{report['rounds']} rounds; {report['discarded']} runs were thrown away because others "
        "computed."
    )
    return "\n\n".join(
        (markdown_table(header, lines), note, environment_markdown(report["environment"]))
    )
