"""What storing the KV cache in 8 bits costs: likelihood of a text, and acceptance of drafts.

Two engines in one process, with a bfloat16 and with an fp8 KV cache, score the same text and
answer the same prompts greedily. The exit status is 1 when fp8 is worse by more than the limits.

python benchmarks/kv_cache_dtype.py --text test.jsonl --text-field answer --prompts test.jsonl \\
    --limit 40 --output-dir results
python benchmarks/kv_cache_dtype.py --text book.txt --num-tokens 20000 --no-speculation
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _likelihood import read_scored_text, score, windows_of

from atom.bench.report import (
    environment,
    environment_markdown,
    markdown_table,
    percentile,
    read_conversations,
    write_json,
    write_text,
)
from atom.config import ConfigError
from atom.model_engine.arg_utils import (
    add_engine_flags,
    add_no_speculation,
    choose_draft,
    engine_options,
    speculation_of,
)
from atom.sampling_params import SamplingParams
from atom.stats import SpecDecodeStats, total

if TYPE_CHECKING:
    from atom import LLM
    from atom.outputs import RequestOutput

BASELINE, CANDIDATE = "bf16", "fp8"
_RESAMPLES = 2000


@dataclass(frozen=True)
class Acceptance:
    """How drafts fared, prompt by prompt."""

    per_prompt: list[SpecDecodeStats]
    texts: list[list[int]]

    @property
    def rate(self) -> float:
        return total(self.per_prompt).acceptance_rate


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, required=True, help="plain text, or JSONL (also .gz), to score")
    add("--text-field", nargs="+", default=["text"], help="of JSONL: joined (default: text)")
    add("--num-tokens", type=int, default=4000, help="tokens of the text (default: %(default)s)")
    add("--window", type=int, default=1000, help="tokens scored in one context (default: 1000)")
    add("--max-nll-rise", type=float, default=0.02, help="nats per token (default: %(default)s)")
    add("--prompts", type=Path, help="JSONL with messages, question, turns or prompt")
    add("--prompts-field", help="the field, when it is none of these")
    add("--limit", type=int, default=24, help="prompts (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    add("--batch-size", type=int, default=8, help="prompts together (default: %(default)s)")
    add(
        "--max-acceptance-fall",
        type=float,
        default=0.03,
        help="share of the acceptance rate (default: %(default)s)",
    )
    add("--output-dir", type=Path, help="where kv_cache_dtype.{json,md} go; nowhere when omitted")
    add_engine_flags(parser)
    add_no_speculation(parser)
    # What one window or prompt computed would spare another's.
    parser.set_defaults(enable_prefix_caching=False)
    return parser


def engine_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine of both arms; the shipped draft speculates with 3 tokens and nothing else.

    Raises:
        ConfigError: when the storage, which the arms differ in, is given.
    """
    given = engine_options(args)
    if "kv_cache_dtype" in given:
        raise ConfigError(f"the arms are {BASELINE} and {CANDIDATE}: leave --kv-cache-dtype out")
    chosen = choose_draft(given, args.no_speculation)
    if chosen != given:
        chosen |= {"num_speculative_tokens": 3, "speculative_lookup": False}
    return chosen


def answer(llm: LLM, task: Task) -> Acceptance:
    params = SamplingParams(max_tokens=task.max_tokens, temperature=0.0)
    outputs: list[RequestOutput] = []
    for start in range(0, len(task.prompts), task.batch_size):
        rendered = [llm.render_chat(p) for p in task.prompts[start : start + task.batch_size]]
        outputs += llm.generate(rendered, params, use_tqdm=False)
    return Acceptance(
        [output.spec_decode or SpecDecodeStats() for output in outputs],
        [output.outputs[0].token_ids for output in outputs],
    )


def compare_losses(losses: dict[str, list[float]], limit: float) -> dict[str, Any]:
    rises = [b - a for a, b in zip(losses[BASELINE], losses[CANDIDATE], strict=True)]
    rise = statistics.fmean(rises)
    return {
        "num_tokens": len(rises),
        "nll": {name: statistics.fmean(values) for name, values in losses.items()},
        "rise": rise,
        "standard_error": statistics.stdev(rises) / len(rises) ** 0.5,
        "limit": limit,
        "passed": rise <= limit,
    }


def compare_acceptance(found: dict[str, Acceptance], limit: float) -> dict[str, Any]:
    before, after = found[BASELINE], found[CANDIDATE]
    change = after.rate / before.rate - 1 if before.rate else 0.0
    pairs = list(zip(before.per_prompt, after.per_prompt, strict=True))
    return {
        "num_prompts": len(pairs),
        "acceptance_rate": {name: a.rate for name, a in found.items()},
        "tokens_per_forward": {
            name: total(a.per_prompt).tokens_per_forward for name, a in found.items()
        },
        "num_draft_tokens": {
            name: total(a.per_prompt).num_draft_tokens for name, a in found.items()
        },
        "change": change,
        "interval": _interval(pairs),
        "same_texts": sum(a == b for a, b in zip(before.texts, after.texts, strict=True)),
        "limit": limit,
        "passed": change >= -limit,
    }


