"""Does a server under attack answer right, and is it then as it was before?

python benchmarks/chaos.py --requests 3000
python benchmarks/chaos.py --tiny --requests 400 --seed 7 --phases steady vanish
python benchmarks/chaos.py --tiny images --requests 600
python benchmarks/chaos.py --requests 10000 --round 500 --minutes 60 --output report.md

Starts servers on loopback, of the embedded model with its draft and a lookup (or of a tiny random
model: a Llama, one with recurrent states, or one that reads images), sends seeded requests of all
APIs and harms them: clients that vanish or crawl, a KV cache that is too small, ten times too many
requests, kill -9, SIGSTOP, SIGTERM, full disks, little memory. Every answer that claims to be
complete must be what a quiet server without speculation says, and after each phase the processes
must hold no more than before. Ends with 1 if anything is wrong. A report is written anew after each
phase.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from _chaos.lab import Lab, Record
from _chaos.patience import be_patient
from _chaos.phases import ALONE, SHARED, run_phases
from _chaos.plan import make_asks
from _chaos.tiny import KINDS, write_tiny

from atom.bench.report import environment, markdown_table, write_json

PHASES = (*SHARED, *ALONE)
# Room for the longest request, and for fewer sequences than run.
_EMBEDDED = ("--max-model-len", "640", "--kv-cache-memory", "20MiB", "--max-num-seqs", "16")
_TINY = ("--max-model-len", "700", "--max-num-seqs", "16")
_TINY_CACHES = {
    "llama": ("--kv-cache-memory", "384KiB"),
    "hybrid": ("--kv-cache-memory", "928KiB", "--state-slots", "8"),
    "images": ("--kv-cache-memory", "384KiB", "--mm-cache-memory", "32KiB"),
}
_TINY_DRAFTS = ("--method", "suffix", "--num-speculative-tokens", "3")
# Logprobs are compared to the bit, so they may not depend on the batch.
_COMMON = ("--tool-call-parser", "hermes", "--batch-invariant")
# Tokens of an answer.
_LONGEST = 100
_MOST_SHOWN = 20


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000, help="in all (default: %(default)s)")
    parser.add_argument("--round", type=int, help="after so many, all phases begin again")
    parser.add_argument("--minutes", type=float, help="begin no round later, whatever is left")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all time limits")
    parser.add_argument("--distinct", type=int, help="different ones (default: a tenth, 28 to 280)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument(
        "--tiny",
        nargs="?",
        choices=KINDS,
        const="llama",
        help="a random model with a lookup (%(const)s); with `images`, of requests, too",
    )
    parser.add_argument("--model", type=Path, help="another tiny one, for --tiny")
    parser.add_argument("--output", type=Path, help="Markdown file; JSON goes beside it")
    return parser


def server_flags(model: Path | None, kind: str | None) -> tuple[list[str], list[str]]:
    """Flags of the servers under test, and of the one whose answers are right."""
    if model is None or kind is None:
        return [*_EMBEDDED, "--speculative-lookup", *_COMMON], ["--no-speculation", *_COMMON]
    own = ["--model", str(model), *_COMMON]
    quiet = [*own, *_TINY[:2], "--kv-cache-memory", "8MiB"]
    return [*own, *_TINY, *_TINY_CACHES[kind], *_TINY_DRAFTS], quiet


async def run(args: argparse.Namespace, folder: Path) -> list[Record]:
    model = (args.model or write_tiny(folder / "tiny", args.tiny)) if args.tiny else None
    flags, quiet_flags = server_flags(model, args.tiny)
    quiet_flags += ["--no-enable-prefix-caching"]
    distinct = args.distinct or min(max(args.requests // 10, 28), 280)
    asks = make_asks(args.seed, distinct, longest=_LONGEST, sees=args.tiny == "images")
    lab = Lab(asks, flags, quiet_flags, folder, args.seed)
    await lab.learn()
    print(f"{distinct} answers of a quiet server are known", flush=True)
    records: list[Record] = []

    def note(record: Record) -> None:
        records.append(record)
        show(record)
        if args.output is not None:
            write_report(args, records, lab.stops.seconds)

    await run_phases(lab, list(args.phases), rounds(args, records), note)
    return records


def rounds(args: argparse.Namespace, records: Sequence[Record]) -> Iterator[int]:
    """The requests of each round, until there were enough or the time is over."""
    end = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
    while time.monotonic() < end:
        left = args.requests - total_requests(records)
        if left <= 0:
            return
        yield min(left, args.round or left)
        if args.round is None:
            return


def total_requests(records: Sequence[Record]) -> int:
    return sum(record.num_requests for record in records)


def show(record: Record) -> None:
    """Say at once how a phase went."""
    verdict = f"{len(record.wrong)} WRONG" if record.wrong else "right"
    print(
        f"{record.name}: {record.num_requests} requests in {record.seconds:.0f} s, {verdict}",
        flush=True,
    )
    for what in record.wrong[:_MOST_SHOWN]:
        print(f"  {what[:500]}", flush=True)


def write_report(args: argparse.Namespace, records: Sequence[Record], stopped: float) -> None:
    where = environment()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    lines = markdown(records, where, args.requests, stopped)
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    report = {
        "environment": where,
        "goal": args.requests,
        "seconds_stopped_from_outside": stopped,
        "phases": [record.as_dict() for record in records],
    }
    write_json(args.output.with_suffix(".json"), report)


def markdown(
    records: Sequence[Record], where: dict[str, object], goal: int, stopped: float
) -> list[str]:
    phases: dict[str, list[Record]] = {}
    for record in records:
        phases.setdefault(record.name, []).append(record)
    rows = [
        (
            name,
            str(len(of)),
            str(total_requests(of)),
            str(sum(n for r in of for (_, result), n in r.results.items() if result == "right")),
            str(sum(len(r.wrong) for r in of)),
            f"{sum(r.seconds for r in of):.0f}",
            f"{max(r.load for r in of):.1f} of {os.cpu_count()}",
        )
        for name, of in phases.items()
    ]
    head = ["phase", "times", "requests", "right answers", "wrong", "seconds"]
    lines = ["# Chaos", "", f"`{where['command']}`, {where['date']}, {where['cpu']}.", ""]
    lines += [f"{total_requests(records)} requests of {goal} were sent.", ""]
    if stopped:
        lines += [f"The program and its servers were stopped from outside for {stopped:.0f} s.", ""]
    lines += [markdown_table([*head, "most load of processors"], rows), ""]
    for name, of in phases.items():
        lines += _section(name, of)
    return lines


def _section(name: str, records: Sequence[Record]) -> list[str]:
    """A phase, all its rounds together; what was held is that of the first and the last."""
    lines = [f"## {name}", "", f"`{records[0].command}`", ""]
    events = Counter(event for record in records for event in record.events)
    lines += [f"- {event}" + (f" ({n} times)" if n > 1 else "") for event, n in events.items()]
    lines += [f"- **{what}**" for record in records for what in record.wrong[:_MOST_SHOWN]]
    results: Counter[tuple[str, str]] = Counter()
    for record in records:
        results.update(record.results)
    faults = [(fault, result, str(n)) for (fault, result), n in sorted(results.items())]
    lines += ["", markdown_table(["client", "result", "requests"], faults), ""]
    held = [each for record in records for each in record.held]
    if held:
        before, first, last = held[0]["before"], held[0]["after"], held[-1]["after"]
        rows = [
            (what, f"{before[what]:g}", f"{first[what]:g}", f"{last[what]:g}") for what in before
        ]
        lines += [markdown_table(["held", "before", "after", "after the last"], rows), ""]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    args = create_parser().parse_args(argv)
    if args.model is not None and not args.tiny:
        raise SystemExit("error: --model is for --tiny")
    be_patient(args.patience)
    # Whoever ends this program ends its servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="atom-chaos-") as folder:
        records = asyncio.run(run(args, Path(folder)))
    wrong = sum(len(record.wrong) for record in records)
    print(f"{total_requests(records)} requests, {wrong} things wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
