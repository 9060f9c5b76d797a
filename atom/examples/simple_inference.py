"""Streams a few chat prompts to the terminal, then shows what each cost.

The embedded model speculates with the draft that was made for it; the prompts are then answered
once more without speculation, and a table compares the two.

python -m atom.examples.simple_inference
python -m atom.examples.simple_inference --model MODEL --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atom.command_line.parser import CommandLine
from atom.config import ConfigError
from atom.entrypoints.offline.start import start_llm
from atom.model_engine.arg_utils import (
    EngineOptions,
    add_engine_flags,
    add_model,
    add_no_speculation,
    add_show_ops,
    choose_draft,
    engine_config,
    engine_options,
    speculation_of,
    without_speculation,
)
from atom.sampling_params import SamplingParams
from atom.stats import SpecDecodeStats, total

if TYPE_CHECKING:
    from atom.entrypoints.llm import LLM

_PROG = "python -m atom.examples.simple_inference"
DEFAULT_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?",
)


@dataclass(frozen=True)
class Answer:
    """What one prompt yielded, and what it cost.

    Attributes:
        ttft: seconds from submission to the first token.
        decode_seconds: seconds from the first token to the last.
        drafts: those that were verified; None when none was.
    """

    num_prompt_tokens: int
    token_ids: list[int]
    ttft: float
    decode_seconds: float
    finish_reason: str
    drafts: SpecDecodeStats | None = None

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: every token but the first, over the time since the first."""
        return _speed([self])


def _speed(answers: Sequence[Answer]) -> float:
    seconds = sum(a.decode_seconds for a in answers)
    return sum(len(a.token_ids) - 1 for a in answers) / seconds if seconds else 0.0


