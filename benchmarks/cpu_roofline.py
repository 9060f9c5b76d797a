"""A CPU against its own limits: read bandwidth, products of many rows, ops, steps, a prefill.

python benchmarks/cpu_roofline.py                           # the embedded model as it is stored
python benchmarks/cpu_roofline.py --model MODEL --dtype bfloat16 --quantization int8
python benchmarks/cpu_roofline.py --batch-sizes 1 --contexts 128 --num-speculative-tokens 0
python benchmarks/cpu_roofline.py --growth --output-json smol.json  # batch 1 to 64, to 32k tokens
python benchmarks/cpu_roofline.py --growth --model 1b.gguf --plot steps.png --plot-with smol.json

The limits are measured first. Each op, and each step, has bytes that it must move at least (weights
as they are held, keys and values, inputs and outputs) and operations that it must compute; the
longer of the two times at the limits over the time measured is its share of the roofline. Ops are
timed with cold caches; a whole step of a small model may find some of it in a cache. A step is all
that the engine does from one token of every sequence to the next. With drafts (k > 0) it
contains their making, but bytes and operations are the target's. Prompts are not computed: keys
and values are random numbers, so tokens mean nothing and few drafts are right. `--growth` measures
only how the time of a step grows with sequences and contexts, up to the longest of `--contexts`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _cpu_facts import cpu_features
from _cpu_limits import Limits, measure_limits
from _cpu_ops import operations_of, ops_of
from _decode_engine import DecodeEngine, Setup
from _plot import plot_steps

from atom.bench.report import (
    environment,
    environment_markdown,
    markdown_table,
    write_json,
    write_text,
)

_WARMUP_STEPS = 4
# Of prompts, in a step that pretends; and in all, which the default cache has room for.
_TOKENS_OF_STEP, _MOST_STARTED_TOKENS = 4096, 192 * 1024
# For the block more that each sequence could have where another starts.
_SPARE_TOKENS = 32
_GROWING_BATCHES = [1, 2, 4, 8, 16, 32, 64]
_GROWING_CONTEXTS = [128, 512, 2048, 8000, 32000]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    parser.add_argument("--model", help="folder or .gguf file; the embedded model when omitted")
    parser.add_argument("--draft-model", type=Path, help="Eagle3; that of the embedded model")
    parser.add_argument("--load-format", default="auto", help="dummy for a folder without weights")
    parser.add_argument("--dtype", default="bfloat16", help=default.strip())
    parser.add_argument("--quantization", help="as the engine's flag")
    parser.add_argument("--kv-cache-dtype", "--kv_cache_dtype", default="auto")
    parser.add_argument("--kv-cache-memory", type=int, default=4 << 30, help=f"bytes{default}")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048, 8000])
    parser.add_argument(
        "--num-speculative-tokens", "--num_speculative_tokens", type=int, nargs="+",
        default=[0, 3], help=f"drafts a step; 0 is no speculation{default}",
    )  # fmt: skip
    parser.add_argument("--prefill-tokens", type=int, default=512, help=default.strip())
    parser.add_argument("--steps", type=int, default=16, help=f"that are timed{default}")
    parser.add_argument("--num-threads", type=int, help="all processors when omitted")
    parser.add_argument(
        "--growth", action="store_true",
        help=f"measure steps of {', '.join(map(str, _GROWING_BATCHES))} sequences with contexts "
        f"of {', '.join(map(str, _GROWING_CONTEXTS))} tokens, without drafts, and nothing else",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of what --growth measures")
    parser.add_argument(
        "--plot-with", type=Path, nargs="+", default=[], metavar="REPORT",
        help="reports of --growth that are drawn beside it",
    )  # fmt: skip
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--output-md", type=Path)
    args = parser.parse_args(argv)
    if args.plot is not None and not args.growth:
        parser.error("--plot draws what --growth measures: give both")
    if args.plot_with and args.plot is None:
        parser.error("--plot-with needs --plot FILE")
    if args.growth:
        args.batch_sizes, args.num_speculative_tokens = _GROWING_BATCHES, [0]
        args.contexts = [c for c in _GROWING_CONTEXTS if c <= max(args.contexts)]
    return args


class Roofline:
    """Measures engine by engine; `results` grow.

    Attributes:
        steps, ops: rows of the report.
        left_out: what did not fit, and why.
    """

    def __init__(self, args: argparse.Namespace, threads: int) -> None:
        self._args, self._threads = args, threads
        self.limits: Limits = measure_limits(threads)
        self.steps: list[dict[str, Any]] = []
        self.ops: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.table = ""

    def run(self) -> None:
        """All engines: without drafts first, whose ops are timed, too."""
        for k in sorted(set(self._args.num_speculative_tokens)):
            engine = self._engine(k)
            self.table = self.table or engine.ops
            engine.fill_cache()  # memory that nobody wrote is one page of zeros
            for context in self._args.contexts:
                for batch in self._args.batch_sizes:
                    with_ops = context == min(self._args.contexts) and not self._args.growth
                    self._step(engine, k, batch, context, with_ops=with_ops)
            if k == 0 and not self._args.growth:
                self._prefill(engine)
            engine.shutdown()

    def _engine(self, k: int) -> DecodeEngine:
        from atom.model_loader.drafts.shipped import shipped_draft_for
        from atom.model_loader.locate import embedded_model

        args = self._args
        draft = args.draft_model or shipped_draft_for(None)
        setup = Setup(
            (Path(args.model) if args.model else embedded_model(), draft or Path()),
            k,
            eager=False,
            batch_sizes=tuple(sorted(set(args.batch_sizes))),
            prompt_len=args.prefill_tokens,
            max_model_len=max(args.prefill_tokens, *args.contexts)
            + (args.steps + _WARMUP_STEPS + 2) * (k + 1)
            + self._starting_steps()
            + _SPARE_TOKENS,
            dtype=args.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            device="cpu",
            num_threads=self._threads,
            load_format=args.load_format,
            quantization=args.quantization,
            kv_cache_memory=args.kv_cache_memory,
        )
        return DecodeEngine(setup)

    def _starting_steps(self) -> int:
        """Pretended steps, at most, in which a sequence may decode until all others do, too."""
        batch: int = max(self._args.batch_sizes)
        num_tokens: int = min(batch * max(self._args.contexts), _MOST_STARTED_TOKENS)
        return 1 + num_tokens // _TOKENS_OF_STEP

    def _measured(
        self, engine: DecodeEngine, k: int, batch: int, context: int
    ) -> list[float] | None:
        """Seconds of steps, the engine left running; None when the cache is too small."""
        steps = self._args.steps + _WARMUP_STEPS + 2
        if batch > engine.most_seqs(context + steps * (k + 1) + self._starting_steps()):
            self.left_out.append(
                f"batch {batch} at {context} tokens, k={k}: the cache is too small"
            )
            return None
        engine.start(batch, context, pretend=True)
        for _ in range(_WARMUP_STEPS):
            engine.step()
        return [_timed(engine) for _ in range(self._args.steps)]

    def _step(
        self, engine: DecodeEngine, k: int, batch: int, context: int, *, with_ops: bool
    ) -> None:
        if (found := self._measured(engine, k, batch, context)) is None:
            return
        seconds = statistics.median(found)
        num_bytes, operations = engine.step_bytes(), operations_of(engine)
        about = {"what": "decode", "k": k, "batch": batch, "context": context}
        about |= {"least_seconds": min(found), "most_seconds": max(found)}
        self._add_step(about, seconds, num_bytes, operations)
        if with_ops and k == 0:
            self._add_ops(engine, f"decode, batch {batch}", seconds)
        engine.stop()

    def _prefill(self, engine: DecodeEngine) -> None:
        found = []
        for _ in range(4):
            started = time.perf_counter()
            engine.start(1)
            found.append(time.perf_counter() - started)
            num_bytes, operations = engine.step_bytes(), operations_of(engine)
            last = len(found) == 4
            if last:
                tokens = self._args.prefill_tokens
                about = {"what": "prefill", "k": 0, "batch": 1, "context": tokens}
                about |= {"least_seconds": min(found[1:]), "most_seconds": max(found[1:])}
                self._add_step(about, statistics.median(found[1:]), num_bytes, operations)
                self._add_ops(engine, f"prefill of {tokens}", statistics.median(found[1:]))
            engine.stop()

    def _add_step(
        self, about: dict[str, Any], seconds: float, num_bytes: int, operations: dict[str, float]
    ) -> None:
        self.steps.append(about | self._row(seconds, num_bytes, operations))

    def _add_ops(self, engine: DecodeEngine, step: str, whole: float) -> None:
        ops = ops_of(engine)
        for op in ops:
            about = {"step": step, "op": op.name, "calls": len(op.calls)}
            self.ops.append(about | self._row(op.seconds, op.num_bytes, op.operations))
        rest = max(whole - sum(op.seconds for op in ops), 0.0)
        self.ops.append({"step": step, "op": "everything else", "calls": None, "seconds": rest})

    def _row(self, seconds: float, num_bytes: int, operations: dict[str, float]) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "bytes": num_bytes,
            "operations": operations,
            "bytes_per_s": num_bytes / seconds,
            "operations_per_s": sum(operations.values()) / seconds,
            "of_roofline": self.limits.seconds(num_bytes, operations) / seconds,
        }


def _timed(engine: DecodeEngine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def to_markdown(report: dict[str, Any]) -> str:
    """The tables of a report."""
    limits = report["limits"]
    bandwidth = ", ".join(
        f"{speed / 1e9:.1f} GB/s with {threads} thread{'s' if int(threads) > 1 else ''}"
        for threads, speed in limits["bandwidth"].items()
    )
    peaks = [
        (kind, f"{limits['ours'][kind] / 1e9:.0f}", f"{limits['torchs'][kind] / 1e9:.0f}")
        for kind in limits["ours"]
    ]
    steps = [
        (r["what"], r["batch"], r["context"], r["k"], _milliseconds(r), *_numbers(r))
        for r in report["steps"]
    ]
    ops = [
        (r["step"], r["op"], r["calls"] or "", f"{1e6 * r['seconds']:.0f}", *_numbers(r))
        for r in report["ops"]
    ]
    units = ["MB", "GB/s", "GFLOP", "GFLOP/s", "of the roofline"]
    parts = [
        f"Reads {bandwidth}.",
        markdown_table(["products of 512 rows", "ours, GFLOP/s", "torch's, GFLOP/s"], peaks),
        markdown_table(["step", "batch", "context", "k", "ms", *units], steps),
        markdown_table(["step", "op", "calls", "us, all calls", *units], ops),
    ]
    if report["left_out"]:
        parts.append("Not run:\n\n" + "\n".join(f"- {line}" for line in report["left_out"]))
    parts.append(f"```\n{report['kernels']}\n```")
    return "\n\n".join((*parts, environment_markdown(report["environment"])))


def _milliseconds(row: dict[str, Any]) -> str:
    least, most = 1e3 * row["least_seconds"], 1e3 * row["most_seconds"]
    return f"{1e3 * row['seconds']:.2f} ({least:.2f} to {most:.2f})"


def _numbers(row: dict[str, Any]) -> tuple[str, ...]:
    if "bytes" not in row:
        return ("",) * 5
    return (
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['bytes_per_s'] / 1e9:.1f}",
        f"{sum(row['operations'].values()) / 1e9:.2f}",
        f"{row['operations_per_s'] / 1e9:.0f}",
        f"{row['of_roofline']:.0%}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from atom.processors import default_num_threads

    threads = args.num_threads or default_num_threads()
    roofline = Roofline(args, threads)
    roofline.run()
    report = {
        "environment": environment() | {"threads": threads, "features": cpu_features()},
        "limits": dataclasses.asdict(roofline.limits),
        "steps": roofline.steps,
        "ops": roofline.ops,
        "left_out": roofline.left_out,
        "kernels": roofline.table,
        "model": Path(args.model).stem if args.model else "the embedded model",
    }
    if args.plot is not None:
        reports = [json.loads(path.read_text()) for path in args.plot_with]
        plot_steps([*reports, report], args.plot)
    markdown = to_markdown(report)
    print(markdown)
    write_text(args.output_md, markdown + "\n")
    write_json(args.output_json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
