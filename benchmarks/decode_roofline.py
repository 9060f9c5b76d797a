"""Whole decode steps against the memory's speed, on dummy weights: no checkpoint is needed.

python benchmarks/decode_roofline.py                                    # needs a GPU
python benchmarks/decode_roofline.py --shapes 8b --batch-sizes 1 --num-speculative-tokens 0 3 5
python benchmarks/decode_roofline.py --device cpu --tiny                # a rehearsal

A step is all that the engine does from one token of every sequence to the next: scheduling, the
model through graphs, sampling, verifying and drafting with k > 0, and the tokens on the host.
Bytes are those that the target's part must move at least; of a draft they are not counted. The
host's time is what the wall clock shows beyond the time in which the device works. Dummy drafts
are hardly ever right: k > 0 shows what speculation costs. Beside the 8B shape runs transformers
with a static cache, compiled. Exit status: 0, 1 when something failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _decode_engine import PROFILED_STEPS, WARMUP_STEPS, DecodeEngine, Setup, measure
from _decode_shapes import SHAPES, write_configs
from _device import (
    NO_GPU,
    Clock,
    add_device_option,
    chosen_platform,
    copy_bandwidth,
    free_device_memory,
)
from _transformers_decode import TransformersDecode

from atom.bench.report import environment, environment_markdown, markdown_table, write_json
from atom.platform import Platform

# Of an engine on a GPU before one was timed; with less left it is not begun.
_SECONDS_OF_AN_ENGINE = 25.0
_MARGIN = 1.2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    add_device_option(parser)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, few steps")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="(default: 8b kimi)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="(default: 1 16 64)")
    parser.add_argument(
        "--num-speculative-tokens", "--num_speculative_tokens", type=int, nargs="+",
        default=[0, 3], help=f"drafts a step; 0 is no speculation{default}",
    )  # fmt: skip
    parser.add_argument("--prompt-len", type=int, help="(default: 1024)")
    parser.add_argument("--steps", type=int, help="that are timed (default: 32)")
    parser.add_argument(
        "--modes", nargs="+", choices=("graph", "eager"), help="(default: graph; on a CPU eager)"
    )
    parser.add_argument("--dtype", default="bfloat16", help=default.strip())
    parser.add_argument("--kv-cache-dtype", "--kv_cache_dtype", default="auto")
    parser.add_argument("--num-threads", "--num_threads", type=int, help="of a rehearsal")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--seconds", type=float, help="what does not fit is listed as not run")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args(argv)
    tiny = args.tiny
    args.shapes = args.shapes or (["tiny", "tiny-kimi"] if tiny else ["8b", "kimi"])
    args.batch_sizes = sorted(set(args.batch_sizes or ([1, 3] if tiny else [1, 16, 64])))
    args.prompt_len = args.prompt_len or (9 if tiny else 1024)
    args.steps = args.steps or (2 if tiny else 32)
    return args


@dataclasses.dataclass
class Report:
    """Rows that were measured, what was not run and why, and which kernels ran."""

    copy_bytes_per_s: float
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    left_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    ops: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        """Add what follows from a row's seconds, bytes and device seconds."""
        row["bytes_per_s"] = row["of_copy"] = row["host_seconds"] = None
        if row["bytes"] is not None:
            row["bytes_per_s"] = row["bytes"] / row["seconds"]
            row["of_copy"] = row["bytes_per_s"] / self.copy_bytes_per_s
        if row["device_seconds"] is not None:
            row["host_seconds"] = max(row["seconds"] - row["device_seconds"], 0.0)
        row["tokens_per_s"] = row["tokens"] / row["seconds"]
        self.results.append(row)


@dataclasses.dataclass(frozen=True)
class Task:
    """One engine, or transformers at one batch size."""

    about: dict[str, Any]
    run: Callable[[], None]


