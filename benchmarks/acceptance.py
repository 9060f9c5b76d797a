"""How many drafts are accepted, and what that is worth, on chat-templated prompts.

Every arm (no speculation, each k, whatever --arm adds) answers the same prompts; arms take turns
chunk by chunk, so that speeds are compared under the same load. Ratios are medians over chunks.

python benchmarks/acceptance.py --prompts gsm8k=test.jsonl mt_bench=question.jsonl \\
    --limit 40 --num-speculative-tokens 1 2 3 --temperature 0 0.7 --output-dir results/acceptance
python benchmarks/acceptance.py --model M --method eagle3 --draft-model D --prompts he=H.jsonl.gz
python benchmarks/acceptance.py --temperature 0.7 1 --bound
python benchmarks/acceptance.py --arm 'suffix={"method": "suffix", "num_speculative_tokens": 15}'
python benchmarks/acceptance.py --base-url off=http://127.0.0.1:8000/v1 k3=http://127.0.0.1:8001/v1
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _acceptance_bound import measure_bounds
from _acceptance_report import line, to_markdown
from _arms import Arm, Batch, Conversation, OfflineArm, Sampling, ServerArm
from tqdm import tqdm

from atom.bench.repetition import repeated_bigram_share
from atom.bench.report import environment, read_conversations, write_json, write_text
from atom.config import ConfigError, EngineConfig
from atom.model_engine.arg_utils import (
    EngineOptions,
    add_engine_flags,
    engine_config,
    engine_options,
    speculation_of,
    with_shipped_draft,
    without_speculation,
)
from atom.options.fields import options_of
from atom.stats import SpecDecodeStats, total

OFF = "off"
_DEFAULT_KS = [3]


@dataclass(frozen=True)
class Group:
    """Prompts that every arm answers in the same way."""

    prompts: str
    temperature: float
    top_p: float
    batch_size: int


@dataclass
class Record:
    """What one arm did in one group, a `Batch` a chunk."""

    batches: list[Batch] = field(default_factory=list)

    @property
    def texts(self) -> list[list[Any]]:
        return [text for batch in self.batches for text in batch.texts]

    def speeds(self) -> list[float]:
        """Tokens per second of each chunk, the prompt's time included."""
        return [sum(b.num_tokens) / b.seconds for b in self.batches]

    def decode_speeds(self) -> list[float | None]:
        """The same over the tokens after the first; None where they cannot be timed."""
        return [
            (sum(b.num_tokens) - len(b.num_tokens)) / b.decode_seconds if b.decode_seconds else None
            for b in self.batches
        ]

    def total_speed(self) -> float:
        return sum(map(sum, (b.num_tokens for b in self.batches))) / sum(
            b.seconds for b in self.batches
        )


def parse_prompts(text: str) -> tuple[str, Path, str | None]:
    """`NAME=PATH` or `NAME=PATH:FIELD`.

    Raises:
        argparse.ArgumentTypeError: when the text is neither.
    """
    name, equals, rest = text.partition("=")
    if not equals or not name or not rest:
        raise argparse.ArgumentTypeError(f"expected NAME=PATH or NAME=PATH:FIELD, got {text!r}")
    if Path(rest).exists() or ":" not in rest:
        return name, Path(rest), None
    path, _, chosen = rest.rpartition(":")
    return name, Path(path), chosen


