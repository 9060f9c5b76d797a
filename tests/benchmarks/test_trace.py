"""What is made of a trace: kernels, their classes, and the gaps between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Module = Callable[[str], Any]


def event(name: str, begin: float, length: float, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "cat": cat, "ts": begin, "dur": length}


# Three steps of two layers; the host is late for the second by 40 us, a copy running meanwhile.
MARK = "at::cuda::spin_kernel(long)"
EVENTS = [
    event("warm", 0, 8),
    event(MARK, 9, 1),
    event("_attend", 12, 10),
    event("nvjet_tst_64x8", 20, 10),
    event("Memcpy DtoH", 31, 30, "gpu_memcpy"),
    event(MARK, 68, 1),
    event("_attend", 70, 10),
    event("void cutlass::Kernel|x", 80, 20),
    event(MARK, 101, 1),
    event("_attend", 103, 10),
    event("launch", 0, 200, "cuda_runtime"),
    {"name": "metadata"},
]


def test_a_step_of_a_gpu(benchmark_module: Module) -> None:
    trace = benchmark_module("_trace")
    timeline = trace.timeline_of_gpu(EVENTS)
    assert len(timeline.marks) == 3
    # To the first kernel, whatever is copied; marks are no kernels.
    assert trace.gaps(timeline) == [4, 40, 3]
    found = trace.summary(timeline, 2, {"attention": 4_000})
    assert (found["steps"], found["step_us"], found["gap_us"]) == (2, 46, 4)
    assert found["longest_gap_us"] == 40
    # 18 together, then 30 of a copy, then 30.
    assert found["busy_us"] == (18 + 30 + 30) / 2
    assert (found["launches"], found["layers"]) == (2.5, 2)
    kernels = [(k["kernel"], k["class"], k["calls"], k["us"]) for k in found["kernels"]]
    assert kernels == [
        ("Memcpy DtoH", "copies", 0.5, 15),
        ("_attend", "attention", 1, 10),
        ("cutlass::Kernel/x", "products", 0.5, 10),
        ("nvjet_tst_64x8", "products", 0.5, 5),
    ]
    classes = {row["class"]: row for row in found["classes"]}
    assert classes["products"]["us"] == 15
    assert classes["products"]["bytes_per_s"] is None
    assert classes["attention"]["bytes_per_s"] == pytest.approx(4_000 / 10e-6)
    assert sum(row["share"] for row in found["classes"]) == pytest.approx(1)
    text = benchmark_module("_trace_report").trace_markdown(found, 8e8)
    assert "takes 46 us, of which the device works 39; gap between steps 4 us (longest 40)" in text
    assert "2 kernels and copies, 1.2 for each of 2 layers" in text
    assert "| attention | 1.0 | 10.0 | 25 % | 4e-06 | 0 | 50 % |" in text
    assert "| `_attend` | attention | 1.0 | 10.0 | 10.0 | 25.0 % |" in text


@pytest.mark.parametrize("marks", [0, 1])
def test_without_two_marks_there_is_no_step(benchmark_module: Module, marks: int) -> None:
    trace = benchmark_module("_trace")
    events = [event(MARK, 5, 1)] * marks + [event("k", 7, 1)]
    assert trace.summary(trace.timeline_of_gpu(events), 2) is None


def test_many_kernels_end_in_one_row(benchmark_module: Module) -> None:
    trace = benchmark_module("_trace")
    spans = [trace.Span(f"k{i}", 10 * i, 10 * i + 1 + i % 7) for i in range(40)]
    rows = trace.kernel_table(spans, 2)
    assert len(rows) == 26
    assert rows[-1]["kernel"] == "15 others"
    assert sum(row["us"] for row in rows) == sum(1 + i % 7 for i in range(40)) / 2
    assert sum(row["share"] for row in rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_absorbed_kernel", "attention"),
        ("_grouped_product", "experts"),
        ("_weighted_sum", "experts"),
        ("_route", "routing"),
        ("Cijk_Ailk_Bljk_BBS_BH", "products"),
        ("_quant_linear", "products"),
        ("void at::native::reduce_kernel<512, 1>", "other"),
        ("_norm", "other"),
        ("Memset (Device)", "copies"),
    ],
)
def test_classes(benchmark_module: Module, name: str, kind: str) -> None:
    assert benchmark_module("_trace").class_of(name) == kind


def test_marks_and_work_on_a_cpu(benchmark_module: Module) -> None:
    """The profiler's own trace; operations within others count once."""
    trace = benchmark_module("_trace")
    device, x = torch.device("cpu"), torch.randn(64, 64)

    def work() -> None:
        for _ in range(3):
            trace.mark_step(device)
            torch.nn.functional.linear(x, x)

    timeline = trace.record(work, device)
    assert len(timeline.marks) == 3
    found = trace.summary(timeline, 1)
    assert found["steps"] == 2
    assert found["launches"] == 1
    assert found["kernels"][0]["kernel"] == "aten::linear"