class Session:
    """What all tasks share."""

    def __init__(self, args: argparse.Namespace, platform: Platform) -> None:
        self.args = args
        self.platform = platform
        self.report = Report(copy_bandwidth(platform))
        self._first_guess = _SECONDS_OF_AN_ENGINE if platform.is_gpu else 0.0
        self._took: dict[tuple[str, str], float] = {}

    def tasks(self) -> list[Task]:
        """The engines without speculation first, then transformers for one sequence."""
        args = self.args
        modes = args.modes or (["graph"] if self.platform.is_gpu else ["eager"])
        engines = [
            self._engine_task(shape, k, mode)
            for k in args.num_speculative_tokens
            for shape in args.shapes
            for mode in modes
        ]
        peers = [
            self._peer_task(shape, batch)
            for batch in args.batch_sizes
            for shape in args.shapes
            if SHAPES[shape].has_peer and not args.no_peer
        ]
        first = len(args.shapes) * len(modes)
        return [*engines[:first], *peers[:1], *engines[first:], *peers[1:]]

    def _engine_task(self, shape: str, k: int, mode: str) -> Task:
        about = {"shape": shape, "by": "atom", "k": k, "mode": mode}
        return Task(about, lambda: self._run_engine(about))

    def _peer_task(self, shape: str, batch: int) -> Task:
        about = {"shape": shape, "by": "transformers", "k": 0, "batch": batch}
        return Task(about, lambda: self._run_peer(about))

    def run(self, task: Task, clock: Clock) -> None:
        """Run one task; what keeps it from running, or goes wrong, is in the report."""
        key = task.about["shape"], task.about["by"]
        if not clock.allows(_MARGIN * self._took.get(key, self._first_guess)):
            self.report.left_out.append({**task.about, "why": "out of time"})
            return
        started = time.perf_counter()
        try:
            task.run()
        except torch.OutOfMemoryError:
            self.report.left_out.append({**task.about, "why": "out of memory"})
        except Exception as error:
            fault = f"{_named(task.about)}: {type(error).__name__}: {error}"
            self.report.faults.append(fault)
        gc.collect()
        free_device_memory(self.platform)
        self._took[key] = time.perf_counter() - started

    def _run_engine(self, about: dict[str, Any]) -> None:
        args, k = self.args, about["k"]
        tokens = (WARMUP_STEPS + args.steps + PROFILED_STEPS + 2) * (k + 1)
        # Sequences that were prefilled first decode while the others are.
        waiting = (k + 1) * -(-args.batch_sizes[-1] * args.prompt_len // 4096)
        context = args.prompt_len + tokens + waiting + 64
        with tempfile.TemporaryDirectory() as folder:
            folders = write_configs(Path(folder), SHAPES[about["shape"]], context)
            setup = Setup(
                folders,
                k,
                about["mode"] == "eager",
                tuple(args.batch_sizes),
                args.prompt_len,
                context,
                args.dtype,
                args.kv_cache_dtype,
                self.platform.device.type,
                args.num_threads,
            )
            engine = DecodeEngine(setup)
        self.report.ops[f"{about['shape']}, k={k}"] = engine.ops
        for batch in args.batch_sizes:
            found = measure(engine, batch, args.steps)
            self.report.add({**about, "batch": batch, "context": args.prompt_len, **found})
        engine.shutdown()

    def _run_peer(self, about: dict[str, Any]) -> None:
        args, batch = self.args, about["batch"]
        dtype = getattr(torch, args.dtype)
        with tempfile.TemporaryDirectory() as folder:
            context = 2 * args.prompt_len + 8 * args.steps
            target, _ = write_configs(Path(folder), SHAPES[about["shape"]], context)
            peer = TransformersDecode(target, dtype, self.platform.device)
        try:
            found = peer.measure(batch, args.prompt_len, args.steps)
        finally:
            peer.close()
        ours = (r for r in self.report.results if self._is_same_work(r, about))
        num_bytes = next((r["bytes"] for r in ours), None)
        self.report.add(
            about | found | {
                "mode": peer.how, "context": args.prompt_len, "tokens": batch,
                "bytes": num_bytes, "device_seconds": None,
            }
        )  # fmt: skip

    def _is_same_work(self, row: dict[str, Any], about: dict[str, Any]) -> bool:
        keys = ("shape", "batch", "k")
        plain = self.args.kv_cache_dtype == "auto"  # transformers keeps its cache in --dtype
        return plain and row["by"] == "atom" and all(row[k] == about[k] for k in keys)


def _named(about: dict[str, Any]) -> str:
    parts = [f"shape {about['shape']}", about["by"]]
    parts += [f"{name} {about[name]}" for name in ("k", "batch", "mode") if name in about]
    return ", ".join(parts)


def to_markdown(report: dict[str, Any]) -> str:
    """The tables of a report, as this program writes it to JSON."""
    header = ["shape", "by", "batch", "k", "step (ms)", "device (ms)", "host (us)", "GB", "GB/s",
              "of copy", "tokens/s"]  # fmt: skip
    rows = [
        (
            r["shape"],
            f"{r['by']} ({r['mode']})",
            r["batch"],
            r["k"],
            f"{1e3 * r['seconds']:.2f}",
            _shown(r["device_seconds"], 1e3, ".2f"),
            _shown(r["host_seconds"], 1e6, ".0f"),
            _shown(r["bytes"], 1e-9, ".2f"),
            _shown(r["bytes_per_s"], 1e-9, ".0f"),
            _shown(r["of_copy"], 100, ".0f") + (" %" if r["of_copy"] is not None else ""),
            f"{r['tokens_per_s']:.0f}",
        )
        for r in report["results"]
    ]
    parts = [
        f"A copy within the device moves {report['copy_bytes_per_s'] / 1e9:.0f} GB/s, reads and "
        f"writes together.",
        markdown_table(header, rows),
        *(f"- `{name}`: {SHAPES[name].about}" for name in dict.fromkeys(r[0] for r in rows)),
    ]
    if report["faults"]:
        parts.append("Failed:\n\n" + "\n".join(f"- {fault}" for fault in report["faults"]))
    if report["left_out"]:
        left = [f"- {_named(row)}: {row['why']}" for row in report["left_out"]]
        parts.append("Not run:\n\n" + "\n".join(left))
    parts += [f"Ops, {name}:\n\n```\n{table}\n```" for name, table in report["ops"].items()]
    return "\n\n".join(parts)


def _shown(value: float | None, factor: float, form: str) -> str:
    return "" if value is None else format(value * factor, form)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    platform = chosen_platform(args.device, "decode_roofline.py")
    if platform is None:
        return NO_GPU
    clock = Clock(args.seconds)
    facts = environment()
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    session = Session(args, platform)

    def so_far() -> dict[str, Any]:
        return {"environment": facts, "options": options, **dataclasses.asdict(session.report)}

    for task in session.tasks():
        session.run(task, clock)
        write_json(args.output_json, so_far())  # for whoever has to stop this program
    print(environment_markdown(facts), to_markdown(so_far()), sep="\n\n")
    return 1 if session.report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
