"""`atom bench throughput`: all prompts at once through an engine in this process.

atom bench throughput --num-prompts 64 --max-tokens 128
atom bench throughput --prompts-file questions.jsonl --field question
atom bench throughput --input-len 512 --output-len 64
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atom.bench.in_process import add_engine, add_prompts, start
from atom.bench.report import environment, markdown_table, write_json
from atom.command_line.parser import CommandLine
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
    bench = start(parser, args)
    llm, prompts = bench.llm, bench.prompts
    llm.generate(prompts[:2], SamplingParams(max_tokens=4), use_tqdm=False)  # warm-up
    rounds = [measure(llm, prompts, bench.params) for _ in range(args.rounds)]
    llm.shutdown()
    median = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    print(markdown_table(["median of rounds", ""], [(n, f"{v:.2f}") for n, v in median.items()]))
    write_json(
        args.output_json,
        {
            "environment": environment(),
            "engine": bench.engine,
            "median": median,
            "rounds": rounds,
        },
    )
    return 0
