"""`atom bench latency`: how long one batch takes, again and again.

atom bench latency --batch-size 1 --max-tokens 128
atom bench latency --batch-size 8 --input-len 512 --output-len 64 --num-iters 30

Prefix caching is off: every iteration computes its prompts. Of random tokens (--input-len) a
draft guesses less than of text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atom.bench.in_process import Bench, add_engine, add_prompts, start
from atom.bench.report import environment, markdown_table, summarise, write_json
from atom.command_line.parser import CommandLine
from atom.stats import total

if TYPE_CHECKING:
    from atom.outputs import RequestOutput


def create_parser(prog: str = "atom bench latency") -> CommandLine:
    parser = CommandLine(prog=prog, description=__doc__)
    add = parser.add_argument
    add(
        "--batch-size", dest="num_prompts", type=int, default=1, help="prompts at once (default: 1)"
    )
    add("--num-iters-warmup", type=int, default=2, help="not measured (default: %(default)s)")
    add("--num-iters", type=int, default=10, help="(default: %(default)s)")
    add_prompts(parser)
    add_engine(parser)
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "atom bench latency") -> int:
    parser = create_parser(prog)
    args = parser.parse_args(argv)
    if min(args.num_prompts, args.num_iters) < 1:
        parser.error("--batch-size and --num-iters must be at least 1")
    bench = start(parser, args, enable_prefix_caching=False)
    for _ in range(args.num_iters_warmup):
        _run(bench)
    runs = [_run(bench) for _ in range(args.num_iters)]
    bench.llm.shutdown()
    latencies = {
        "latency_ms": summarise([seconds * 1e3 for seconds, _ in runs]),
        "ttft_ms": summarise([_ttft(output) * 1e3 for _, outputs in runs for output in outputs]),
    }
    columns = ("mean", "median", "p95", "p99")
    rows = [
        (name, *(f"{summary[column]:.2f}" for column in columns))
        for name, summary in latencies.items()
        if summary is not None
    ]
    print(markdown_table(["", *columns], rows))
    drafts = [each.spec_decode for _, outputs in runs for each in outputs if each.spec_decode]
    if drafts:
        print(f"\nspeculation: {total(drafts).summary()}")
    report = {
        "environment": environment(),
        "engine": bench.engine,
        "batch_size": args.num_prompts,
        "output_tokens": [_num_tokens(outputs) for _, outputs in runs],
        **latencies,
        "tokens_per_forward": total(drafts).tokens_per_forward if drafts else 1.0,
    }
    write_json(args.output_json, report)
    return 0


def _run(bench: Bench) -> tuple[float, list[RequestOutput]]:
    """Answer the batch; the seconds that it took, and the answers."""
    started = time.perf_counter()
    outputs = bench.llm.generate(bench.prompts, bench.params, use_tqdm=False)
    return time.perf_counter() - started, outputs


def _ttft(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics.first_token_time is not None
    return metrics.first_token_time - metrics.arrival_time


def _num_tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)
