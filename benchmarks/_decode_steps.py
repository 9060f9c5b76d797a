"""Measures decode steps of an engine: wall and host time, the device's trace, and bytes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from _decode_engine import DecodeEngine
from _trace import summary

from atom.messages import EngineStats

WARMUP_STEPS = 5
PROFILED_STEPS = 8
# All steps of a measurement that are not timed, those of `settle` included.
UNTIMED_STEPS = 2 * WARMUP_STEPS + PROFILED_STEPS + 8


@dataclass(frozen=True)
class DecodeCase:
    """Attributes:
    context: tokens of each prompt.
    pretend: the prompts are not computed; the cache holds random numbers.
    """

    batch: int
    context: int
    pretend: bool = False


def fitting(engine: DecodeEngine, case: DecodeCase, steps: int, k: int) -> int:
    """The largest of the batch size, its half, and so on, whose tokens fit the cache; 0 if none."""
    tokens = case.context + (steps + UNTIMED_STEPS) * (k + 1)
    batch = case.batch
    while batch > engine.most_seqs(tokens):
        batch //= 2
    return batch


def measure(engine: DecodeEngine, case: DecodeCase, steps: int, k: int) -> dict[str, Any]:
    """Medians over the timed steps; bytes of one in their middle; the trace of some more.

    `host_seconds` is the time of a step in which the host works instead of waiting for results.
    `replayed` is about these steps and, behind them, those of requests that come and go.
    """
    if case.pretend:
        engine.fill_cache()
    engine.start(case.batch, case.context, pretend=case.pretend)
    before = engine.stats
    first = _timed(engine, steps // 2)
    engine.settle()
    parts = engine.step_bytes_by_class()
    second = _timed(engine, steps - steps // 2)
    traced, why = None, "it shows no steps"
    try:
        timeline = engine.trace(PROFILED_STEPS)
    except RuntimeError as error:  # of the profiler; the measurement stands
        why = str(error)
    else:
        # With drafts their kernels are among those of the same classes.
        traced = summary(timeline, engine.num_layers, parts if k == 0 else None)
    engine.stop()
    engine.serve_others()
    on_gpu = engine.device.type != "cpu"
    timed = [*first, *second]
    gap = None if traced is None else traced["gap_us"]
    return {
        "seconds": statistics.median(seconds for seconds, _, _ in timed),
        "tokens": statistics.fmean(tokens for _, tokens, _ in timed),
        "bytes": sum(parts.values()),
        "overlapped": engine.overlaps,
        "host_seconds": statistics.median(host for _, _, host in timed) if on_gpu else None,
        "device_seconds": traced["busy_us"] / 1e6 if traced is not None and on_gpu else None,
        "gap_seconds": gap / 1e6 if gap is not None and on_gpu else None,
        "replayed": _replayed(before, engine.stats),
        "trace": traced,
        "no_trace": why if traced is None else None,
    }


def _replayed(before: EngineStats, after: EngineStats) -> float:
    """The share of the decode steps' parts that were replayed: the target, the choice of tokens
    and the draft.
    """

    def parts(stats: EngineStats) -> int:
        return 2 * stats.num_decode_steps + stats.num_draft_steps

    def replayed(stats: EngineStats) -> int:
        target, choice = stats.num_replayed_decode_steps, stats.num_replayed_choice_steps
        return target + choice + stats.num_replayed_draft_steps

    return (replayed(after) - replayed(before)) / max(parts(after) - parts(before), 1)


def _timed(engine: DecodeEngine, steps: int) -> list[tuple[float, int, float]]:
    """Seconds and tokens of each step, and the seconds of it that the host worked."""
    for _ in range(WARMUP_STEPS):
        engine.step()
    found = []
    for _ in range(steps):
        started, waited = time.perf_counter(), engine.waited_seconds
        tokens = engine.step()
        seconds = time.perf_counter() - started
        found.append((seconds, tokens, seconds - (engine.waited_seconds - waited)))
    return found
