"""How fast an answer begins beside other programs, by the number of threads.

python benchmarks/busy_neighbours.py
python benchmarks/busy_neighbours.py --rounds 9 --neighbours nobody spins -- --model M

What follows `--` are options of the engine. The default number of threads, one, and all: each has
an engine in a process of its own; all live, and they take turns, of which another one has the first
in each round. The neighbours: `nobody`; `before` uses all processors until a request comes, as a
compiler or another engine does; `spins` keeps one processor busy; `bursts-N` needs a tenth of one,
in bursts of N ms. Figures are tokens/s of the first 64 tokens and of the first 256, medians over
the rounds, and of the ratios within each round medians and ranges. With CXX=/bin/false torch's
operations run, as without a compiler; try --lengths 16 32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from atom.bench.report import environment, markdown_table, write_json
from atom.command_line.parser import CommandLine
from atom.model_engine.arg_utils import add_engine_flags, engine_options

NEIGHBOURS = ("nobody", "before", "spins", "bursts-2", "bursts-10", "bursts-200")
LENGTHS = (64, 256)
_ALL = str(len(os.sched_getaffinity(0)))
_ARMS = {
    "default": (),
    "one thread": ("--num-threads", "1"),
    "all threads": ("--num-threads", _ALL),
}
_SPIN = "while True: pass"
_BURSTS = """
import sys, time
burst = float(sys.argv[1]) / 1e3
while True:
    end = time.perf_counter() + burst
    while time.perf_counter() < end:
        pass
    time.sleep(9 * burst)
"""
_PROMPT = "Write a long story about a lighthouse keeper and the sea."


class Engine:
    """A process with an engine that answers one prompt when it is told to."""

    def __init__(self, lengths: Sequence[int], flags: Sequence[str]) -> None:
        counts = ",".join(map(str, lengths))
        command = [sys.executable, __file__, "--worker", counts, *flags]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def answer(self) -> dict[int, float]:
        """Tokens/s until so many tokens were there, the prompt left out."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return {int(number): rate for number, rate in self._read().items()}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("error: an engine ended")
        found: dict[str, float] = json.loads(line)
        return found


def work(lengths: Sequence[int], flags: Sequence[str]) -> None:
    """The engine's process: an answer for each line of the input."""
    from atom import LLM, SamplingParams

    parser = CommandLine()
    add_engine_flags(parser)
    llm = LLM(**engine_options(parser.parse_args(flags)), no_speculation=True)
    params = SamplingParams(max_tokens=max(lengths) + 1, temperature=0.0, ignore_eos=True)
    prompt = llm.render_chat([{"role": "user", "content": _PROMPT}])
    rates: dict[int, float] = {}
    while True:
        print(json.dumps(rates), flush=True)
        if not sys.stdin.readline():
            return
        rates, number, first = {}, 0, 0.0
        for output in llm.stream(prompt, params):
            number += len(output.outputs[0].token_ids)
            now = time.perf_counter()
            first = first or now
            for length in lengths:
                if number > length and length not in rates:
                    rates[length] = (number - 1) / (now - first)


@contextlib.contextmanager
def beside(neighbour: str) -> Iterator[None]:
    """A neighbour while it is a request's turn."""
    if neighbour == "before":
        programs = [[_SPIN]] * len(os.sched_getaffinity(0))
    elif neighbour == "nobody":
        programs = []
    else:
        kind, _, milliseconds = neighbour.partition("-")
        programs = [[_SPIN] if kind == "spins" else [_BURSTS, milliseconds]]
    running = [subprocess.Popen([sys.executable, "-c", *program]) for program in programs]
    try:
        time.sleep(1.5 if running else 0)
        if neighbour == "before":
            for process in running:
                process.kill()
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--neighbours", nargs="+", choices=NEIGHBOURS, default=NEIGHBOURS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("flags", nargs="*", help="of the engine")
    args = parser.parse_args(argv)
    engines = {
        name: Engine(args.lengths, [*args.flags, *threads]) for name, threads in _ARMS.items()
    }
    for engine in engines.values():
        engine.answer()  # steps are recorded
    found: dict[str, dict[str, list[dict[int, float]]]] = {}
    for number in range(args.rounds):
        first = number % len(engines)
        turns = [*engines.items()][first:] + [*engines.items()][:first]
        for neighbour in args.neighbours:
            for name, engine in turns:
                with beside(neighbour):
                    rates = found.setdefault(neighbour, {}).setdefault(name, [])
                    rates.append(engine.answer())
    for engine in engines.values():
        engine.close()
    rows = [
        (neighbour, length, *_row(arms, length))
        for neighbour, arms in found.items()
        for length in args.lengths
    ]
    ratios = [f"default over {name}" for name in (*_ARMS,)[1:]]
    print(markdown_table(["neighbour", "tokens", *_ARMS, *ratios], rows))
    write_json(args.output_json, {"environment": environment(), "rates": found})
    return 0


def _row(arms: dict[str, list[dict[int, float]]], length: int) -> list[str]:
    rates = {name: [each[length] for each in rounds] for name, rounds in arms.items()}
    medians = [f"{statistics.median(each):.0f}" for each in rates.values()]
    ratios = [
        [a / b for a, b in zip(rates["default"], rates[name], strict=True)]
        for name in (*_ARMS,)[1:]
    ]
    cells = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios]
    return [*medians, *cells]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work([int(length) for length in sys.argv[2].split(",")], sys.argv[3:])
    else:
        sys.exit(main())