def parse_arm(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME={json engine arguments}`.

    Raises:
        argparse.ArgumentTypeError: when the text is not that.
    """
    name, _, rest = text.partition("=")
    try:
        value = json.loads(rest)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if not name or name == OFF or not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"expected NAME={{json object}} with a name other than {OFF!r}, got {text!r}"
        )
    return name, value


def parse_server(text: str) -> tuple[str, str]:
    """`URL` or `NAME=URL`."""
    name, equals, url = text.partition("=")
    return (name, url) if equals and "/" not in name else ("server", text)


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # k is a list here
    )
    add = parser.add_argument
    add(
        "--prompts",
        type=parse_prompts,
        nargs="+",
        action="extend",
        metavar="NAME=PATH[:FIELD]",
        help="JSONL (or .jsonl.gz) with messages, question, turns or prompt; built-in ones else",
    )
    add("--limit", type=int, help="prompts of each file; all when omitted")
    add("--stride", type=int, default=1, help="take every n-th prompt (default: 1)")
    add("--max-tokens", type=int, default=160, help="tokens per answer (default: 160)")
    add("--temperature", type=float, nargs="+", default=[0.0], help="(default: 0)")
    add("--top-p", type=float, default=1.0, help="at temperatures above 0 (default: 1)")
    add("--sampling-seed", type=int, default=0, help="of the first prompt; counts up (default: 0)")
    add("--batch-size", type=int, nargs="+", default=[1], help="prompts together (default: 1)")
    add("--lookup", action="store_true", help="each k also with --speculative-lookup")
    add("--adaptive", action="store_true", help="each k also with --speculative-adaptive")
    add(
        "--arm",
        type=parse_arm,
        action="append",
        default=[],
        metavar="NAME={JSON}",
        help="one more arm, with these engine arguments; may be repeated",
    )
    add(
        "--base-url",
        type=parse_server,
        nargs="+",
        metavar="[NAME=]URL",
        help="servers instead of engines in this process; the first is what others are compared to",
    )
    add("--api-key", help="of the servers")
    add("--timeout", type=float, default=600.0, help="of a request to a server, in seconds")
    add(
        "--bound",
        action="store_true",
        help="also the best that drafts could do: of the first arm that drafts, prompt by prompt",
    )
    add("--require-same", action="store_true", help="fail unless every arm gives the same text")
    add("--output-dir", type=Path, help="where acceptance.{json,md,png} go; nowhere when omitted")
    add_engine_flags(parser)
    add(
        "--num-speculative-tokens",
        "--num_speculative_tokens",
        type=int,
        nargs="+",
        default=_DEFAULT_KS,
        help="an arm for each (default: 3)",
    )
    # A prompt that one arm has answered before would come from the cache.
    parser.set_defaults(enable_prefix_caching=False)
    return parser


def plan_arms(args: argparse.Namespace) -> dict[str, EngineOptions]:
    """Engine options by arm, no speculation first.

    Raises:
        ConfigError, TypeError: when an arm cannot be, or there is none.
    """
    ks: list[int] = args.num_speculative_tokens
    given = engine_options(argparse.Namespace(**{**vars(args), "num_speculative_tokens": None}))
    base = without_speculation(given)
    arms: dict[str, EngineOptions] = {OFF: base}
    if "speculative_config" in given:
        raise ConfigError("give --speculative-config as an arm: --arm 'NAME={engine arguments}'")
    drafting = given
    if not speculation_of(given):
        # The shipped draft alone: lookup and adaptive lengths are arms of their own.
        shipped = with_shipped_draft(given)
        drafting = {**given, **{n: shipped[n] for n in ("method", "draft_model") if n in shipped}}
    if "method" in drafting:
        for k in ks:
            for name, options in _variants(args, k).items():
                arms[name] = {**drafting, **options}
    elif args.lookup or args.adaptive or ks != _DEFAULT_KS:
        raise ConfigError("--num-speculative-tokens, --lookup and --adaptive need a --method")
    for name, options in args.arm:
        arms[name] = {**base, **options}
    if len(arms) == 1:
        raise ConfigError("nothing to compare: name a --method, or an --arm")
    for engine in arms.values():
        engine_config(**engine)
    return arms


def _variants(args: argparse.Namespace, k: int) -> dict[str, dict[str, Any]]:
    plain: dict[str, Any] = {"num_speculative_tokens": k}
    variants = {f"k={k}": plain}
    if args.lookup:
        variants[f"k={k} lookup"] = {**plain, "speculative_lookup": True}
    if args.adaptive:
        for name, options in list(variants.items()):
            variants[f"{name} adaptive"] = {**options, "speculative_adaptive": True}
    return variants


def create_arms(args: argparse.Namespace) -> list[Arm]:
    """Build every engine, or connect to every server.

    Raises:
        ConfigError: for options that are for the other kind, besides what `plan_arms` raises.
    """
    if args.base_url is None and args.api_key is not None:
        raise ConfigError("--api-key is for servers; name one with --base-url")
    if args.base_url is not None:
        _refuse_engine_flags(args)
        return [ServerArm(n, url, args.api_key, args.timeout) for n, url in args.base_url]
    return [OfflineArm(name, options) for name, options in plan_arms(args).items()]


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    names = [option.name for option in options_of(EngineConfig)] + ["arm", "lookup", "adaptive"]
    given, default = vars(args), vars(create_parser().parse_args([]))
    if ignored := [name for name in names if given[name] != default[name]]:
        raise ConfigError(
            f"--{ignored[0].replace('_', '-')} is for engines in this process, and --base-url "
            "measures servers: give the option to them"
        )


def read_prompts(args: argparse.Namespace) -> dict[str, list[Conversation]]:
    files = args.prompts or [("built-in", None, None)]
    sets = {name: read_conversations(path, chosen) for name, path, chosen in files}
    return {name: found[:: args.stride][: args.limit] for name, found in sets.items()}


def run_group(
    group: Group, prompts: list[Conversation], arms: Sequence[Arm], args: argparse.Namespace
) -> dict[str, Record]:
    """Every arm answers every chunk, each time another one first."""
    records = {arm.name: Record() for arm in arms}
    starts = range(0, len(prompts), group.batch_size)
    label = f"{group.prompts} T={group.temperature:g} batch {group.batch_size}"
    for turn, start in enumerate(tqdm(starts, desc=label, disable=not sys.stderr.isatty())):
        chunk = prompts[start : start + group.batch_size]
        sampling = [
            Sampling(
                group.temperature, args.sampling_seed + start + i, args.max_tokens, group.top_p
            )
            for i in range(len(chunk))
        ]
        first = turn % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            records[arm.name].batches.append(arm.answer(chunk, sampling))
    return records


def evaluate(records: Mapping[str, Record], unit: str) -> list[dict[str, Any]]:
    """One result per arm; the first arm is what the others are compared to."""
    reference = next(iter(records.values()))
    results = []
    for name, record in records.items():
        stats = total(b.drafts for b in record.batches if b.drafts is not None)
        drafted = stats.num_drafts or 1
        decode = [s for s in record.decode_speeds() if s is not None]
        results.append(
            {
                "arm": name,
                "num_prompts": len(record.texts),
                "output_tokens": sum(sum(b.num_tokens) for b in record.batches),
                "tokens_per_forward": stats.tokens_per_forward,
                "acceptance_rate": stats.acceptance_rate,
                "acceptance_per_position": [n / drafted for n in stats.accepted_per_position],
                "distribution": stats.accepted_counts,
                "verified_steps": stats.num_drafts,
                "by_source": _by_source(stats),
                "repeated_bigrams": statistics.fmean(map(repeated_bigram_share, record.texts)),
                "bigrams_of": unit,
                "tokens_per_s": statistics.median(record.speeds()),
                "total_tokens_per_s": record.total_speed(),
                "decode_tokens_per_s": statistics.median(decode) if decode else None,
                "speedup": _median_ratio(record.speeds(), reference.speeds()),
                "decode_speedup": _median_ratio(record.decode_speeds(), reference.decode_speeds()),
                "same_texts": sum(
                    a == b for a, b in zip(record.texts, reference.texts, strict=True)
                ),
            }
        )
    _judge_adaptive(results)
    return results


def _by_source(stats: SpecDecodeStats) -> dict[str, dict[str, Any]]:
    """Who proposed how often, and what it yielded."""
    return {
        name: {
            "share_of_steps": part.num_drafts / stats.num_drafts,
            "tokens_per_forward": part.tokens_per_forward,
            "acceptance_rate": part.acceptance_rate,
            "distribution": part.accepted_counts,
        }
        for name, part in stats.by_source.items()
        if part.num_drafts
    }


def _median_ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if a is not None and b]
    return statistics.median(ratios) if ratios else None


def _judge_adaptive(results: list[dict[str, Any]]) -> None:
    """Add how an adaptive arm's speed relates to the better of on and off."""
    speeds = {r["arm"]: r["total_tokens_per_s"] for r in results}
    for result in results:
        on = result["arm"].removesuffix(" adaptive")
        if on != result["arm"] and on in speeds and OFF in speeds:
            result["against_better"] = result["total_tokens_per_s"] / max(speeds[on], speeds[OFF])


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every group; one result per group and arm."""
    sets = read_prompts(args)
    arms = create_arms(args)
    try:
        warm_up = next(iter(sets.values()))[:1]
        for arm in arms:
            arm.answer(warm_up, [Sampling(0.0, 0, 4)])
        results = []
        for name, prompts in sets.items():
            for temperature in args.temperature:
                for batch_size in args.batch_size:
                    group = Group(name, temperature, args.top_p, batch_size)
                    records = run_group(group, prompts, arms, args)
                    found = evaluate(records, arms[0].unit)
                    for r in found:
                        results.append({**dataclasses.asdict(group), **r})
                        print(line(results[-1]), flush=True)
        return results
    finally:
        for arm in arms:
            arm.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = create_parser()
    args = parser.parse_args(argv)
    if min(args.stride, *args.batch_size) < 1 or (args.limit is not None and args.limit < 1):
        parser.error("--stride, --limit and --batch-size must be at least 1")
    try:
        results = run(args)
        bounds = measure_bounds(args, plan_arms, read_prompts) if args.bound else []
    except (ConfigError, ConnectionError, TypeError, ValueError) as error:
        parser.error(str(error))
    facts = environment()
    markdown = to_markdown(results, facts, bounds)
    print("\n" + markdown)
    if args.output_dir is not None:
        write_json(
            args.output_dir / "acceptance.json",
            {"environment": facts, "results": results, "bounds": bounds},
        )
        write_text(args.output_dir / "acceptance.md", markdown)
        from _plot import plot_acceptance

        plot_acceptance(results, args.output_dir / "acceptance.png")
    differing = any(r["same_texts"] != r["num_prompts"] for r in results)
    return 1 if args.require_same and differing else 0


if __name__ == "__main__":
    sys.exit(main())
