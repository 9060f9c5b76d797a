"""Accuracy and acceptance gates: serves what recipes/accuracy.toml names and runs lm_eval on it.

python benchmarks/accuracy.py smollm2 smollm2-draft       # GSM8K comes from the hub
python benchmarks/accuracy.py --data-dir gsm8k            # a folder with train.jsonl, test.jsonl
python benchmarks/accuracy.py --lm-eval /opt/lm_eval/bin/lm_eval --limit 20

Without names every entry runs that this machine can run. The exit status is 1 when an entry is
below a gate or fails, and 2 when one that was named cannot run here, or nothing ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from _accuracy_entries import Entry, EntryError, read_entries, why_not_here
from _lm_eval import (
    LMEvalError,
    Outcome,
    lm_eval_command,
    read_outcome,
    run_lm_eval,
    write_local_gsm8k,
)
from _prometheus import drafts_between, scrape_spec_decode
from _server import ROOT, Server, ServerError

from atom.bench.report import (
    environment,
    environment_markdown,
    markdown_table,
    write_json,
    write_text,
)
from atom.stats import SpecDecodeStats

STRICT, FLEXIBLE = "exact_match,strict-match", "exact_match,flexible-extract"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an entry yielded."""

    outcome: Outcome
    drafts: SpecDecodeStats | None
    seconds: float
    server: str
    lm_eval: str


def run_entry(entry: Entry, args: argparse.Namespace) -> Measured:
    """Serve, evaluate, scrape, stop.

    Raises:
        ServerError, LMEvalError, httpx.HTTPError: when one of these fails.
    """
    folder = args.output_dir / entry.name
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as tasks,
        tempfile.TemporaryDirectory() as results,
        Server(entry.server_flags, folder / "server.log") as server,
        httpx.Client(timeout=60) as http,
    ):
        task, include = entry.task, None
        if args.data_dir is not None:
            task, include = write_local_gsm8k(Path(tasks), args.data_dir), Path(tasks)
        server.wait_healthy(60 * entry.start_minutes)
        command = lm_eval_command(
            args.lm_eval, entry, task, server.url, server.model(), Path(results), include
        )
        before = scrape_spec_decode(http, f"{server.url}/metrics")
        run_lm_eval(command, folder / "lm_eval.log", offline=args.data_dir is not None)
        drafts = drafts_between(before, scrape_spec_decode(http, f"{server.url}/metrics"))
        return Measured(
            outcome=read_outcome(Path(results), task),
            drafts=drafts,
            seconds=time.monotonic() - started,
            server=server.shown,
            lm_eval=shlex.join(command),
        )


def judge(entry: Entry, measured: Measured, reference: Measured | None) -> list[str]:
    """Every reason for which the entry does not pass.

    Args:
        reference: what the entry named by `same_as` yielded; None when it yielded nothing.
    """
    metrics, drafts = measured.outcome.metrics, measured.drafts
    reasons = []
    accuracy = metrics.get(entry.metric)
    if accuracy is None:
        reasons.append(f"lm_eval reports no {entry.metric}; it reports {', '.join(metrics)}")
    elif accuracy < entry.min_accuracy:
        reasons.append(f"accuracy {accuracy:.4f} is below {entry.min_accuracy}")
    if entry.min_acceptance:
        if drafts is None or not drafts.num_drafts:
            reasons.append("the server verified no drafts, and there is an acceptance gate")
        elif drafts.acceptance_rate < entry.min_acceptance:
            reasons.append(
                f"acceptance {drafts.acceptance_rate:.4f} is below {entry.min_acceptance}"
            )
    if entry.same_as:
        reasons += _differences(entry, measured.outcome, reference)
    return reasons


def _differences(entry: Entry, ours: Outcome, reference: Measured | None) -> list[str]:
    if reference is None:
        return [f"nothing to compare with: {entry.same_as} did not run"]
    theirs = reference.outcome
    reasons = []
    for name in sorted(set(ours.metrics) | set(theirs.metrics)):
        a, b = ours.metrics.get(name), theirs.metrics.get(name)
        if a != b:
            reasons.append(f"{name} is {a}, and {b} in {entry.same_as}")
    questions = sorted(set(ours.outputs) | set(theirs.outputs))
    differing = [q for q in questions if ours.outputs.get(q) != theirs.outputs.get(q)]
    if differing:
        reasons.append(
            f"{len(differing)} of {len(questions)} outputs differ from {entry.same_as}, the "
            f"first in {differing[0]}"
        )
    return reasons


