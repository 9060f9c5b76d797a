"""`atom bench throughput`: all prompts at once through an engine in this process.

atom bench throughput --num-prompts 64 --max-tokens 128
atom bench throughput --prompts-file questions.jsonl --field question
atom bench throughput --input-len 512 --output-len 64
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

from atom.bench.report import environment, markdown_table, read_conversations, write_json
from atom.command_line import CommandLine
from atom.config import ConfigError
from atom.model_engine.arg_utils import (
    EngineOptions,
    add_engine_flags,
    add_model,
    add_no_speculation,
    choose_draft,
    engine_config,
    engine_options,
    speculation_of,
)
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom import LLM


def create_parser(prog: str = "atom bench throughput") -> CommandLine:
    parser = CommandLine(prog=prog, description=__doc__)
    add_prompts(parser)
    parser.add_argument("--num-prompts", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts (default: 3)")
    add_engine(parser)
    return parser


def add_prompts(parser: CommandLine) -> None:
    """The flags of what is answered, for the benchmarks of an engine in this process."""
    add = parser.add_argument
    add("--prompts-file", type=Path, help="JSONL; built-in prompts when omitted")
    add("--field", default="messages", help="field with messages or text (default: %(default)s)")
    add("--random-input-len", "--input-len", type=int, help="prompts of so many random tokens")
    add("--max-tokens", "--output-len", type=int, default=128, help="(default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    add("--stop-at-eos", action="store_true", help="let answers end before --max-tokens")
    add("--output-json", type=Path)


def add_engine(parser: CommandLine) -> None:
    """The flags of the engine."""
    add_model(parser)
    add_engine_flags(parser)
    add_no_speculation(parser)


def start(options: EngineOptions) -> LLM:
    # After the options were found right: this import brings torch.
    from atom.entrypoints.llm import LLM

    return LLM(**options, no_speculation=not speculation_of(options))


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


def main(argv: Sequence[str] | None = None, *, prog: str = "atom bench throughput") -> int:
    parser = create_parser(prog)
    args = parser.parse_args(argv)
    try:
        options = choose_draft(engine_options(args), args.no_speculation)
        params = sampling(args)
        llm = start(options)
        prompts = make_prompts(llm, args)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
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
    return 0


def sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=not args.stop_at_eos
    )
