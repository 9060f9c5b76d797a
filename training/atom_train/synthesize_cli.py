"""The flags of `synthesize`, and its engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atom.model_engine.arg_utils import (
    add_engine_flags,
    engine_config,
    engine_options,
    speculation_of,
)
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.worker import Worker
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizers.tokenizer import load_tokenizer
from atom.models.base import spread_aux_layer_ids
from atom.spec_decode.proposers.base import NullProposer
from atom_train.data.dataset import Manifest, read_indices, text_digest
from atom_train.data.prompts import ChatTemplate, DataError, PromptFile, plan_prompts
from atom_train.data.recorder import FeatureRecorder
from atom_train.data.synthesize import SynthesisOptions, Synthesizer, open_folder

HELP = "let the target answer prompts; writes a dataset"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = SynthesisOptions()
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of the dataset; resumed when begun")
    add(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE[:FIELD]",
        help="JSONL; each line has OpenAI messages, or a user message in FIELD; repeatable",
    )
    add("--samples-per-prompt", type=int, default=1, help="answers to each prompt of the files")
    add(
        "--self-synthesized",
        type=int,
        default=0,
        metavar="N",
        help="user turns that the target writes itself",
    )
    add("--chat-template", type=Path, help="file with a Jinja template, instead of the model's")
    add("--max-new-tokens", type=int, default=defaults.max_new_tokens)
    add("--max-turn-tokens", type=int, default=defaults.max_turn_tokens)
    add(
        "--temperatures",
        type=float,
        nargs="+",
        default=list(defaults.temperatures),
        help="one is drawn for each answer; 0 is greedy",
    )
    add("--top-p", type=float, default=defaults.top_p)
    add("--turn-temperature", type=float, default=defaults.turn_temperature)
    add("--turn-min-p", type=float, default=defaults.turn_min_p)
    add(
        "--max-repetition",
        type=float,
        default=defaults.max_repetition,
        help="drop answers with a larger share of repeated bigrams",
    )
    add("--max-tokens", type=int, help="stop when that many trained tokens are kept")
    add("--max-minutes", type=float, help="stop after that time")
    add(
        "--keep-features",
        action="store_true",
        help="keep the hidden states that the draft reads (training then needs no target pass)",
    )
    add("--aux-layer-ids", type=int, nargs="+", help="boundary ids of the kept states")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Raises:
    DataError: for unusable prompts.
    ConfigError: for a target that cannot be loaded.
    """
    given = engine_options(args)
    if speculation_of(given):
        raise DataError("synthesis runs without speculation; leave the draft out")
    if args.aux_layer_ids and not args.keep_features:
        raise DataError("--aux-layer-ids says which states to keep; give --keep-features too")
    if args.keep_features:
        # Tokens from the prefix cache are not computed and give no features.
        given["enable_prefix_caching"] = False
    config = engine_config(**given)
    options = _options(args)
    files = [PromptFile.parse(text) for text in args.prompts]
    prompts = plan_prompts(files, args.self_synthesized, options.seed, args.samples_per_prompt)
    source = resolve_model(config.model)
    tokenizer = load_tokenizer(source, config.model)
    if args.chat_template is not None:
        tokenizer.chat_template = args.chat_template.read_text(encoding="utf-8")
    template = ChatTemplate.of(tokenizer)
    recorder = None
    if args.keep_features:
        num_layers = source.hf_config.get_text_config().num_hidden_layers
        recorder = FeatureRecorder(tuple(args.aux_layer_ids or spread_aux_layer_ids(num_layers)))
    settings = {
        **_settings(args, options, files),
        "target": source.name,
        "dtype": config.model.dtype,
        "template": text_digest(str(tokenizer.chat_template)),
    }
    aux = None if recorder is None else list(recorder.aux_layer_ids)
    manifest = open_folder(args.output, json.loads(json.dumps(settings)), aux)
    done = {*read_indices(args.output, manifest), *manifest.dropped}
    Synthesizer(
        EngineCore(config, Worker(config, proposer_factory=lambda *_: recorder or NullProposer())),
        template,
        options,
        args.output,
        manifest,
        recorder,
        max_live=2 * config.scheduler.max_num_seqs,
    ).run([prompt for prompt in prompts if prompt.index not in done])
    print(describe(manifest))


def _options(args: argparse.Namespace) -> SynthesisOptions:
    return SynthesisOptions(
        max_new_tokens=args.max_new_tokens,
        max_turn_tokens=args.max_turn_tokens,
        temperatures=tuple(args.temperatures),
        top_p=args.top_p,
        turn_temperature=args.turn_temperature,
        turn_min_p=args.turn_min_p,
        max_repetition=args.max_repetition,
        max_tokens=args.max_tokens,
        max_seconds=None if args.max_minutes is None else 60 * args.max_minutes,
        seed=args.seed or 0,
    )


def _settings(
    args: argparse.Namespace, options: SynthesisOptions, files: Sequence[PromptFile]
) -> dict[str, Any]:
    """The user's settings that determine the texts, without those that only limit the run."""
    return {
        **asdict(options),
        "max_tokens": None,
        "max_seconds": None,
        "prompts": {str(file.path): text_digest(file.path.read_text("utf-8")) for file in files},
        "samples_per_prompt": args.samples_per_prompt,
        "self_synthesized": args.self_synthesized,
    }


def describe(manifest: Manifest) -> str:
    """Describe a dataset in a few lines."""
    counts = manifest.counts
    answers = counts.get("answers", 0)
    repeated = counts.get("repeated_bigrams_percent_sum", 0) / max(answers, 1)
    dropped = ", ".join(f"{v} {k[8:]}" for k, v in counts.items() if k.startswith("dropped_"))
    return (
        f"{counts.get('texts', 0)} texts, {counts.get('tokens', 0)} tokens, of which "
        f"{counts.get('trained_tokens', 0)} were written by the target; dropped: "
        f"{dropped or 'none'}; repeated bigrams {repeated:.0f} % before filtering"
    )
