"""`evaluate`: measure a draft in the engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from atom.bench.repetition import repeated_bigram_share
from atom.entrypoints.llm import LLM
from atom.model_engine.arg_utils import (
    add_engine_flags,
    engine_options,
    speculation_of,
)
from atom.sampling_params import SamplingParams
from atom.stats import SpecDecodeStats
from atom_train.data.prompts import DataError, PromptFile

HELP = "accept length and acceptance per position of a draft on prompt files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompts",
        action="append",
        required=True,
        metavar="FILE[:FIELD]",
        help="JSONL; each line has OpenAI messages, or a user message in FIELD; repeatable",
    )
    add("--limit", type=int, help="prompts of each file")
    add("--max-tokens", type=int, default=160, help="tokens per answer")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Raises:
    DataError: for unusable prompts, or without a draft.
    ConfigError: when the target or the draft cannot be loaded.
    """
    given = engine_options(args)
    if not speculation_of(given):
        raise DataError("there is nothing to evaluate: give --method eagle3 --draft-model DRAFT")
    files = [PromptFile.parse(text) for text in args.prompts]
    conversations = [file.read()[: args.limit] for file in files]
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed or 0
    )
    llm = LLM(**given)
    for file, prompts in zip(files, conversations, strict=True):
        print(evaluate(llm, file.path, prompts, params), flush=True)
    llm.shutdown()


def evaluate(
    llm: LLM, path: Path, conversations: Sequence[Sequence[dict[str, str]]], params: SamplingParams
) -> str:
    """Evaluate one file of prompts; returns a line of text."""
    before = llm.engine.core.stats.spec_decode or SpecDecodeStats()
    outputs = llm.chat(list(conversations), params)
    after = llm.engine.core.stats.spec_decode
    assert after is not None
    texts = [output.outputs[0].token_ids for output in outputs]
    repeated = sum(map(repeated_bigram_share, texts)) / len(texts)
    return (
        f"{path.name}: {len(texts)} prompts, {sum(map(len, texts))} tokens, repeated bigrams "
        f"{repeated:.2f}; {after.since(before).describe()}"
    )
