"""Throughput of one engine against that of several replicas, each with threads of its own.

python benchmarks/replicas.py --num-threads 1 --kv-cache-memory 256MiB
python benchmarks/replicas.py --replicas 1 4 --model MODEL --device cuda --rounds 5

All engines are started at once and take turns; who goes first alternates. Every replica has as
many clients and as many requests of random tokens as the single engine, so equal times are perfect.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atom.bench.report import environment, markdown_table, write_json
from atom.model_engine.arg_utils import add_engine_flags, engine_config, engine_options
from atom.model_engine.async_engine import AsyncEngine
from atom.sampling_params import SamplingParams


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[1, 2], help="the first is the measure (1 2)"
    )
    parser.add_argument("--clients", type=int, default=8, help="of each replica (%(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="for each replica (%(default)s)")
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="the median counts (%(default)s)")
    parser.add_argument("--output-json", type=Path)
    add_engine_flags(parser)
    return parser.parse_args(argv)


async def measure(engine: AsyncEngine, args: argparse.Namespace, seed: int) -> float:
    """Output tokens per second."""
    rng = random.Random(seed)
    number = len(engine.replicas)
    size = engine.limits.vocab_size
    prompts = iter(
        [
            [rng.randrange(size) for _ in range(args.input_len)]
            for _ in range(number * args.requests)
        ]
    )
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)

    async def client(name: int) -> None:
        for index, prompt in enumerate(prompts):
            async for _ in engine.generate(f"{seed}-{name}-{index}", prompt, params, stream=False):
                pass

    start = time.perf_counter()
    await asyncio.gather(*(client(name) for name in range(number * args.clients)))
    return float(number * args.requests * args.max_tokens / (time.perf_counter() - start))


async def run(args: argparse.Namespace) -> dict[str, Any]:
    options = engine_options(args)
    configs = [engine_config(**{**options, "data_parallel_size": n}) for n in args.replicas]
    engines = [await AsyncEngine.start(config) for config in configs]
    speeds: dict[int, list[float]] = {number: [] for number in args.replicas}
    try:
        for turn in range(args.rounds + 1):
            arms = list(zip(args.replicas, engines, strict=True))
            for number, engine in arms if turn % 2 else reversed(arms):
                speed = await measure(engine, args, turn)
                if turn:  # the first round warms up
                    speeds[number].append(speed)
    finally:
        await asyncio.gather(*(engine.shutdown(0) for engine in engines))
    base = speeds[args.replicas[0]]
    ratios = {
        number: [a / b for a, b in zip(each, base, strict=True)] for number, each in speeds.items()
    }
    return {
        "environment": environment(),
        "engine": dataclasses.asdict(configs[0]),
        "output_tokens_per_s": speeds,
        "ratios": ratios,
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    report = asyncio.run(run(args))
    rows = [
        (
            number,
            f"{statistics.median(speeds):.1f}",
            f"{statistics.median(report['ratios'][number]):.2f}",
            f"{min(report['ratios'][number]):.2f} to {max(report['ratios'][number]):.2f}",
        )
        for number, speeds in report["output_tokens_per_s"].items()
    ]
    print(markdown_table(["replicas", "output tokens/s", "ratio", "of single rounds"], rows))
    write_json(args.output_json, report)


if __name__ == "__main__":
    main()