def _interval(pairs: Sequence[tuple[SpecDecodeStats, SpecDecodeStats]]) -> tuple[float, float]:
    """Where 95 % of the changes lie when prompts are drawn anew from the same ones."""
    generator = random.Random(0)
    changes = []
    for _ in range(_RESAMPLES):
        drawn = generator.choices(pairs, k=len(pairs))
        rates = [total(pair[side] for pair in drawn).acceptance_rate for side in (0, 1)]
        changes.append(rates[1] / rates[0] - 1 if rates[0] else 0.0)
    return percentile(changes, 2.5), percentile(changes, 97.5)


@dataclass(frozen=True)
class Task:
    """What both engines are given; no prompts without speculation."""

    text: str
    num_tokens: int
    window: int
    prompts: Sequence[list[Any]]
    max_tokens: int
    batch_size: int


def measure(llm: LLM, task: Task) -> tuple[list[float], Acceptance]:
    windows = windows_of(llm, task.text, task.num_tokens, task.window)
    return score(llm, windows), answer(llm, task)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Build one engine after the other, measure and compare.

    Raises:
        ConfigError, ValueError: when the engine or the texts cannot be had.
    """
    from atom import LLM

    options = engine_options_of(args)
    prompts = read_conversations(args.prompts, args.prompts_field)
    task = Task(
        text=read_scored_text(args.text, args.text_field),
        num_tokens=args.num_tokens,
        window=args.window,
        prompts=prompts[: args.limit] if speculation_of(options) else [],
        max_tokens=args.max_tokens,
        batch_size=args.batch_size,
    )
    losses: dict[str, list[float]] = {}
    acceptance: dict[str, Acceptance] = {}
    for name in (BASELINE, CANDIDATE):
        started = time.monotonic()
        llm = LLM(**{**options, "kv_cache_dtype": name}, no_speculation=not speculation_of(options))
        losses[name], acceptance[name] = measure(llm, task)
        llm.shutdown()
        print(f"{name}: measured in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return {
        "model": options.get("model") or "the embedded one",
        "draft_model": options.get("draft_model"),
        "likelihood": compare_losses(losses, args.max_nll_rise),
        "acceptance": compare_acceptance(acceptance, args.max_acceptance_fall)
        if task.prompts
        else None,
    }


def to_markdown(report: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    likelihood, acceptance = report["likelihood"], report["acceptance"]
    header = ["", BASELINE, CANDIDATE, "change", "limit", "passed"]
    nll = likelihood["nll"]
    rows = [
        [
            f"NLL in nats per token, {likelihood['num_tokens']} tokens",
            *(f"{nll[name]:.4f}" for name in (BASELINE, CANDIDATE)),
            f"{likelihood['rise']:+.4f} (standard error {likelihood['standard_error']:.4f})",
            f"+{likelihood['limit']:g}",
            _yes(likelihood["passed"]),
        ]
    ]
    if acceptance is None:
        note = "No drafts: acceptance was not measured."
    else:
        rate, per_forward = acceptance["acceptance_rate"], acceptance["tokens_per_forward"]
        low, high = acceptance["interval"]
        rows.append(
            [
                f"acceptance rate, {acceptance['num_prompts']} prompts",
                *(f"{rate[name]:.1%}" for name in (BASELINE, CANDIDATE)),
                f"{acceptance['change']:+.1%} (95 % interval {low:+.1%} to {high:+.1%})",
                f"-{acceptance['limit']:.0%}",
                _yes(acceptance["passed"]),
            ]
        )
        forwards = [f"{per_forward[name]:.3f}" for name in (BASELINE, CANDIDATE)]
        rows.append(["tokens per forward", *forwards, "", "", ""])
        note = (
            f"Greedy; {acceptance['same_texts']} of {acceptance['num_prompts']} texts are the "
            "same. The interval is a bootstrap over prompts."
        )
    return "\n\n".join([markdown_table(header, rows), note, environment_markdown(facts)]) + "\n"


def _yes(passed: bool) -> str:
    return "yes" if passed else "no"


def main(argv: Sequence[str] | None = None) -> int:
    parser = create_parser()
    args = parser.parse_args(argv)
    if args.num_tokens < 3 or args.window < 2 or min(args.limit, args.batch_size) < 1:
        parser.error("--num-tokens, --window, --limit and --batch-size must be larger")
    try:
        report = run(args)
    except (ConfigError, TypeError, ValueError) as error:
        parser.error(str(error))
    facts = environment()
    markdown = to_markdown(report, facts)
    print(markdown)
    if args.output_dir is not None:
        write_json(args.output_dir / "kv_cache_dtype.json", {"environment": facts, **report})
        write_text(args.output_dir / "kv_cache_dtype.md", markdown)
    parts = [part for part in (report["likelihood"], report["acceptance"]) if part is not None]
    return 0 if all(part["passed"] for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
