"""What grammar masks cost: tokens/s with a JSON schema against free text, taking turns.

python benchmarks/structured_output.py
python benchmarks/structured_output.py --method suffix --num-speculative-tokens 3

Both sides generate exactly --max-tokens from the same cached prompts at temperature 1: the schema
asks for more items than fit. Exits with 1 when the ratio is below --min-ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.bench.report import DEFAULT_CONVERSATIONS, environment, markdown_table, write_json
from atom.model_engine.arg_utils import (
    add_engine_flags,
    engine_config,
    engine_options,
    speculation_of,
)
from atom.sampling_params import SamplingParams
from atom.structured_output.params import StructuredOutput

if TYPE_CHECKING:
    from atom import LLM

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["reader", "writer", "editor"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _PERSON, "minItems": 10000}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each side (default: 5)")
    parser.add_argument(
        "--min-ratio", type=float, default=0.0, help="fail below (0.85 is the goal)"
    )
    parser.add_argument("--output-json", type=Path)
    add_engine_flags(parser)
    return parser.parse_args(argv)


def sides(max_tokens: int) -> dict[str, SamplingParams]:
    common: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": max_tokens}
    wanted = StructuredOutput.json_schema(_SCHEMA)
    return {
        "free": SamplingParams(**common, ignore_eos=True),
        "json_schema": SamplingParams(**common, structured_output=wanted),
    }


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Generated tokens per second."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    counts = {len(output.outputs[0].token_ids) for output in outputs}
    if counts != {params.max_tokens}:
        raise RuntimeError(f"expected {params.max_tokens} tokens from everyone, got {counts}")
    return len(prompts) * sum(counts) / seconds


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from atom import LLM

    options = engine_options(args)
    llm = LLM(**options, no_speculation=not speculation_of(options))
    conversations = itertools.cycle(DEFAULT_CONVERSATIONS)
    prompts = [llm.render_chat(c) for c in itertools.islice(conversations, args.batch_size)]
    arms = sides(args.max_tokens)
    for params in arms.values():  # compiles the grammar and caches the prompts
        measure(llm, prompts, params)
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for _, (name, params) in itertools.product(range(args.rounds), arms.items()):
        speeds[name].append(measure(llm, prompts, params))
    llm.shutdown()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = medians["json_schema"] / medians["free"]
    rows = [(name, f"{value:.1f}") for name, value in medians.items()]
    print(markdown_table(["median tokens/s", ""], [*rows, ("ratio", f"{ratio:.3f}")]))
    write_json(
        args.output_json,
        {
            "environment": environment(),
            "engine": dataclasses.asdict(engine_config(**options)),
            "batch_size": args.batch_size,
            "max_tokens": args.max_tokens,
            "tokens_per_s": speeds,
            "ratio": ratio,
        },
    )
    return int(ratio < args.min_ratio)


if __name__ == "__main__":
    raise SystemExit(main())
