"""What the benchmarks of an engine in this process share: their flags, and their start."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.bench.report import read_conversations
from atom.command_line.parser import CommandLine
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


@dataclass(frozen=True)
class Bench:
    """An engine, and what it is to answer.

    Attributes:
        options: the engine's.
        prompts: token ids.
    """

    llm: LLM
    options: EngineOptions
    prompts: list[list[int]]
    params: SamplingParams

    @property
    def engine(self) -> dict[str, Any]:
        """The engine's configuration, for a report."""
        return dataclasses.asdict(engine_config(**self.options))


def add_prompts(parser: CommandLine) -> None:
    """The flags of what is answered."""
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


def start(parser: CommandLine, args: argparse.Namespace, **fixed: Any) -> Bench:
    """Start the engine of the flags; what is wrong ends the program, said in a line.

    Args:
        fixed: options of the engine that no flag changes.
    """
    try:
        options = choose_draft(engine_options(args), args.no_speculation) | fixed
        params = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            ignore_eos=not args.stop_at_eos,
        )
        # After the options were found right: this import brings torch.
        from atom.entrypoints.llm import LLM

        llm = LLM(**options, no_speculation=not speculation_of(options))
        return Bench(llm, options, _make_prompts(llm, args), params)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    except (RuntimeError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


def _make_prompts(llm: LLM, args: argparse.Namespace) -> list[list[int]]:
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
