"""Does a server under attack answer right, and is it then as it was before?

python benchmarks/chaos.py --requests 3000
python benchmarks/chaos.py --tiny --requests 400 --seed 7 --phases steady vanish

Starts servers on loopback, of the embedded model with its draft and a lookup (or of a tiny random
model), sends seeded requests of all APIs and harms them: clients that vanish or crawl, a KV cache
that is too small, ten times too many requests, kill -9, SIGSTOP, SIGTERM, full disks, little
memory. Every answer that claims to be complete must be what a quiet server without speculation
says, and after each phase the processes must hold no more than before. Ends with 1 if anything is
wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _chaos.lab import Lab, Record
from _chaos.phases import ALONE, SHARED, run_phases
from _chaos.plan import make_asks
from _chaos.tiny import write_tiny

from atom.bench.report import environment, markdown_table, write_json

PHASES = (*SHARED, *ALONE)
# Room for the longest request, and for fewer sequences than run.
_EMBEDDED = ("--max-model-len", "640", "--kv-cache-memory", "20MiB", "--max-num-seqs", "16")
_TINY = ("--max-model-len", "700", "--kv-cache-memory", "384KiB", "--max-num-seqs", "16")
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
    parser.add_argument("--distinct", type=int, help="different ones (default: a tenth, 28 to 280)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--tiny", action="store_true", help="a random model with a lookup")
    parser.add_argument("--model", type=Path, help="another tiny one, for --tiny")
    parser.add_argument("--output", type=Path, help="Markdown file; JSON goes beside it")
    return parser


def server_flags(model: Path | None) -> tuple[list[str], list[str]]:
    """Flags of the servers under test, and of the one whose answers are right."""
    if model is None:
        return [*_EMBEDDED, "--speculative-lookup", *_COMMON], ["--no-speculation", *_COMMON]
    own = ["--model", str(model), *_COMMON]
    quiet = [*own, *_TINY[:2], "--kv-cache-memory", "8MiB"]
    return [*own, *_TINY, *_TINY_DRAFTS], quiet


async def run(args: argparse.Namespace, folder: Path) -> list[Record]:
    model = (args.model or write_tiny(folder / "tiny")) if args.tiny else None
    flags, quiet_flags = server_flags(model)
    quiet_flags += ["--no-enable-prefix-caching"]
    distinct = args.distinct or min(max(args.requests // 10, 28), 280)
    asks = make_asks(args.seed, distinct, longest=_LONGEST)
    lab = Lab(asks, flags, quiet_flags, folder, args.seed)
    await lab.learn()
    print(f"{distinct} answers of a quiet server are known", flush=True)
    return await run_phases(lab, list(args.phases), args.requests, show)


def show(record: Record) -> None:
    """Say at once how a phase went."""
    verdict = f"{len(record.wrong)} WRONG" if record.wrong else "right"
    print(
        f"{record.name}: {record.num_requests} requests in {record.seconds:.0f} s, {verdict}",
        flush=True,
    )
    for what in record.wrong[:_MOST_SHOWN]:
        print(f"  {what[:500]}", flush=True)


def markdown(records: Sequence[Record], where: dict[str, object]) -> str:
    lines = ["# Chaos", "", f"`{where['command']}`, {where['date']}, {where['cpu']}.", ""]
    rows = [
        (
            r.name,
            str(r.num_requests),
            str(sum(n for (_, result), n in r.results.items() if result == "right")),
            str(len(r.wrong)),
            f"{r.seconds:.0f}",
            f"{r.load:.1f} of {os.cpu_count()}",
        )
        for r in records
    ]
    head = ["phase", "requests", "right answers", "wrong", "seconds", "load of processors"]
    lines += [markdown_table(head, rows), ""]
    for record in records:
        lines += [f"## {record.name}", "", f"`{record.command}`", ""]
        lines += [f"- {event}" for event in record.events]
        lines += [f"- **{what}**" for what in record.wrong[:_MOST_SHOWN]]
        faults = [(f, result, str(n)) for (f, result), n in sorted(record.results.items())]
        lines += ["", markdown_table(["client", "result", "requests"], faults), ""]
        for held in record.held:
            before, after = held["before"], held["after"]
            kept = [(name, f"{before[name]:g}", f"{after[name]:g}") for name in before]
            lines += [markdown_table(["held", "before", "after"], kept), ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = create_parser().parse_args(argv)
    if args.model is not None and not args.tiny:
        raise SystemExit("error: --model is for --tiny")
    # Whoever ends this program ends its servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="atom-chaos-") as folder:
        records = asyncio.run(run(args, Path(folder)))
    where = environment()
    wrong = sum(len(record.wrong) for record in records)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(markdown(records, where) + "\n", encoding="utf-8")
        report = {"environment": where, "phases": [record.as_dict() for record in records]}
        write_json(args.output.with_suffix(".json"), report)
    total = sum(record.num_requests for record in records)
    print(f"{total} requests, {wrong} things wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
