"""How long programs take from their start to the first token, beside importing torch alone.

python benchmarks/start_up.py
python benchmarks/start_up.py --rounds 9 --programs demo -- --no-speculation
python benchmarks/start_up.py --model 1b-q4_0.gguf --beside ../before --peer ./first_token.sh

`run` is `atom run`, `demo` the demo with one prompt, and `serve` a server until it has answered a
request for one token. What follows `--` are flags of the engine. The programs take turns; a first
start, which converts the model, compiles the kernels and keeps packed weights where that has not
been done, is not counted. Seconds of processor time are those of all processes of a program.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from atom.bench.report import environment, markdown_table, write_json

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "What is the capital of France?"
_WAITS = "import time, torch; print('torch', torch.__version__, flush=True); time.sleep(60)"
_MOST_SECONDS = 120


def measure(command: Sequence[str], after: bytes, root: Path = ROOT) -> tuple[float, float]:
    """Seconds, and seconds of processor time, until a program prints more than `after`."""
    start = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=root,
        env=_environment(root),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        said = b""
        while not said.partition(after)[2] if after else not said:
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                raise SystemExit(f"error: {' '.join(command)} ended without a token: {said!r}")
            said += piece
        seconds = time.monotonic() - start
        used = _processor_seconds(process.pid)
        process.kill()
    return seconds, used


def measure_server(flags: Sequence[str], root: Path = ROOT) -> tuple[float, float]:
    """The same until a server has answered a request for one token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "atom", "serve", "--port", str(port), *flags]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode(),
        {"content-type": "application/json"},
    )
    start = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=root,
        env=_environment(root),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            while time.monotonic() - start < _MOST_SECONDS and process.poll() is None:
                with suppress(ConnectionError):
                    return _answered(request, start, process.pid)
                time.sleep(0.005)
            raise SystemExit(f"error: {' '.join(command)} did not answer")
        finally:
            process.terminate()


def _answered(request: urllib.request.Request, start: float, process: int) -> tuple[float, float]:
    """Raises ConnectionError while nobody listens."""
    try:
        urllib.request.urlopen(request, timeout=_MOST_SECONDS).read()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"error: the server said {error.code}: {error.read()!r}") from error
    except urllib.error.URLError as error:
        raise ConnectionError(str(error)) from error
    return time.monotonic() - start, _processor_seconds(process)


def _environment(root: Path) -> Mapping[str, str]:
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


def _processor_seconds(process: int) -> float:
    total = 0.0
    parent = psutil.Process(process)
    for each in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def start(
    program: str, root: Path, model: Sequence[str], flags: Sequence[str]
) -> tuple[float, float]:
    """Measure one start of `run`, `demo` or `serve` of the source tree `root`."""
    if program == "serve":
        return measure_server([*model, *flags], root)
    named = ["--model", *model] if model else []
    if program == "run":
        command = ["-m", "atom", "run", "--max-tokens", "1", *named, *flags, PROMPT]
        return measure([sys.executable, *command], b"", root)
    command = ["-m", "atom", "demo", "--prompt", PROMPT, *named, *flags]
    return measure([sys.executable, *command], PROMPT.encode() + b"\n", root)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument(
        "--programs", nargs="+", choices=("run", "demo", "serve"), default=["run", "demo", "serve"]
    )
    parser.add_argument("--model", help="instead of the embedded one")
    parser.add_argument("--beside", type=Path, help="another source tree, measured in turns")
    parser.add_argument(
        "--peer", nargs="+", default=(), help="a command that prints its first token, in turns"
    )
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("flags", nargs="*", help="of the engine")
    args = parser.parse_args(argv)
    model = [] if args.model is None else [str(Path(args.model).resolve())]
    trees = {"": ROOT} | ({" beside": args.beside.resolve()} if args.beside else {})

    def once() -> dict[str, tuple[float, float]]:
        found = {"import torch": measure([sys.executable, "-c", _WAITS], b"torch ")}
        for program in args.programs:
            for name, root in trees.items():
                found[program + name] = start(program, root, model, args.flags)
        if args.peer:
            found["peer"] = measure(args.peer, b"")
        return found

    rounds = [once() for _ in range(args.rounds + 1)][1:]
    rows = []
    for name in rounds[0]:
        seconds, used = zip(*(each[name] for each in rounds), strict=True)
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        medians = (f"{statistics.median(of):.2f}" for of in (seconds, used))
        rows.append((name, *medians, spread))
    print(markdown_table(["median", "seconds", "seconds of processor time", "range"], rows))
    write_json(args.output_json, {"environment": environment(), "rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
