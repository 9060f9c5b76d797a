"""Whole decode steps against the memory's speed, on dummy weights: no checkpoint is needed.

python benchmarks/decode_roofline.py                                    # needs a GPU
python benchmarks/decode_roofline.py --shapes 8b --batch-sizes 1 --num-speculative-tokens 0 3 5
python benchmarks/decode_roofline.py --device cpu --tiny                # a rehearsal

A step is all that the engine does from one token of every sequence to the next: scheduling, the
model through graphs, sampling, verifying and drafting with k > 0, and the tokens on the host. Steps
overlap, as on a GPU they do for users. Bytes are those that the target's part must move at least;
of a draft they are not counted. The host's time is what it works in a step instead of waiting for
results; the device's, and the gap between its steps, are from a trace of more steps. Dummy drafts
are hardly ever right: k > 0 shows what speculation costs. Beside the 8B shape runs transformers
with a static cache, compiled. Exit status: 0, 1 when something failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _decode_engine import DecodeEngine, Setup
from _decode_report import Report, line_of, named, to_markdown
from _decode_shapes import SHAPES, write_configs
from _decode_steps import UNTIMED_STEPS, DecodeCase, fitting, measure
from _device import (
    NO_GPU,
    Clock,
    add_device_option,
    chosen_platform,
    copy_bandwidth,
    free_device_memory,
    num_cached_kernels,
)

from atom.bench.report import environment, environment_markdown, write_json
from atom.platform import Platform

# Of an engine on a GPU before one was timed; with less left it is not begun.
_SECONDS_OF_AN_ENGINE = 25.0
_MARGIN = 1.2
_CONTEXT_OF_A_SERVER = 16384
# The loggers that say how many graphs were captured.
_CAPTURING = ("atom.graphs.runner", "atom.model_engine.step.step_graphs")


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
    parser.add_argument(
        "--long", type=int, nargs=2, metavar=("BATCH", "CONTEXT"),
        help="one more case of shapes without experts, without drafts: its prompts are not "
        "computed (default: 64 8000; 0 0 leaves it out)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help="that are timed (default: 32)")
    parser.add_argument(
        "--modes", nargs="+", choices=("graph", "eager"), help="(default: graph; on a CPU eager)"
    )
    parser.add_argument(
        "--no-overlap", action="store_true", help="read each step's tokens before the next one"
    )
    parser.add_argument(
        "--start", nargs="+", choices=SHAPES, default=[],
        help="only time how these shapes start, with a draft and all graphs that a server has",
    )  # fmt: skip
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
    args.long = args.long or ([2, 40] if tiny else [64, 8000])
    return args


@dataclass(frozen=True)
class Task:
    """One engine, or transformers at one batch size."""

    about: dict[str, Any]
    run: Callable[[], None]


class CaptureTimes(logging.Handler):
    """Reads from the log how many graphs were captured, and in how many seconds, while entered.

    The layers' graphs, and those of choices and drafts.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.graphs, self.seconds = 0, 0.0
        self._loggers = [logging.getLogger(name) for name in _CAPTURING]
        self._levels: list[int] = []

    def __enter__(self) -> CaptureTimes:
        self._levels = [logger.level for logger in self._loggers]
        for logger in self._loggers:
            logger.addHandler(self)
            logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        for logger, level in zip(self._loggers, self._levels, strict=True):
            logger.removeHandler(self)
            logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("captured") and isinstance(record.args, tuple):
            self.graphs += int(str(record.args[0]))
            self.seconds += float(str(record.args[1]))


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
        if args.start:
            return [self._start_task(shape) for shape in args.start]
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
        return [*engines, *peers]

    def _engine_task(self, shape: str, k: int, mode: str) -> Task:
        about = {"shape": shape, "by": "atom", "k": k, "mode": mode}
        return Task(about, lambda: self._run_engine(about))

    def _peer_task(self, shape: str, batch: int) -> Task:
        about = {"shape": shape, "by": "transformers", "k": 0, "batch": batch}
        return Task(about, lambda: self._run_peer(about))

    def _start_task(self, shape: str) -> Task:
        about = {"shape": shape, "by": "atom", "k": max(self.args.num_speculative_tokens)}
        return Task(about, lambda: self._run_start(about))

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
            fault = f"{named(task.about)}: {type(error).__name__}: {error}"
            self.report.faults.append(fault)
        gc.collect()
        free_device_memory(self.platform)
        self._took[key] = time.perf_counter() - started

    def _cases(self, about: dict[str, Any]) -> list[DecodeCase]:
        args = self.args
        cases = [DecodeCase(batch, args.prompt_len) for batch in args.batch_sizes]
        has_experts = "n_routed_experts" in SHAPES[about["shape"]].target
        if about["k"] == 0 and args.long[0] and not has_experts:
            # Equal tokens would all visit the same experts.
            batch, context = args.long
            cases.append(DecodeCase(batch, context, pretend=True))
        return cases

    def _setup(self, about: dict[str, Any], folder: Path, least_positions: int = 0) -> Setup:
        args, k = self.args, about["k"]
        cases = self._cases(about)
        # Sequences that were prefilled first decode while the others are.
        waiting = (k + 1) * -(-args.batch_sizes[-1] * args.prompt_len // 4096)
        context = max(case.context for case in cases)
        context += (args.steps + UNTIMED_STEPS) * (k + 1) + waiting + 64
        sizes = {case.batch for case in cases}
        sizes |= {case.batch // 2 for case in cases if case.pretend and case.batch > 1}
        return Setup(
            write_configs(folder, SHAPES[about["shape"]], max(context, least_positions)),
            k,
            about.get("mode", "eager") == "eager",
            tuple(sorted(sizes)),
            args.prompt_len,
            context,
            args.dtype,
            args.kv_cache_dtype,
            self.platform.device.type,
            args.num_threads,
            overlap=not args.no_overlap,
        )

    def _run_engine(self, about: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            engine = DecodeEngine(self._setup(about, Path(folder)))
        self.report.ops[f"{about['shape']}, k={about['k']}"] = engine.ops
        for case in self._cases(about):
            self._run_case(engine, about, case)
        engine.shutdown()

    def _run_case(self, engine: DecodeEngine, about: dict[str, Any], case: DecodeCase) -> None:
        row = {**about, "batch": case.batch, "context": case.context}
        batch = fitting(engine, case, self.args.steps, about["k"])
        if batch != case.batch:
            why = f"the cache has room for {engine.num_cached_tokens} tokens"
            self.report.left_out.append({**row, "why": why})
        if batch:
            found = measure(engine, replace(case, batch=batch), self.args.steps, about["k"])
            self.report.add({**row, "batch": batch, **found})
            print(line_of(self.report.results[-1]), file=sys.stderr, flush=True)

    def _run_start(self, about: dict[str, Any]) -> None:
        """From the resolved options to a ready engine, with the limits that a server has."""
        before = num_cached_kernels()
        with CaptureTimes() as times, tempfile.TemporaryDirectory() as name:
            context = self.args.prompt_len if self.args.tiny else _CONTEXT_OF_A_SERVER
            setup = self._setup(about, Path(name), least_positions=context)
            setup = replace(setup, serves=True, max_model_len=context)
            engine = DecodeEngine(replace(setup, eager=not self.platform.is_gpu))
        row = {
            **about,
            "seconds": engine.ready_seconds,
            "graphs": times.graphs,
            "capture_seconds": times.seconds,
            "compiled": num_cached_kernels() - before,
            "layers": engine.num_layers,
        }
        self.report.starts.append(row)
        engine.shutdown()

    def _run_peer(self, about: dict[str, Any]) -> None:
        from _transformers_decode import TransformersDecode

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
        row = about | found | {"mode": peer.how, "context": args.prompt_len, "tokens": batch}
        ours = (r for r in self.report.results if self._is_same_work(r, row))
        unknown = ("device_seconds", "host_seconds", "gap_seconds", "replayed", "trace")
        row |= dict.fromkeys(unknown) | {"bytes": next((r["bytes"] for r in ours), None)}
        self.report.add(row)

    def _is_same_work(self, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
        keys = ("shape", "batch", "k", "context")
        plain = self.args.kv_cache_dtype == "auto"  # transformers keeps its cache in --dtype
        return plain and ours["by"] == "atom" and all(ours[k] == theirs[k] for k in keys)


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
        return {"environment": facts, "options": options, **asdict(session.report)}

    for task in session.tasks():
        session.run(task, clock)
        write_json(args.output_json, so_far())  # for whoever has to stop this program
    print(environment_markdown(facts), to_markdown(so_far()), sep="\n\n")
    return 1 if session.report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
