"""Does a server that is asked for ten times what it can do still do what it can?

python benchmarks/overload.py
python benchmarks/overload.py --tiny --rounds 1 --seconds 5

First as many clients as sequences run, each with one request at a time: the rate of their answers
is the capacity, and a multiple of their median time what an answer may take (the SLO, which each
request sends as its `timeout`, too). Then requests come at random times at the capacity and at ten
times the capacity, in turns; refused ones do not come again. Goodput is answers within the SLO per
second. Ends with 1 where the least ratio of goodputs is not reached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _chaos.clients import Outcome, ask_once
from _chaos.plan import TEXT, Ask
from _chaos.tiny import write_tiny
from _server import Server

from atom.bench.report import environment, markdown_table, write_json, write_text

_WORDS = TEXT.split()
_PATH = "/v1/completions"


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a random model")
    parser.add_argument("--running", type=int, default=8, help="sequences (default: %(default)s)")
    parser.add_argument("--waiting", type=int, default=8, help="may wait (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts (%(default)s)")
    parser.add_argument("--slo", type=float, default=4, help="times the median (%(default)s)")
    parser.add_argument("--overload", type=float, default=10, help="times the capacity")
    parser.add_argument("--least", type=float, default=0.9, help="ratio of goodputs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="Markdown file; JSON goes beside it")
    return parser


@dataclass
class Turn:
    """One load and what came of it; `rate` in requests per second."""

    rate: float
    seconds: float
    results: Counter[str] = field(default_factory=Counter)
    retry_after: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "results": dict(self.results)}

    @property
    def goodput(self) -> float:
        return self.results["in time"] / self.seconds


class Load:
    """Args:
    rng: makes prompts and times.
    """

    def __init__(self, port: int, max_tokens: int, rng: random.Random) -> None:
        self._port, self._max_tokens, self._rng = port, max_tokens, rng
        self._count = 0

    async def capacity(self, num_clients: int, seconds: float) -> tuple[float, float]:
        """Answers per second, and the median time of one."""
        times: list[float] = []
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                start = time.monotonic()
                outcome = await self._ask(None)
                if outcome.status != 200:
                    raise RuntimeError(f"a request alone failed: {outcome.error}")
                times.append(time.monotonic() - start)

        start = time.monotonic()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        return len(times) / (time.monotonic() - start), statistics.median(times)

    async def turn(self, rate: float, seconds: float, slo: float) -> Turn:
        """Requests at random times; the turn lasts until all have ended."""
        turn = Turn(rate, seconds)
        tasks: list[asyncio.Task[None]] = []
        start = due = time.monotonic()
        while (due := due + self._rng.expovariate(rate)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self._judge(turn, slo)))
        await asyncio.gather(*tasks)
        turn.seconds = max(seconds, time.monotonic() - start)
        return turn

    async def _judge(self, turn: Turn, slo: float) -> None:
        start = time.monotonic()
        try:
            outcome = await self._ask(slo)
        except (OSError, asyncio.IncompleteReadError):
            turn.results["connection lost"] += 1
            return
        if outcome.status == 200:
            late = time.monotonic() - start > slo
            turn.results["late" if late else "in time"] += 1
            return
        turn.results[str(outcome.status)] += 1
        if outcome.status == 429:
            turn.retry_after.append(int(outcome.headers["retry-after"]))

    async def _ask(self, timeout: float | None) -> Outcome:
        self._count += 1
        prompt = " ".join(self._rng.choices(_WORDS, k=24))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": self._max_tokens}
        body |= {"ignore_eos": True, "seed": self._count}
        if timeout is not None:
            body["timeout"] = timeout
        return await ask_once(self._port, Ask(self._count, "completion", _PATH, body))


async def measure(args: argparse.Namespace, port: int) -> dict[str, Any]:
    load = Load(port, args.max_tokens, random.Random(args.seed))
    await load.capacity(args.running, min(args.seconds, 5))  # warm-up
    capacity, median = await load.capacity(args.running, args.seconds)
    slo = args.slo * median
    print(f"capacity {capacity:.2f} requests/s, median {median:.2f} s, SLO {slo:.2f} s", flush=True)
    turns: dict[str, list[Turn]] = {"at capacity": [], "overload": []}
    for number in range(args.rounds):
        rates = [("at capacity", capacity), ("overload", args.overload * capacity)]
        for name, rate in rates if number % 2 == 0 else reversed(rates):
            turn = await load.turn(rate, args.seconds, slo)
            turns[name].append(turn)
            print(f"{name}: {turn.goodput:.2f} in time/s, {dict(turn.results)}", flush=True)
    goodput = {n: statistics.median(t.goodput for t in of) for n, of in turns.items()}
    return {
        "capacity": capacity,
        "median_seconds": median,
        "slo_seconds": slo,
        "load_of_machine": os.getloadavg()[0],
        "goodput": goodput,
        "ratio": goodput["overload"] / goodput["at capacity"],
        "turns": {name: [turn.as_dict() for turn in of] for name, of in turns.items()},
    }


def markdown(found: dict[str, Any], where: dict[str, object]) -> str:
    rows = []
    for name, turns in found["turns"].items():
        results: Counter[str] = Counter()
        for turn in turns:
            results.update(turn["results"])
        waits = sorted(wait for turn in turns for wait in turn["retry_after"])
        rows.append(
            (
                name,
                f"{turns[0]['rate']:.2f}",
                f"{found['goodput'][name]:.2f}",
                ", ".join(f"{n} {what}" for what, n in sorted(results.items())),
                f"{waits[0]} to {waits[-1]} s" if waits else "",
            )
        )
    head = ["load", "requests/s", "goodput/s, median", "requests", "Retry-After"]
    return "\n".join(
        [
            "# Overload",
            "",
            f"`{where['command']}`, {where['date']}, {where['cpu']}.",
            "",
            f"Capacity {found['capacity']:.2f} requests/s; an answer in time takes at most "
            f"{found['slo_seconds']:.2f} s. Goodput under overload is {found['ratio']:.2f} of that "
            f"at capacity.",
            "",
            markdown_table(head, rows),
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = create_parser().parse_args(argv)
    flags = ["--max-num-seqs", str(args.running), "--max-waiting-requests", str(args.waiting)]
    with tempfile.TemporaryDirectory(prefix="atom-overload-") as name, contextlib.ExitStack() as s:
        folder = Path(name)
        if args.tiny:
            flags += ["--model", str(write_tiny(folder / "tiny")), "--kv-cache-memory", "32MiB"]
        server = s.enter_context(Server(flags, folder / "server.log"))
        server.wait_healthy(600)
        found = asyncio.run(measure(args, int(server.url.rpartition(":")[2])))
    where = environment()
    print(f"goodput under overload is {found['ratio']:.2f} of that at capacity")
    if args.output is not None:
        write_text(args.output, markdown(found, where))
        write_json(args.output.with_suffix(".json"), {"environment": where, **found})
    return 0 if found["ratio"] >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
