"""The report of gpu_check.py, to which each of its runs on one machine adds."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _decode_report import to_markdown as steps_markdown
from _gpu_goals import goals
from _gpu_parts import PARTS
from _gpu_run import ROOT
from _kernel_report import to_markdown as kernels_markdown
from _rank_report import to_markdown as ranks_markdown

from atom.bench.report import environment_markdown, markdown_table, write_json

_CODE = ("atom/**/*.py", "atom/**/*.h", "atom/**/*.cpp", "benchmarks/*.py", "tests/**/*.py")
_MOST_MODULES = 40
_TABLES = {
    "warm": kernels_markdown,
    "kernels": kernels_markdown,
    "other-kernels": kernels_markdown,
    "ranks": ranks_markdown,
}


class OtherReportError(ValueError):
    """A report is of another machine or of other code."""


def code_digest(root: Path = ROOT) -> str:
    """Tells apart what two runs ran, committed or not."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _CODE for path in root.glob(pattern)}):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:10]


def default_name(device: str, code: str) -> str:
    """Of a report: runs that belong together have the same."""
    return f"gpu-check-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}-{code}.md"


def load_parts(path: Path, key: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that are in a report already; none if there is none.

    Args:
        path: of the Markdown, the JSON is beside it.

    Raises:
        OtherReportError: when its key is another one.
    """
    beside = path.with_suffix(".json")
    if not beside.exists():
        return {}
    report = json.loads(beside.read_text(encoding="utf-8"))
    theirs: dict[str, Any] = report.get("key", {})
    if theirs != dict(key):
        names = sorted({*theirs, *key})
        differing = [name for name in names if theirs.get(name) != key.get(name)]
        told = ", ".join(f"{n} {theirs.get(n)} there, {key.get(n)} here" for n in differing)
        raise OtherReportError(
            f"{beside} is of another machine or other code ({told}): give another --output, or "
            f"--new to begin it again"
        )
    parts: dict[str, Any] = report["parts"]
    return parts


def write(path: Path, report: Mapping[str, Any]) -> str:
    """Write both files; returns the Markdown."""
    text = markdown(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    told = [vars(g) | {"outcome": g.outcome} for g in goals(report["parts"])]
    write_json(path.with_suffix(".json"), {**report, "goals": told})
    return text


def markdown(report: Mapping[str, Any]) -> str:
    parts: Mapping[str, Any] = report["parts"]
    there = [name for name in PARTS if name in parts]
    rows = [(name, verdict(parts[name]), detail(parts[name])) for name in there]
    remaining = [name for name in PARTS if name not in parts]
    text = ["# GPU check"]
    text += [environment_markdown(report["environment"] | report["gpu"])]
    text += [markdown_table(["part", "outcome", ""], rows)]
    if remaining:
        text.append(f"Not run yet: {', '.join(remaining)}.")
    text += _goals_markdown(report)
    for name in there:
        text.append(f"## {PARTS[name].title}: {verdict(parts[name])}")
        text += _part_markdown(name, parts[name])
    return "\n\n".join(text) + "\n"


def _goals_markdown(report: Mapping[str, Any]) -> list[str]:
    found = goals(report["parts"])
    rows = [(goal.name, goal.wanted, goal.outcome) for goal in found]
    text = ["## Goals", markdown_table(["goal", "wanted", "reached"], rows)]
    for goal in found:
        if goal.is_missed:
            text += [f"### Missed: {goal.name}", f"{goal.wanted}, {goal.outcome}.", goal.where]
    return text


def _part_markdown(name: str, part: Mapping[str, Any]) -> list[str]:
    text = [part["why"]] if part.get("why") else []
    if part.get("modules"):
        rows = [(row["module"], f"{row['seconds']:.1f} s") for row in part["modules"]]
        text.append(markdown_table(["module of aiter", "built in"], rows[:_MOST_MODULES]))
    if "tests" in part:
        text += _tests_markdown(part, every=name == "graphs")
    if part.get("report") is not None:
        text.append(_TABLES.get(name, steps_markdown)(part["report"]))
    if not part["passed"] and part["output"].strip():
        text.append(f"```\n{part['output'].strip()}\n```")
    return text


def _tests_markdown(part: Mapping[str, Any], every: bool) -> list[str]:
    text = [f"{_counts(part)}."]
    if part["left_out"]:
        text.append(f"Not run to the end: {', '.join(part['left_out'])}.")
    chosen = [t for t in part["tests"] if every or t["outcome"] not in ("passed", "skipped")]
    rows = [
        (t["name"], t["outcome"], f"{t['seconds']:.1f} s", _short(t["message"])) for t in chosen
    ]
    if rows:
        text.append(markdown_table(["test", "outcome", "time", ""], rows))
    reasons = Counter(_short(t["message"]) for t in part["tests"] if t["outcome"] == "skipped")
    text += [f"- {count} skipped: {reason}" for reason, count in reasons.most_common()]
    return text


def _short(message: str) -> str:
    return message.partition("\n")[0][:120].replace("|", "/")


def _counts(part: Mapping[str, Any]) -> str:
    counts = Counter(test["outcome"] for test in part["tests"])
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))


def is_unfinished(part: Mapping[str, Any]) -> bool:
    """Whether it ran out of time, or was cut off: a later run goes on with it."""
    return part["status"] is None or bool(part.get("unfinished"))


def verdict(part: Mapping[str, Any]) -> str:
    if part.get("why"):
        return "left out"
    if part["passed"]:
        return "passed"
    if part["status"] is None:
        return "out of time"
    failed = f"failed (exit status {part['status']})"
    return f"{failed}, out of time" if is_unfinished(part) else failed


def detail(part: Mapping[str, Any]) -> str:
    """A part in a few words."""
    if part.get("why"):
        return str(part["why"])
    words = [f"{part['seconds']:.0f} s"]
    if "tests" in part:
        words.append(_counts(part))
    if part.get("modules"):
        words.append(f"{len(part['modules'])} modules of aiter built")
    if report := part.get("report"):
        done = sum(len(report.get(key, ())) for key in ("results", "starts", "warmed"))
        words.append(f"{done} measured, {len(report['left_out'])} left out")
        if report["faults"]:
            words.append(f"{len(report['faults'])} wrong")
    return ", ".join(words)


def summary_line(name: str, part: Mapping[str, Any], parts: Sequence[str]) -> str:
    """For whoever watches, or finds a run that was cut off."""
    place = parts.index(name) + 1
    return f"[{place}/{len(parts)}] {name}: {verdict(part)}, {detail(part)}"
