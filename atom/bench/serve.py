"""`atom bench serve`: latency and throughput of an OpenAI-compatible server under load.

Chats from a file are sent either open-loop, at Poisson arrivals that do not wait for answers
(--request-rate), or by a fixed number of clients that each wait (--max-concurrency).

atom bench serve --max-concurrency 8 --num-prompts 64
atom bench serve --request-rate 2 --prompts-file questions.jsonl --field question \\
    --slo-ttft-ms 500 --slo-tpot-ms 50 --output-json result.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from atom.bench.report import (
    environment,
    markdown_table,
    read_conversations,
    summarise,
    write_json,
)
from atom.command_line.parser import CommandLine

# Requests at the end of an open-loop run may still wait for this long.
DEFAULT_TIMEOUT = 600.0


@dataclass
class Exchange:
    """One request and its answer. Times are seconds on the monotonic clock.

    Attributes:
        due: when the request had to leave; sent: when it left.
        chunks: when each chunk with text arrived.
        error: why there is no answer.
    """

    due: float
    sent: float = 0.0
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.due

    @property
    def e2el(self) -> float:
        return self.chunks[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between chunks; a chunk may hold several tokens."""
        return [b - a for a, b in itertools.pairwise(self.chunks)]


class Client:
    """Streams chats from one server."""

    def __init__(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self._http = http
        self._body = body

    async def exchange(self, messages: list[dict[str, Any]], due: float) -> Exchange:
        result = Exchange(due, sent=time.monotonic())
        try:
            await self._stream({**self._body, "messages": messages}, result)
        except (httpx.HTTPError, ValueError) as error:
            result.error = f"{type(error).__name__}: {error}"
        result.end = time.monotonic()
        return result

    async def _stream(self, body: dict[str, Any], result: Exchange) -> None:
        async with self._http.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise ValueError(f"HTTP {response.status_code}: {text[:200]}")
            async for event in _events(response):
                if "error" in event:
                    raise ValueError(f"error event: {event['error']}")
                if any(_has_text(choice["delta"]) for choice in event.get("choices", ())):
                    result.chunks.append(time.monotonic())
                if usage := event.get("usage"):
                    result.prompt_tokens = usage["prompt_tokens"]
                    result.output_tokens = usage["completion_tokens"]
        if not result.output_tokens:
            raise ValueError("the server sent no usage; it must honour stream_options")
        if not result.chunks:
            raise ValueError(f"{result.output_tokens} tokens came without any text")


def _has_text(delta: dict[str, Any]) -> bool:
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(name) for name in names)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data = line[len("data:") :].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)
    raise ValueError("the stream ended without [DONE]")


# Sends one prompt that was due at a time.
Send = Callable[[list[dict[str, Any]], float], Any]


async def send_open_loop(
    prompts: list[list[dict[str, Any]]], rate: float, rng: random.Random, send: Send
) -> list[Exchange]:
    """Poisson arrivals: latencies count from the time a request was due."""
    due = time.monotonic()
    tasks = []
    for messages in prompts:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(send(messages, due)))
        due += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def send_closed_loop(
    prompts: list[list[dict[str, Any]]], clients: int, send: Send
) -> list[Exchange]:
    """Each client sends its next request when its last one is answered."""
    queue = iter(prompts)
    results: list[Exchange] = []

    async def client() -> None:
        for messages in queue:
            results.append(await send(messages, time.monotonic()))

    await asyncio.gather(*(client() for _ in range(clients)))
    return results


def meets(exchange: Exchange, slo: dict[str, float]) -> bool:
    """Whether every latency that has a bound (in milliseconds) is within it."""
    values = {"ttft": exchange.ttft, "tpot": exchange.tpot or 0.0, "e2el": exchange.e2el}
    return all(values[name] * 1e3 <= bound for name, bound in slo.items())


def evaluate(exchanges: list[Exchange], slo: dict[str, float]) -> dict[str, Any]:
    """The report of a run, latencies in milliseconds."""
    done = [e for e in exchanges if e.error is None]
    errors = Counter(e.error for e in exchanges if e.error is not None)
    start = min(e.due for e in exchanges)
    seconds = max(e.end for e in exchanges) - start
    output = sum(e.output_tokens for e in done)
    prompt = sum(e.prompt_tokens for e in done)
    tpots = [e.tpot for e in done]
    latencies = {
        "ttft_ms": [e.ttft for e in done],
        "tpot_ms": [t for t in tpots if t is not None],
        "itl_ms": [gap for e in done for gap in e.itl],
        "e2el_ms": [e.e2el for e in done],
    }
    report: dict[str, Any] = {
        "completed": len(done),
        "failed": len(exchanges) - len(done),
        "errors": dict(errors.most_common(5)),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        # A client that falls behind measures itself: this must stay small.
        "max_send_delay_ms": max(e.sent - e.due for e in exchanges) * 1e3,
        "latencies": {
            name: summarise([v * 1e3 for v in values]) for name, values in latencies.items()
        },
    }
    if slo:
        good = sum(meets(e, slo) for e in done)
        report["goodput"] = {"slo_ms": slo, "requests_per_s": good / seconds, "good": good}
    return report