def create_parser(prog: str = _PROG) -> CommandLine:
    parser = CommandLine(prog=prog, description=__doc__)
    add_model(parser)
    parser.add_argument("--prompt", action="append", help="a user message; may be repeated")
    parser.add_argument("--prompts-file", type=Path, help="text file with one user message a line")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="answer again without speculation; only with the embedded model when omitted",
    )
    add_engine_flags(parser)
    add_no_speculation(parser)
    add_show_ops(parser)
    return parser


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line and of the file, else the built-in ones.

    Raises:
        ConfigError: when the file cannot be read or holds nothing.
    """
    prompts = list(args.prompt or ())
    if args.prompts_file is not None:
        try:
            lines = args.prompts_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --prompts-file {args.prompts_file}: {error}") from error
        prompts += [line for line in lines if line.strip()]
        if not prompts:
            raise ConfigError(f"--prompts-file {args.prompts_file} holds no prompt")
    return prompts or list(DEFAULT_PROMPTS)


def main(argv: Sequence[str] | None = None, *, prog: str = _PROG) -> int:
    args = create_parser(prog).parse_args(argv)
    try:
        prompts = read_prompts(args)
        params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p
        )
        given = choose_draft(engine_options(args), args.no_speculation)
        if args.show_ops:
            from atom.model_engine.start_up.show_ops import describe_ops

            print(describe_ops(engine_config(**given)))
            return 0
        speculates = bool(speculation_of(given))
        if args.compare and not speculates:
            raise ConfigError("--compare compares with no speculation, so it needs a --method")
        compare = args.model is None if args.compare is None else args.compare
        run(prompts, params, given, compare and speculates)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(
    prompts: Sequence[str], params: SamplingParams, given: EngineOptions, compare: bool
) -> None:
    """Answer every prompt in turn and print the table.

    Args:
        compare: answer them once more without speculation.
    """
    if compare and given.get("seed") is None:
        # Both engines draw the seeds of their requests from it.
        given = {**given, "seed": random.SystemRandom().getrandbits(31)}
    warm_up = 48 if compare else 0  # a comparison is of steps that were recorded
    answers = _answer_all(given, prompts, params, warm_up, shown=True)
    print()
    if not compare:
        print(format_table(answers))
    else:
        print("once more without speculation ...", flush=True)
        plain = _answer_all(without_speculation(given), prompts, params, warm_up, shown=False)
        print()
        print(format_comparison(answers, plain))
    drafts = [a.drafts for a in answers if a.drafts is not None]
    if drafts:
        print(f"speculation: {total(drafts).summary()}")


def _answer_all(
    given: EngineOptions,
    prompts: Sequence[str],
    params: SamplingParams,
    warm_up: int,
    *,
    shown: bool,
) -> list[Answer]:
    """Args:
    warm_up: tokens of an answer that is not shown and comes first; 0 for none.
    """
    llm = start_llm(given)
    if shown and (weights := llm.engine.core.limits.weights):
        print(weights)
    if warm_up:  # No measured prompt is cached by it.
        few = msgspec.structs.replace(params, max_tokens=warm_up, ignore_eos=True)
        _answer(llm, "Count from one to ten.", few, shown=False)
    answers = []
    for prompt in prompts:
        if shown:
            print(f"\n\033[1m> {prompt}\033[0m" if sys.stdout.isatty() else f"\n> {prompt}")
        answers.append(_answer(llm, prompt, params, shown=shown))
    llm.shutdown()
    return answers


def _answer(llm: LLM, prompt: str, params: SamplingParams, *, shown: bool) -> Answer:
    token_ids: list[int] = []
    output = None
    for output in llm.stream(llm.render_chat([{"role": "user", "content": prompt}]), params):
        completion = output.outputs[0]
        token_ids += completion.token_ids
        if shown:
            print(completion.text, end="", flush=True)
    if shown:
        print()
    assert output is not None
    metrics = output.metrics
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    return Answer(
        num_prompt_tokens=len(output.prompt_token_ids),
        token_ids=token_ids,
        ttft=metrics.first_token_time - metrics.arrival_time,
        decode_seconds=metrics.last_token_time - metrics.first_token_time,
        finish_reason=str(output.outputs[0].finish_reason),
        drafts=output.spec_decode,
    )


def format_table(answers: Sequence[Answer]) -> str:
    """One line per prompt."""
    lines = [f"{'prompt':>6} {'tokens in':>9} {'out':>5} {'TTFT ms':>8} {'tokens/s':>8}  finish"]
    lines += [
        f"{i:>6} {a.num_prompt_tokens:>9} {len(a.token_ids):>5} {a.ttft * 1e3:>8.0f} "
        f"{a.tokens_per_second:>8.1f}  {a.finish_reason}"
        for i, a in enumerate(answers, 1)
    ]
    return "\n".join(lines)


def format_comparison(speculating: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """One line for all prompts and one for each: decode speed with and without speculation."""
    header = f"{'prompt':>6} {'tokens in':>9} {'out':>5} {'TTFT ms':>8} {'tokens/s':>8} "
    header += f"{'without':>8} {'speed-up':>8} {'accepted':>8} {'tokens/forward':>14}  same text"
    tokens_in = sum(a.num_prompt_tokens for a in speculating)
    tokens_out = sum(len(a.token_ids) for a in speculating)
    same = sum(a.token_ids == b.token_ids for a, b in zip(speculating, plain, strict=True))
    lines = [
        header,
        f"{'all':>6} {tokens_in:>9} {tokens_out:>5} {'':>8} {_compared(speculating, plain)}  "
        f"{same} of {len(plain)}",
    ]
    for i, (a, b) in enumerate(zip(speculating, plain, strict=True), 1):
        lines.append(
            f"{i:>6} {a.num_prompt_tokens:>9} {len(a.token_ids):>5} {a.ttft * 1e3:>8.0f} "
            f"{_compared([a], [b])}  {_same(a, b)}"
        )
    if (slower := _why_slower(speculating, plain)) is not None:
        lines.append(slower)
    if same < len(plain):
        lines.append(
            "Rounding depends on how many tokens a step computes, so where two tokens are almost "
            "as likely, texts may part; --dtype float32 makes that all but impossible."
        )
    return "\n".join(lines)


def _compared(speculating: Sequence[Answer], plain: Sequence[Answer]) -> str:
    fast, slow = _speed(speculating), _speed(plain)
    drafts = total([a.drafts for a in speculating if a.drafts is not None])
    return (
        f"{fast:>8.1f} {slow:>8.1f} {fast / slow if slow else 0:>7.2f}x "
        f"{drafts.acceptance_rate:>8.1%} {drafts.tokens_per_forward:>14.2f}"
    )


def _why_slower(speculating: Sequence[Answer], plain: Sequence[Answer]) -> str | None:
    """Where speculation did not pay: what a step with drafts yields, and what it costs."""
    fast, slow = _speed(speculating), _speed(plain)
    drafts = [a.drafts for a in speculating if a.drafts is not None]
    if not 0 < fast < slow or not drafts:
        return None
    tokens = total(drafts).tokens_per_forward
    return (
        f"Speculation is slower than none on this machine now: a step with drafts gives "
        f"{tokens:.2f} tokens and takes {tokens * slow / fast:.2f} times as long as one without. "
        f"--no-speculation turns it off."
    )


def _same(a: Answer, b: Answer) -> str:
    if a.token_ids == b.token_ids:
        return "yes"
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    shared = next((i for i, (x, y) in enumerate(pairs) if x != y), len(a.token_ids))
    return f"up to token {shared}"


if __name__ == "__main__":
    sys.exit(main())