def describe(entry: Entry, measured: Measured, reasons: Sequence[str]) -> dict[str, Any]:
    drafts = measured.drafts
    acceptance = None
    if drafts is not None and drafts.num_drafts:
        acceptance = {
            "rate": drafts.acceptance_rate,
            "tokens_per_forward": drafts.tokens_per_forward,
            "per_position": [n / drafts.num_drafts for n in drafts.accepted_per_position],
            "distribution": drafts.accepted_counts,
        }
    return {
        "name": entry.name,
        "status": "failed" if reasons else "passed",
        "reasons": list(reasons),
        "entry": dataclasses.asdict(entry),
        "metrics": measured.outcome.metrics,
        "acceptance": acceptance,
        "seconds": measured.seconds,
        "server": measured.server,
        "lm_eval": measured.lm_eval,
    }


def to_markdown(results: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    header = ["entry", "status", "flexible", "strict", "gate", "acceptance", "gate"]
    header.append("tokens/forward")
    details = [
        f"## {r['name']}: {r['status']}\n\n"
        + "".join(f"- {reason}\n" for reason in r["reasons"])
        + (f"\n{r['entry']['note']}\n" if r["entry"]["note"] else "")
        + (f"\n```\n{r['server']}\n{r['lm_eval']}\n```\n" if "server" in r else "")
        for r in results
    ]
    table = markdown_table(header, [_row(r) for r in results])
    return "\n\n".join(["# Accuracy", table, environment_markdown(facts), *details]) + "\n"


def _row(r: Mapping[str, Any]) -> list[str]:
    entry, metrics, acceptance = r["entry"], r.get("metrics", {}), r.get("acceptance")
    return [
        r["name"],
        r["status"],
        *(_share(metrics.get(name)) for name in (FLEXIBLE, STRICT)),
        _share(entry["min_accuracy"]),
        _share(acceptance and acceptance["rate"]),
        _share(entry["min_acceptance"] or None),
        "" if acceptance is None else f"{acceptance['tokens_per_forward']:.2f}",
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="ENTRY", help="all that can run here when omitted")
    add("--entries", type=Path, default=ROOT / "recipes" / "accuracy.toml", help="the TOML file")
    add("--data-dir", type=Path, help="GSM8K as train.jsonl and test.jsonl; the hub when omitted")
    add("--lm-eval", default="lm_eval", help="command that starts it (default: lm_eval)")
    add("--limit", type=int, help="questions of every entry, instead of its own number")
    add(
        "--output-dir",
        type=Path,
        default=ROOT / "benchmarks" / "results" / "accuracy",
        help="for accuracy.{json,md} and logs (default: benchmarks/results/accuracy)",
    )
    return parser.parse_args(argv)


def choose(args: argparse.Namespace) -> list[Entry]:
    """The entries to run or refuse, in the file's order.

    Raises:
        EntryError: for an unknown name, or a task that --data-dir does not hold.
    """
    entries = read_entries(args.entries)
    if unknown := [name for name in args.names if name not in entries]:
        raise EntryError(f"no entry {unknown[0]!r}; there are {', '.join(entries)}")
    chosen = [entry for name, entry in entries.items() if not args.names or name in args.names]
    if args.limit is not None:
        chosen = [dataclasses.replace(entry, limit=args.limit) for entry in chosen]
    for entry in chosen:
        if args.data_dir is not None and entry.task != "gsm8k":
            raise EntryError(f"[{entry.name}] --data-dir holds gsm8k, not {entry.task}")
    return chosen


def run(chosen: Sequence[Entry], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One result per entry: passed, failed or refused."""
    results: list[dict[str, Any]] = []
    measured: dict[str, Measured] = {}
    for entry in chosen:
        blank = {"name": entry.name, "entry": dataclasses.asdict(entry)}
        if reason := why_not_here(entry):
            results.append({**blank, "status": "refused", "reasons": [reason]})
        else:
            try:
                measured[entry.name] = run_entry(entry, args)
            except (ServerError, LMEvalError, httpx.HTTPError) as error:
                results.append({**blank, "status": "failed", "reasons": [str(error)]})
            else:
                found = measured[entry.name]
                reasons = judge(entry, found, measured.get(entry.same_as))
                results.append(describe(entry, found, reasons))
        latest = results[-1]
        print(f"{entry.name}: {latest['status']}", *latest["reasons"], sep="\n  ", flush=True)
    return results


def exit_status(results: Sequence[Mapping[str, Any]], named: bool) -> int:
    statuses = [r["status"] for r in results]
    if "failed" in statuses:
        return 1
    return 2 if "passed" not in statuses or (named and "refused" in statuses) else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # So that the server is stopped when this program is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        chosen = choose(args)
    except EntryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = run(chosen, args)
    facts = environment()
    markdown = to_markdown(results, facts)
    print("\n" + markdown)
    write_json(args.output_dir / "accuracy.json", {"environment": facts, "results": results})
    write_text(args.output_dir / "accuracy.md", markdown)
    return exit_status(results, bool(args.names))


if __name__ == "__main__":
    sys.exit(main())
