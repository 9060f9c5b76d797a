"""Random schemas against a server: every document is valid, every refusal names a keyword.

python -m atom serve                                   # in another terminal
python benchmarks/random_schemas.py --base-url http://127.0.0.1:8000 --schemas 2000

Each schema is asked for in one request for --documents documents at temperature 1. Documents are
judged by the `jsonschema` package; those that end by --max-tokens count as cut. Prints what was
wrong as it comes, with the schema's seed, then the counts. Exits with 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from _random_schemas import keywords_of, random_schema

from atom.bench.report import environment, write_json

_FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
_GOOD = ("valid", "cut", "refused")


def judge_refusal(schema: Any, message: str) -> str:
    """`refused`, or what is wrong with it."""
    quoted = set(re.findall(r"'([^']+)'", message))
    return "refused" if quoted & keywords_of(schema) else f"names no keyword: {message}"


def judge_document(schema: Any, text: str) -> str:
    """`valid`, or what is wrong with a document that ended by itself."""
    try:
        document = json.loads(text)
        jsonschema.Draft202012Validator(schema, format_checker=_FORMATS).validate(document)
    except ValueError as error:
        return f"no JSON: {text!r} ({error})"
    except jsonschema.ValidationError as error:
        return f"not valid: {text!r} ({error.message:.200})"
    return "valid"


async def ask(client: httpx.AsyncClient, seed: int, schema: Any, args: argparse.Namespace) -> Any:
    wanted = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}}
    body = {
        "messages": [{"role": "user", "content": "Answer in JSON, shortly."}],
        "response_format": wanted,
        "max_tokens": args.max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "n": args.documents,
    }
    return await client.post("/v1/chat/completions", json=body)


async def judge(client: httpx.AsyncClient, seed: int, args: argparse.Namespace) -> list[str]:
    schema = random_schema(seed)
    answer = await ask(client, seed, schema, args)
    if answer.status_code == 400:
        return [judge_refusal(schema, answer.json()["error"]["message"])]
    if answer.status_code != 200:
        return [f"status {answer.status_code}: {answer.text:.300}"]
    return [
        judge_document(schema, choice["message"]["content"])
        if choice["finish_reason"] == "stop"
        else "cut"
        for choice in answer.json()["choices"]
    ]


async def run(args: argparse.Namespace) -> Counter[str]:
    counts: Counter[str] = Counter()
    seeds = iter(range(args.seed, args.seed + args.schemas))

    async def work(client: httpx.AsyncClient) -> None:
        for seed in seeds:
            verdicts = await judge(client, seed, args)
            counts["schemas refused" if verdicts == ["refused"] else "schemas enforced"] += 1
            for verdict in verdicts:
                counts[verdict if verdict in _GOOD else "wrong"] += 1
                if verdict not in _GOOD:
                    print(
                        f"seed {seed}: {verdict}\n  {json.dumps(random_schema(seed))}", flush=True
                    )

    limits = httpx.Limits(max_connections=args.concurrency)
    async with httpx.AsyncClient(base_url=args.base_url, timeout=600, limits=limits) as client:
        await asyncio.gather(*[work(client) for _ in range(args.concurrency)])
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="(%(default)s)")
    parser.add_argument("--schemas", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--documents", type=int, default=3, help="of each (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first schema")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args(argv)
    counts = asyncio.run(run(args))
    for name, count in sorted(counts.items()):
        print(f"{name}: {count}")
    write_json(args.output_json, {"environment": environment(), "counts": counts})
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