def to_markdown(report: dict[str, Any]) -> str:
    names: tuple[str, ...] = ("completed", "failed", "seconds", "requests_per_s")
    names += ("output_tokens_per_s", "total_tokens_per_s", "max_send_delay_ms")
    rows: list[tuple[str, object]] = [(n, _number(report[n])) for n in names]
    if "goodput" in report:
        rows.append(("goodput, requests_per_s", _number(report["goodput"]["requests_per_s"])))
    columns = ("mean", "median", "p95", "p99")
    latencies = [
        (name, *(_number(summary[c]) if summary else "" for c in columns))
        for name, summary in report["latencies"].items()
    ]
    tables = [markdown_table(["", ""], rows), markdown_table(["", *columns], latencies)]
    errors = [f"- {count} x {error}" for error, count in report["errors"].items()]
    return "\n\n".join([*tables, *(["\n".join(errors)] if errors else [])])


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}"


async def run(args: argparse.Namespace) -> dict[str, Any]:
    conversations = read_conversations(args.prompts_file, args.field)
    rng = random.Random(args.seed)
    prompts = list(itertools.islice(itertools.cycle(conversations), args.num_prompts))
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with httpx.AsyncClient(
        base_url=api_url(args.base_url) + "/",
        headers=headers,
        timeout=args.timeout,
        limits=httpx.Limits(max_connections=None),
    ) as http:
        body = {
            "model": args.model or await first_model(http),
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if args.ignore_eos else {}),
            **args.extra_body,
        }
        client = Client(http, body)
        for messages in prompts[: args.num_warmups]:
            warm = await client.exchange(messages, time.monotonic())
            if warm.error is not None:
                raise SystemExit(f"error: the warm-up failed: {warm.error}")
        if args.request_rate is not None:
            exchanges = await send_open_loop(prompts, args.request_rate, rng, client.exchange)
        else:
            exchanges = await send_closed_loop(prompts, args.max_concurrency, client.exchange)
    slo = {"ttft": args.slo_ttft_ms, "tpot": args.slo_tpot_ms, "e2el": args.slo_e2el_ms}
    report = evaluate(exchanges, {name: v for name, v in slo.items() if v is not None})
    return {"environment": environment(), "request": body, **report}


async def first_model(http: httpx.AsyncClient) -> str:
    try:
        response = await http.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise SystemExit(f"error: no model at {http.base_url}models: {error!r}") from error


def api_url(url: str) -> str:
    """The address of the API below a server's, `/v1` given or not."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("not positive")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("not positive")
    return value


def create_parser(prog: str = "atom bench serve") -> CommandLine:
    parser = CommandLine(prog=prog, description=__doc__)
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)"
    )
    parser.add_argument("--model", help="the server's first when omitted")
    parser.add_argument("--api-key")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--request-rate", type=_positive, help="requests per second, open loop")
    load.add_argument(
        "--max-concurrency", type=_positive_int, default=8, help="clients, closed loop (default: 8)"
    )
    parser.add_argument("--prompts-file", type=Path, help="JSONL; built-in chats when omitted")
    parser.add_argument(
        "--field", default="messages", help="field with messages or text (default: messages)"
    )
    parser.add_argument("--num-prompts", type=_positive_int, default=64, help="(default: 64)")
    parser.add_argument("--num-warmups", type=int, default=2, help="not measured (default: 2)")
    parser.add_argument(
        "--max-tokens", "--output-len", type=_positive_int, default=128, help="(default: 128)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: 0)")
    parser.add_argument("--ignore-eos", action="store_true", help="answers of full length")
    parser.add_argument(
        "--extra-body", type=_json_object, default={}, help="JSON object added to every request"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (default: 0)")
    parser.add_argument("--timeout", type=_positive, default=DEFAULT_TIMEOUT, help="seconds")
    for name in ("ttft", "tpot", "e2el"):
        parser.add_argument(
            f"--slo-{name}-ms", type=_positive, help=f"goodput counts requests with {name} below"
        )
    parser.add_argument("--output-json", type=Path)
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "atom bench serve") -> int:
    """Returns 1 when a request failed."""
    parser = create_parser(prog)
    args = parser.parse_args(argv)
    try:
        report = asyncio.run(run(args))
    except ValueError as error:
        parser.error(str(error))
    print(to_markdown(report))
    write_json(args.output_json, report)
    return 1 if report["failed"] else 0
