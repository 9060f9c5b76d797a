"""Tokens per forward under JSON schemas, with drafts from the grammars and without.

python benchmarks/json_drafts.py --min-ratio 1.3
python benchmarks/json_drafts.py --method suffix --num-speculative-tokens 7 --show-schema off

The answers to twenty requests, each with a schema of its own, are the same on both sides. Without
a --method the shipped draft makes three drafts a step. Exits with 1 when answers differ or the
ratio of tokens per forward is below --min-ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from _json_schemas import REQUESTS, Schema

from atom.bench.report import environment, markdown_table, write_json
from atom.model_engine import rank_parts
from atom.model_engine.arg_utils import (
    EngineOptions,
    add_engine_flags,
    engine_config,
    engine_options,
    speculation_of,
    with_shipped_draft,
)
from atom.sampling_params import SamplingParams
from atom.spec_decode.factory import create_drafter
from atom.stats import SpecDecodeStats, total
from atom.structured_output.params import StructuredOutput


@dataclass(frozen=True)
class Side:
    """Attributes:
    answers: token ids.
    """

    answers: list[list[int]]
    drafts: SpecDecodeStats
    seconds: float

    def row(self) -> tuple[str, ...]:
        stats = self.drafts
        gained = stats.tokens_per_forward, stats.acceptance_rate
        speed = sum(map(len, self.answers)) / self.seconds
        return f"{gained[0]:.3f}", f"{gained[1]:.1%}", f"{speed:.1f}"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--limit", type=int, help="requests; all twenty when omitted")
    add("--max-tokens", type=int, default=160, help="per answer (default: %(default)s)")
    add("--temperature", type=float, default=0.7, help="(default: %(default)s)")
    add(
        "--show-schema",
        choices=("on", "off"),
        default="on",
        help="whether the prompts hold the schemas, too (default: %(default)s)",
    )
    add("--min-ratio", type=float, default=0.0, help="fail below (1.3 is the goal)")
    add("--output-json", type=Path)
    add_engine_flags(parser)
    return parser.parse_args(argv)


def run(
    options: EngineOptions, requests: Sequence[tuple[str, Schema]], args: argparse.Namespace
) -> Side:
    from atom import LLM

    llm = LLM(**options)
    prompts, params = [], []
    for seed, (text, schema) in enumerate(requests):
        told = f" Its JSON schema is {json.dumps(schema)}." if args.show_schema == "on" else ""
        request = f"{text} Answer with a JSON document.{told}"
        prompts.append(llm.render_chat([{"role": "user", "content": request}]))
        wanted = StructuredOutput.json_schema(schema)
        llm.engine.core.compile_grammar(wanted)
        fields: dict[str, Any] = {"temperature": args.temperature, "max_tokens": args.max_tokens}
        params.append(SamplingParams(seed=seed, structured_output=wanted, **fields))
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    llm.shutdown()
    drafts = total(o.spec_decode for o in outputs if o.spec_decode is not None)
    return Side([o.outputs[0].token_ids for o in outputs], drafts, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    options = engine_options(args)
    if not speculation_of(options):
        alone = {"speculative_lookup": False, "speculative_adaptive": False}
        options = {**with_shipped_draft(options), **alone, "num_speculative_tokens": 3}
    requests = REQUESTS[: args.limit]
    with mock.patch.object(
        rank_parts, "create_drafter", functools.partial(create_drafter, grammars=False)
    ):
        without = run(options, requests, args)
    with_grammars = run(options, requests, args)
    ratio = with_grammars.drafts.tokens_per_forward / without.drafts.tokens_per_forward
    same = sum(a == b for a, b in zip(without.answers, with_grammars.answers, strict=True))
    print(
        markdown_table(
            ["grammars draft", "tokens per forward", "accepted", "tokens/s"],
            [("no", *without.row()), ("yes", *with_grammars.row())],
        )
    )
    print(f"ratio {ratio:.2f}; {same} of {len(requests)} answers are the same")
    print(with_grammars.drafts.describe())
    write_json(
        args.output_json,
        {
            "environment": environment(),
            "engine": dataclasses.asdict(engine_config(**options)),
            "ratio": ratio,
            "same": same,
            "tokens_per_forward": [s.drafts.tokens_per_forward for s in (without, with_grammars)],
        },
    )
    return int(ratio < args.min_ratio or same < len(requests))


if __name__ == "__main__":
    raise SystemExit(main())
