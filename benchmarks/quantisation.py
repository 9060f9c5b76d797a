"""What quantising weights costs and brings: likelihood of a text, drafts, memory and speed.

One engine with unquantised weights, and one for each format: of --quantization, or `auto`, the
bits that the checkpoint itself has. `:float` and `:int8` behind a format are its --activations.
They score the same text, answer the same prompts in turns, and, where there is a draft, verify its
drafts. The exit status is 1 when the likelihood of a format is worse by more than its limit.

python benchmarks/quantisation.py --text test.jsonl --text-field question answer --output-dir out
python benchmarks/quantisation.py --text book.txt --formats int4 mxfp4 --no-speculation
python benchmarks/quantisation.py --text book.txt --formats auto auto:float auto:int8
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _likelihood import read_scored_text, score, windows_of

from atom.bench.report import (
    environment,
    environment_markdown,
    markdown_table,
    read_conversations,
    write_json,
    write_text,
)
from atom.config import ACTIVATIONS, ConfigError
from atom.model_engine.arg_utils import (
    EngineOptions,
    add_engine_flags,
    add_no_speculation,
    choose_draft,
    engine_config,
    engine_options,
    speculation_of,
    without_speculation,
)
from atom.options.quantizations import ONLINE_QUANTIZATIONS
from atom.sampling_params import SamplingParams
from atom.stats import SpecDecodeStats, total

if TYPE_CHECKING:
    from atom import LLM
    from atom.model_loader.sketch import WeightBytes

BASELINE = "unquantised"
FORMATS = tuple(
    name if inputs == "auto" else f"{name}:{inputs}"
    for name in ("auto", *ONLINE_QUANTIZATIONS)
    for inputs in ACTIVATIONS
)
# Nats per token above the baseline; what is not here has no limit.
LIMITS = {
    "auto": 0.02,
    "auto:float": 0.005,
    "auto:int8": 0.02,
    "int4": 0.10,
    "int8": 0.01,
    "fp8": 0.02,
}


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=list(ONLINE_QUANTIZATIONS),
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)} (default: {' '.join(ONLINE_QUANTIZATIONS)})",
    )
    add("--text", type=Path, required=True, help="plain text, or JSONL (also .gz), to score")
    add("--text-field", nargs="+", default=["text"], help="of JSONL: joined (default: text)")
    add("--num-tokens", type=int, default=5000, help="tokens of the text (default: %(default)s)")
    add("--window", type=int, default=1000, help="tokens scored in one context (default: 1000)")
    add(
        "--max-nll-rise",
        type=parse_limit,
        nargs="+",
        default=list(LIMITS.items()),
        metavar="FORMAT=NATS",
        help="nats per token (default: " + " ".join(f"{n}={v:g}" for n, v in LIMITS.items()) + ")",
    )
    add("--prompts", type=Path, help="JSONL with messages, question, turns or prompt")
    add("--prompts-field", help="the field, when it is none of these")
    add("--limit", type=int, default=8, help="prompts (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    add("--rounds", type=int, default=3, help="answers to every prompt (default: %(default)s)")
    add("--output-dir", type=Path, help="where quantisation.{json,md} go; nowhere when omitted")
    add_engine_flags(parser)
    add_no_speculation(parser)
    # What one window or prompt computed would spare another's.
    parser.set_defaults(enable_prefix_caching=False)
    return parser


def parse_limit(text: str) -> tuple[str, float]:
    """`int4=0.1`."""
    name, _, nats = text.partition("=")
    if name not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} is not FORMAT=NATS")
    try:
        return name, float(nats)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not FORMAT=NATS") from error


def plan_arms(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Engine options by format, with the draft; the shipped one drafts 3 tokens and nothing else.

    Raises:
        ConfigError: when what the arms differ in is given.
    """
    given = engine_options(args)
    for option in ("quantization", "activations"):
        if option in given:
            raise ConfigError(f"the arms are formats: name them with --formats, not --{option}")
    ignored = given.pop("quantization_ignore", None)
    chosen = choose_draft(given, args.no_speculation)
    if chosen != given:
        chosen |= {"speculative_lookup": False, "speculative_adaptive": False}
    arms: dict[str, dict[str, Any]] = {BASELINE: {**chosen, "quantization": "none"}}
    for name in args.formats:
        weights, _, inputs = name.partition(":")
        arms[name] = {**chosen, "quantization": weights, "activations": inputs or "auto"}
        if ignored is not None and weights != "auto":
            arms[name]["quantization_ignore"] = ignored
    for options in arms.values():
        engine_config(**options)
    return arms


def weights_of(options: EngineOptions) -> WeightBytes:
    """What the weights take; the model is only sketched."""
    import torch

    from atom.model_engine.rank import resolve_dtype
    from atom.model_loader.quantization import on_platform
    from atom.model_loader.sketch import weight_bytes
    from atom.model_loader.source import resolve_model
    from atom.model_ops.layer_context import LayerContext
    from atom.models.registry import create_model
    from atom.platform import select_platform

    config = engine_config(**options)
    source = resolve_model(config.model)
    dtype = resolve_dtype(config.model.dtype, source)
    context = LayerContext.create(dtype, 1, select_platform(config.device))
    meta = dataclasses.replace(
        context,
        device=torch.device("meta"),
        quant=on_platform(source.quantization, context.ops.platform),
        activations=config.model.activations,
    )
    return weight_bytes(create_model(source.hf_config, meta))


