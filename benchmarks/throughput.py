"""Offline throughput: all prompts at once through `atom.LLM`.

python benchmarks/throughput.py --num-prompts 64 --max-tokens 128
python benchmarks/throughput.py --prompts-file questions.jsonl --field question
python benchmarks/throughput.py --random-input-len 512 --max-tokens 64
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _report import environment, markdown_table, read_conversations, write_json

from atom.model_engine.arg_utils import (
    add_engine_flags,
    engine_config,
    engine_options,
    speculation_of,
)
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom import LLM


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts-file", type=Path, help="JSONL; built-in prompts when omitted")
    parser.add_argument(
        "--field", default="messages", help="field with messages or text (default: %(default)s)"
    )
    parser.add_argument("--random-input-len", type=int, help="prompts of so many random tokens")
    parser.add_argument("--num-prompts", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument(
        "--stop-at-eos", action="store_true", help="let answers end before --max-tokens"
    )
    parser.add_argument("--rounds", type=int, default=3, help="the median counts (default: 3)")
    parser.add_argument("--output-json", type=Path)
    add_engine_flags(parser)
    return parser.parse_args(argv)


def make_prompts(llm: LLM, args: argparse.Namespace) -> list[list[int]]:
    """Token ids: chat-templated conversations, repeated as needed, or random tokens."""
    if args.random_input_len is not None:
        rng = random.Random(0)
        size = len(llm.tokenizer)
        return [
            [rng.randrange(size) for _ in range(args.random_input_len)]
            for _ in range(args.num_prompts)
        ]
    conversations = itertools.cycle(read_conversations(args.prompts_file, args.field))
    return [llm.render_chat(c) for c in itertools.islice(conversations, args.num_prompts)]


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_prompt = sum(map(len, prompts))
    return {
        "seconds": seconds,
        "prompt_tokens": num_prompt,
        "cached_prompt_tokens": sum(output.num_cached_tokens for output in outputs),
        "output_tokens": num_output,
        "requests_per_s": len(prompts) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_prompt + num_output) / seconds,
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    from atom import LLM

    options = engine_options(args)
    llm = LLM(**options, no_speculation=not speculation_of(options))
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=not args.stop_at_eos
    )
    prompts = make_prompts(llm, args)
    llm.generate(prompts[:2], SamplingParams(max_tokens=4), use_tqdm=False)  # warm-up
    rounds = [measure(llm, prompts, params) for _ in range(args.rounds)]
    llm.shutdown()
    median = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    print(markdown_table(["median of rounds", ""], [(n, f"{v:.2f}") for n, v in median.items()]))
    write_json(
        args.output_json,
        {
            "environment": environment(),
            "engine": dataclasses.asdict(engine_config(**options)),
            "median": median,
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    main()
