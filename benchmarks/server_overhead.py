"""What the HTTP server costs: its tokens per second over those of the engine in this process.

python benchmarks/server_overhead.py
python benchmarks/server_overhead.py --no-speculation --concurrency 8 --rounds 7

Both answer the same chats, so many at a time, in turns. The client reads streams without parsing
each chunk, since it shares the processors with the server. The processor time of each process is
printed besides, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from _server import Server

from atom.bench.report import environment, markdown_table, read_conversations, write_json
from atom.model_engine.arg_utils import add_engine_flags, engine_options, speculation_of
from atom.sampling_params import SamplingParams

_READY_SECONDS = 600
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    "Content-Length: {size}\r\n\r\n"
)


class Streams:
    """Clients that each wait for an answer before they send the next request."""

    def __init__(self, url: str, body: dict[str, Any], concurrency: int) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._body = body
        self._concurrency = concurrency

    def run(self, conversations: Sequence[Any]) -> int:
        """Answer all; returns the number of tokens."""
        return asyncio.run(self._run(conversations))

    async def _run(self, conversations: Sequence[Any]) -> int:
        waiting = iter(conversations)

        async def client() -> int:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            number = 0
            for messages in waiting:
                body = json.dumps({**self._body, "messages": messages}).encode()
                writer.write(_HEAD.format(host=self._host, size=len(body)).encode() + body)
                number += await _tokens_of(reader)
            writer.close()
            return number

        return sum(await asyncio.gather(*(client() for _ in range(self._concurrency))))


async def _tokens_of(reader: asyncio.StreamReader) -> int:
    """The number of tokens of a stream, from its last chunk."""
    answer = b""
    while not answer.endswith(b"\r\n0\r\n\r\n"):
        piece = await reader.read(1 << 16)
        if not piece:
            raise ConnectionError(f"the server closed the connection: {answer[-300:]!r}")
        answer += piece
    usage = _USAGE.findall(answer)
    if not usage:
        raise ConnectionError(f"no usage in the answer: {answer[-300:]!r}")
    return int(usage[-1])


def processor_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure(run: Callable[[], int], pids: dict[str, int]) -> dict[str, float]:
    """Tokens per second, and the milliseconds of processor time per token of each process."""
    before = {name: processor_seconds(pid) for name, pid in pids.items()}
    start = time.monotonic()
    tokens = run()
    seconds = time.monotonic() - start
    spent = {name: processor_seconds(pid) - before[name] for name, pid in pids.items()}
    return {
        "tokens_per_s": tokens / seconds,
        **{f"{name}_ms_per_token": 1e3 * value / tokens for name, value in spent.items()},
    }


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="of a round (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--prompts-file", type=Path, help="JSONL; built-in chats when omitted")
    parser.add_argument(
        "--field", default="messages", help="field with messages or text (default: messages)"
    )
    parser.add_argument("--no-speculation", action="store_true", help="without the shipped draft")
    parser.add_argument("--output-json", type=Path)
    add_engine_flags(parser)
    return parser.parse_args(argv)


def server_flags(options: dict[str, Any], no_speculation: bool) -> list[str]:
    """The command line of the same options."""
    flags = ["--no-speculation"] if no_speculation else []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            flags += [flag, str(value)]
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    options = {"max_num_seqs": args.concurrency, **engine_options(args)}
    no_speculation = args.no_speculation and not speculation_of(options)
    conversations = list(
        itertools.islice(
            itertools.cycle(read_conversations(args.prompts_file, args.field)), args.requests
        )
    )
    from atom import LLM

    llm = LLM(**options, no_speculation=no_speculation)
    prompts = [llm.render_chat(messages) for messages in conversations]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)

    def offline() -> int:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    flags = server_flags(options, no_speculation)
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(flags, Path(folder) / "server.log") as server,
    ):
        server.wait_healthy(_READY_SECONDS)
        body = {
            "model": server.model(),
            "max_tokens": args.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        streams = Streams(server.url, body, args.concurrency)
        own = psutil.Process()
        frontend = psutil.Process(server.pid)
        engine = frontend.children()[0]
        pids = {"client": own.pid, "frontend": frontend.pid, "engine": engine.pid}
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(args.rounds + 1):
            arms = {
                "offline": lambda: measure(offline, {"engine": own.pid}),
                "server": lambda: measure(lambda: streams.run(conversations), pids),
            }
            order = sorted(arms, reverse=bool(number % 2))
            results = {name: arms[name]() for name in order}
            if number:  # the first is the warm-up
                rounds.append(results)
    llm.shutdown()
    report(rounds, args.output_json)
    return 0


def report(rounds: list[dict[str, dict[str, float]]], path: Path | None) -> None:
    ratios = [each["server"]["tokens_per_s"] / each["offline"]["tokens_per_s"] for each in rounds]
    median = {
        arm: {name: statistics.median(each[arm][name] for each in rounds) for name in values}
        for arm, values in rounds[0].items()
    }
    names = ["tokens_per_s", *(f"{p}_ms_per_token" for p in ("engine", "frontend", "client"))]
    rows = [
        (arm, *(f"{values[name]:.2f}" if name in values else "" for name in names))
        for arm, values in sorted(median.items())
    ]
    print(markdown_table(["median", *names], rows))
    ratio = statistics.median(ratios)
    print(f"\nserver over offline: {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    write_json(path, {"environment": environment(), "ratio": ratio, "rounds": rounds})


if __name__ == "__main__":
    sys.exit(main())
