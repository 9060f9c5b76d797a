"""How long the demo takes from its start to the first token, beside importing torch alone.

python benchmarks/start_up.py
python benchmarks/start_up.py --rounds 9 -- --no-speculation

What follows `--` are flags of the demo. The two take turns; a first start, which converts the model
and compiles the kernels where that has not been done, is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from atom.bench.report import environment, markdown_table, write_json

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "What is the capital of France?"
_DEMO = ("-m", "atom.examples.simple_inference", "--prompt", PROMPT, "--no-compare")


def measure(arguments: Sequence[str], after: bytes) -> tuple[float, float]:
    """Seconds, and seconds of processor time, until a program prints more than `after`."""
    start = time.monotonic()
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        said = b""
        while not said.partition(after)[2]:
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                raise SystemExit(f"error: {' '.join(command)} ended without a token: {said!r}")
            said += piece
        seconds = time.monotonic() - start
        times = psutil.Process(process.pid).cpu_times()
        process.kill()
    return seconds, times.user + times.system


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("flags", nargs="*", help="of the demo")
    args = parser.parse_args(argv)
    waits = "import time, torch; print('torch', torch.__version__, flush=True); time.sleep(60)"
    programs = {
        "import torch": (("-c", waits), b"torch "),
        "first token": ((*_DEMO, *args.flags), PROMPT.encode() + b"\n"),
    }
    rounds = [
        {name: measure(*program) for name, program in programs.items()}
        for _ in range(args.rounds + 1)
    ][1:]
    rows = [
        (name, *(f"{statistics.median(each[name][i] for each in rounds):.2f}" for i in (0, 1)))
        for name in programs
    ]
    print(markdown_table(["median", "seconds", "seconds of processor time"], rows))
    ratios = [each["first token"][1] / each["import torch"][1] for each in rounds]
    print(f"\nprocessor time over that of importing torch: {statistics.median(ratios):.2f}")
    write_json(args.output_json, {"environment": environment(), "rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
