"""Where the time of steps goes on the device, from a trace of torch's profiler.

Steps are told apart by a mark at the beginning of each launch, which the device passes in its turn.
Without a GPU the operations of the CPU stand for kernels: that rehearses the rest.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# On a GPU a mark is a kernel that does next to nothing, on a CPU a range with a name.
_MARK_KERNEL = "spin_kernel"
_MARK_RANGE = "atom: a step begins"
_COPIES = ("gpu_memcpy", "gpu_memset")
_MOST_KERNELS = 25
_NAME_LENGTH = 90

# Of which part of a model a kernel is, by what its name contains; the first that fits.
_CLASSES = (
    ("experts", r"_grouped_product|_grouped_quant|_weighted_sum|_align\b|fused_moe|moe_?gemm|ck_moe"
     r"|moe_sorting|moe_stage"),
    ("routing", r"_route|topk|grouped_topk|gating"),
    ("attention", r"attend|attention|_absorbed|_join|_reduce\b|_split_keys|_visit|_gather_kernel"
     r"|fmha|flash|(^|_)mla_|pa_decode|paged"),
    ("products", r"gemm|gemv|cutlass|nvjet|cijk|hipblas|cublas|wvsplitk|splitkreduce|_quant_linear"
     r"|matmul|addmm|aten::(mm|bmm|linear)"),
    ("copies", r"^mem(cpy|set)"),
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Something that a device did, in us."""

    name: str
    begin: float
    end: float
    is_kernel: bool = True


@dataclass(frozen=True)
class Timeline:
    """Attributes:
    work: kernels and copies, by their beginning.
    marks: where steps begin.
    """

    work: Sequence[Span]
    marks: Sequence[Span]


def mark_step(device: torch.device) -> None:
    """Mark the beginning of a step; its work must follow on the current stream."""
    if device.type == "cpu":
        with torch.profiler.record_function(_MARK_RANGE):
            pass
    else:
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]


def record(work: Callable[[], None], device: torch.device) -> Timeline:
    """What the device does during `work`."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type != "cpu"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    # CUPTI must not be set up twice around graphs that it has seen.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    if on_gpu:
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[activity]) as profiler:
            work()
            if on_gpu:
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return timeline_of_gpu(events) if on_gpu else timeline_of_cpu(events)


def timeline_of_gpu(events: Sequence[Mapping[str, Any]]) -> Timeline:
    kernels = [e for e in events if e.get("cat") == "kernel"]
    marks = [_span(e) for e in kernels if _MARK_KERNEL in e["name"]]
    work = [_span(e) for e in kernels if _MARK_KERNEL not in e["name"]]
    work += [_span(e, is_kernel=False) for e in events if e.get("cat") in _COPIES]
    return Timeline(_in_order(work), _in_order(marks))


def timeline_of_cpu(events: Sequence[Mapping[str, Any]]) -> Timeline:
    """Operations that are part of another one are left out."""
    operations = _in_order([_span(e) for e in events if e.get("cat") == "cpu_op"])
    work: list[Span] = []
    for span in operations:
        if not work or span.begin >= work[-1].end:
            work.append(span)
    marks = [_span(e) for e in events if e.get("name") == _MARK_RANGE and "dur" in e]
    return Timeline(work, _in_order(marks))


def _span(event: Mapping[str, Any], is_kernel: bool = True) -> Span:
    begin = float(event["ts"])
    return Span(str(event["name"]), begin, begin + float(event["dur"]), is_kernel)


def _in_order(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.begin, -span.end))


def busy(work: Sequence[Span]) -> float:
    """us in which anything runs: work side by side counts once."""
    total, reached = 0.0, float("-inf")
    for span in work:
        total += max(span.end - max(span.begin, reached), 0.0)
        reached = max(reached, span.end)
    return total


def gaps(timeline: Timeline) -> list[float]:
    """us between the last kernel before each mark and the first one behind it, copies idle."""
    kernels = [span for span in timeline.work if span.is_kernel]
    found = []
    for mark in timeline.marks:
        before = [span.end for span in kernels if span.begin < mark.begin]
        behind = [span.begin for span in kernels if span.begin >= mark.begin]
        if before and behind:
            found.append(max(min(behind) - max(before), 0.0))
    return found


def class_of(name: str) -> str:
    """Of which part of a model a kernel is, guessed from its name."""
    lowered = name.lower()
    return next((kind for kind, pattern in _CLASSES if re.search(pattern, lowered)), "other")


def summary(
    timeline: Timeline, num_layers: int, class_bytes: Mapping[str, float] | None = None
) -> dict[str, Any] | None:
    """A step's kernels and gaps; None with fewer than two marks, or nothing between them.

    Args:
        num_layers: of the target.
        class_bytes: the bytes that a step's kernels of a class must move at least.
    """
    marks = timeline.marks
    if len(marks) < 2:
        return None
    first, last, steps = marks[0].begin, marks[-1].begin, len(marks) - 1
    work = [span for span in timeline.work if first <= span.begin < last]
    if not work:
        return None
    between = gaps(timeline)
    return {
        "steps": steps,
        "step_us": (last - first) / steps,
        "busy_us": busy(work) / steps,
        "gap_us": statistics.median(between) if between else None,
        "longest_gap_us": max(between, default=None),
        "launches": len(work) / steps,
        "layers": num_layers,
        "kernels": kernel_table(work, steps),
        "classes": class_table(work, steps, class_bytes or {}),
    }


def kernel_table(work: Sequence[Span], steps: int) -> list[dict[str, Any]]:
    """The kernels that take the longest, all calls of a step together; the rest is one row."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in work:
        by_name[span.name].append(span.end - span.begin)
    total = sum(map(sum, by_name.values())) or 1.0
    rows: list[dict[str, Any]] = [
        {
            "kernel": short_name(name),
            "class": class_of(name),
            "calls": len(times) / steps,
            "us": sum(times) / steps,
            "share": sum(times) / total,
        }
        for name, times in by_name.items()
    ]
    rows.sort(key=lambda row: float(row["us"]), reverse=True)
    rest = rows[_MOST_KERNELS:]
    if rest:
        sums = {key: sum(row[key] for row in rest) for key in ("calls", "us", "share")}
        rows[_MOST_KERNELS:] = [{"kernel": f"{len(rest)} others", "class": "", **sums}]
    return rows


def class_table(
    work: Sequence[Span], steps: int, class_bytes: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The same by class; bytes per second where the bytes are known."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for span in work:
        times[class_of(span.name)] += span.end - span.begin
        calls[class_of(span.name)] += 1
    total = sum(times.values()) or 1.0
    rows = []
    for kind, us in sorted(times.items(), key=lambda item: -item[1]):
        size = class_bytes.get(kind)
        rows.append(
            {
                "class": kind,
                "calls": calls[kind] / steps,
                "us": us / steps,
                "share": us / total,
                "bytes": size,
                "bytes_per_s": size / (us / steps * 1e-6) if size and us else None,
            }
        )
    return rows


def short_name(name: str) -> str:
    """Without what would break a table, and not too long."""
    name = re.sub(r"^void ", "", " ".join(name.split())).replace("|", "/")
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 3]}..."
