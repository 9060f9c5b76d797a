"""Streams a few chat prompts to the terminal, then shows what each cost.

python -m atom.examples.simple_inference
python -m atom.examples.simple_inference --model MODEL --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atom.config import ConfigError
from atom.model_engine.arg_utils import EngineArgs
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom.entrypoints.llm import LLM

DEFAULT_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?",
)


@dataclass(frozen=True)
class Measurement:
    """Attributes:
    ttft: seconds from submission to the first token.
    decode_seconds: seconds from the first token to the last.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    ttft: float
    decode_seconds: float
    finish_reason: str

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: every token but the first, over the time since the first."""
        if not self.decode_seconds:
            return 0.0
        return (self.num_output_tokens - 1) / self.decode_seconds


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m atom.examples.simple_inference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompt", action="append", help="a user message; may be repeated")
    parser.add_argument("--prompts-file", type=Path, help="text file with one user message a line")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    EngineArgs.add_cli_args(parser)
    return parser.parse_args(argv)


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


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        prompts = read_prompts(args)
        params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p
        )
        engine_args = EngineArgs.from_cli_args(args)
        run(prompts, params, engine_args)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(prompts: Sequence[str], params: SamplingParams, engine_args: EngineArgs) -> None:
    """Answer every prompt in turn and print the table."""
    import dataclasses

    from atom.entrypoints.llm import LLM

    llm = LLM(**dataclasses.asdict(engine_args))
    measurements = []
    for prompt in prompts:
        print(f"\n\033[1m> {prompt}\033[0m" if sys.stdout.isatty() else f"\n> {prompt}")
        measurements.append(_answer(llm, prompt, params))
    print()
    print(format_table(measurements))
    stats = llm.engine.core.stats.spec_decode
    if stats is not None:
        print(f"speculation: {stats.describe()}")
    llm.shutdown()


def _answer(llm: LLM, prompt: str, params: SamplingParams) -> Measurement:
    num_tokens = 0
    output = None
    for output in llm.stream(llm.render_chat([{"role": "user", "content": prompt}]), params):
        completion = output.outputs[0]
        num_tokens += len(completion.token_ids)
        print(completion.text, end="", flush=True)
    print()
    assert output is not None
    metrics = output.metrics
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    return Measurement(
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=num_tokens,
        ttft=metrics.first_token_time - metrics.arrival_time,
        decode_seconds=metrics.last_token_time - metrics.first_token_time,
        finish_reason=str(output.outputs[0].finish_reason),
    )


def format_table(measurements: Sequence[Measurement]) -> str:
    """One line per prompt."""
    lines = [f"{'prompt':>6} {'tokens in':>9} {'out':>5} {'TTFT ms':>8} {'tokens/s':>8}  finish"]
    lines += [
        f"{i:>6} {m.num_prompt_tokens:>9} {m.num_output_tokens:>5} {m.ttft * 1e3:>8.0f} "
        f"{m.tokens_per_second:>8.1f}  {m.finish_reason}"
        for i, m in enumerate(measurements, 1)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