def decode_speeds(
    engines: Mapping[str, LLM], prompts: Sequence[Any], max_tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Tokens per second after the first one, of each prompt in each round.

    Engines take turns prompt by prompt, each time another one first. All generate the same number
    of tokens.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    order = list(engines)
    for turn, prompt in enumerate([prompts[0], *list(prompts) * rounds]):
        first = turn % len(order)
        for name in [*order[first:], *order[:first]]:
            (output,) = engines[name].generate(
                [engines[name].render_chat(prompt)], params, use_tqdm=False
            )
            begin, end = output.metrics.first_token_time, output.metrics.last_token_time
            assert begin is not None
            assert end is not None
            if turn:  # the first is not counted: everything is cold
                speeds[name].append((max_tokens - 1) / (end - begin))
    return speeds


def verify_drafts(options: EngineOptions, prompts: Sequence[Any], max_tokens: int) -> float:
    """Tokens per forward of greedy answers."""
    llm = _create(options)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    rendered = [llm.render_chat(prompt) for prompt in prompts]
    outputs = llm.generate(rendered, params, use_tqdm=False)
    llm.shutdown()
    return total(o.spec_decode or SpecDecodeStats() for o in outputs).tokens_per_forward


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One result per arm, the baseline first.

    Raises:
        ConfigError, ValueError: when an engine or the texts cannot be had.
    """
    arms = plan_arms(args)
    text = read_scored_text(args.text, args.text_field)
    prompts = read_conversations(args.prompts, args.prompts_field)[: args.limit]
    weights = {name: weights_of(options) for name, options in arms.items()}
    engines = {name: _create(without_speculation(options)) for name, options in arms.items()}
    losses = {}
    for name, llm in engines.items():
        losses[name] = score(llm, windows_of(llm, text, args.num_tokens, args.window))
        print(f"{name}: {statistics.fmean(losses[name]):.4f} nats per token", file=sys.stderr)
    speeds = decode_speeds(engines, prompts, args.max_tokens, args.rounds)
    for llm in engines.values():
        llm.shutdown()
    drafted: dict[str, float | None] = dict.fromkeys(arms)
    if speculation_of(arms[BASELINE]):
        drafted = {n: verify_drafts(o, prompts, args.max_tokens) for n, o in arms.items()}
    describe = partial(_describe, losses=losses, speeds=speeds, limits=dict(args.max_nll_rise))
    return [
        {**describe(name), **weights[name]._asdict(), "tokens_per_forward": drafted[name]}
        for name in arms
    ]


def _describe(
    name: str,
    losses: Mapping[str, Sequence[float]],
    speeds: Mapping[str, Sequence[float]],
    limits: Mapping[str, float],
) -> dict[str, Any]:
    rises = [b - a for a, b in zip(losses[BASELINE], losses[name], strict=True)]
    rise, limit = statistics.fmean(rises), limits.get(name)
    ratios = [b / a for a, b in zip(speeds[BASELINE], speeds[name], strict=True)]
    return {
        "format": name,
        "num_tokens": len(rises),
        "nll": statistics.fmean(losses[name]),
        "rise": rise,
        "standard_error": statistics.stdev(rises) / len(rises) ** 0.5,
        "limit": limit,
        "passed": limit is None or rise <= limit,
        "decode_tokens_per_s": statistics.median(speeds[name]),
        "decode_ratio": statistics.median(ratios),
    }


def _create(options: EngineOptions) -> LLM:
    from atom import LLM

    return LLM(**options, no_speculation=not speculation_of(options))


def to_markdown(results: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    header = ["format", "NLL", "rise", "limit", "weights as stored", "weights in memory"]
    header += ["decode speed", "tokens per forward"]
    rows = []
    for r in results:
        forward = r["tokens_per_forward"]
        rows.append(
            [
                r["format"],
                f"{r['nll']:.4f}",
                f"{r['rise']:+.4f} ± {r['standard_error']:.4f}",
                "" if r["limit"] is None else f"{r['limit']:g}{'' if r['passed'] else ' (missed)'}",
                f"{r['stored'] / 1e6:.1f} MB",
                f"{r['held'] / 1e6:.1f} MB",
                f"{r['decode_ratio']:.2f}",
                "" if forward is None else f"{forward:.3f}",
            ]
        )
    note = (
        f"NLL in nats per token, {results[0]['num_tokens']} tokens; the rise with its standard "
        "error. Decode speed of one sequence without drafts, as a share of the unquantised one's "
        f"({results[0]['decode_tokens_per_s']:.1f} tokens/s): the median over prompts and rounds."
    )
    return "\n\n".join([markdown_table(header, rows), note, environment_markdown(facts)]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = create_parser()
    args = parser.parse_args(argv)
    if args.num_tokens < 3 or min(args.window, args.max_tokens) < 2:
        parser.error("--num-tokens, --window and --max-tokens must be larger")
    if min(args.limit, args.rounds) < 1:
        parser.error("--limit and --rounds must be at least 1")
    try:
        results = run(args)
    except (ConfigError, TypeError, ValueError) as error:
        parser.error(str(error))
    facts = environment()
    markdown = to_markdown(results, facts)
    print(markdown)
    if args.output_dir is not None:
        report = {"environment": facts, "results": results}
        write_json(args.output_dir / "quantisation.json", report)
        write_text(args.output_dir / "quantisation.md", markdown)
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
