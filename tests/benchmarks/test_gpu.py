"""The GPU lane on whatever machine this is: what it measures, reports, and says without a GPU."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.graphs.capture import ReexecuteBackend
from atom.model_engine.step import planned_graphs
from atom.model_ops.quant.weights import dequantise

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Module = Callable[[str], Any]

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is no GPU")


@without_gpu
@pytest.mark.parametrize("program", ["gpu_check", "kernels", "decode_roofline"])
def test_without_a_gpu_it_says_so(
    program: str, benchmark_module: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--output" if program == "gpu_check" else "--output-json"
    assert benchmark_module(program).main([flag, str(tmp_path / "report.md")]) == 2
    assert "no CUDA or ROCm device" in "".join(capsys.readouterr())
    assert not list(tmp_path.iterdir())


KERNEL_ROW = {
    "op": "paged_attention", "implementation": "triton", "cache": "bfloat16",
    "sizes": "32/8 heads of 128", "batch": 64, "context": 8192, "queries": 1, "bytes": 2e9,
    "seconds": 1e-3, "how": "graph", "calls": 1, "bytes_per_s": 2e12, "of_copy": 0.5,
    "operations": 1e9, "operations_per_s": 1e12, "of_bound": 0.5,
    "kernels": None, "error": 1e-3, "torch_over_this": 4.25,
}  # fmt: skip


def test_rehearsal_of_the_kernels(benchmark_module: Module, tmp_path: Path) -> None:
    """On a CPU: plain torch, both storages; what cannot run is listed with its reason."""
    path = tmp_path / "report.json"
    argv = ["--device", "cpu", "--tiny", "--dtype", "float32", "--output-json", str(path)]
    argv += ["--ops", "paged_attention", "mla_decode", "moe_experts", "linear"]
    kernels = benchmark_module("kernels")
    assert kernels.main([*argv, "--implementations", "torch", "native"]) == 0
    report = json.loads(path.read_text())
    rows = {
        (r["op"], r["cache"], r["batch"], r["queries"])
        for r in report["results"]
        if r["implementation"] == "torch"
    }
    assert rows == {
        (op, cache, batch, queries)
        for op, caches in (
            ("paged_attention", ("float32", "float8_e4m3fn")),
            ("mla_decode", ("float32", "float8_e4m3fn")),
            ("moe_experts", ("None",)),
            ("linear", ("None",)),
        )
        for cache in caches
        for batch, queries in ((1, 1), (3, 1), (3, 4))
        if queries == 1 or caches != ("None",)
    } | {("linear", "None", 4, 1)}
    for row in report["results"]:
        assert row["of_copy"] == pytest.approx(
            row["bytes"] / row["seconds"] / report["copy_bytes_per_s"]
        )
        assert bool(row["kernels"]) == (row["batch"] == 3)  # the first of all is traced
    natively = [r for r in report["results"] if r["implementation"] == "native"]
    refused = [r for r in report["left_out"] if r["implementation"] == "native"]
    assert {r["cache"] for r in refused} <= {"float32", "float8_e4m3fn"}
    assert len(natively) + len(refused) > 0
    assert all("cannot run here" in r["why"] for r in refused)
    assert all(r["error"] < 1e-3 and r["torch_over_this"] > 0 for r in natively)


def test_rehearsal_of_the_other_kernels(benchmark_module: Module, tmp_path: Path) -> None:
    """Quantised weights, prompts and filters agree with torch, and count what they compute."""
    path = tmp_path / "report.json"
    argv = ["--device", "cpu", "--tiny", "--dtype", "float32", "--output-json", str(path)]
    argv += ["--ops", "quant_linear", "quant_experts", "mla_prefill", "choose_tokens"]
    argv += ["--kv-cache-dtypes", "auto", "--implementations", "torch", "native"]
    assert benchmark_module("kernels").main(argv) == 0
    report = json.loads(path.read_text())
    by_torch = [row for row in report["results"] if row["implementation"] == "torch"]
    forms = [str(form) for form in benchmark_module("_product_loads").FORMATS.values()]
    product, experts = "256 to 128", "8 experts, top 2, 128 x 128"
    filters = "500 tokens, top-k 50, top-p 0.9"
    choices = [filters, "500 tokens, top-k 50", "500 tokens, top-p 0.9", "500 tokens"]
    assert [(row["op"], row["sizes"], row["batch"]) for row in by_torch] == [
        *(("quant_linear", f"{product}, {f}", n) for f in forms for n in (3, 1, 4, 64)),
        *(("quant_experts", f"{experts}, {f}", n) for f in forms for n in (3, 1, 64)),
        *(("mla_prefill", "2 heads, latent 32 + 16", n) for n in (1, 3)),
        *(("choose_tokens", sizes, n) for sizes in choices for n in (3, 1)),
    ]
    for row in report["results"]:
        computed = row["operations"] / row["seconds"]
        assert row["of_bound"] == max(row["of_copy"], computed / report["product_per_s"])
        assert (row["operations"] > 0) == (row["op"] != "choose_tokens")
    goals, loads = benchmark_module("_gpu_goals"), benchmark_module("_kernel_sizes")
    tiny = goals.Subjects(
        latents=str(loads.TINY_LATENTS),
        case=(3, 40),
        cache="float32",
        product=str(loads.TINY_PRODUCT),
        experts=str(loads.TINY_EXPERTS),
        prompt=40,
        choice=str(loads.ChoiceSizes(500, 50, 0.9)),
    )
    parts = {"other-kernels": {"report": report}}
    missing = [goal.name for goal in goals._bounded(parts, tiny) if not goal.reached]
    # Only plain torch has these on a CPU.
    assert missing == ["quant_experts, fp8, batch 3", "quant_experts, mxfp4, batch 3"]


def test_random_weights_are_of_the_size_of_others(benchmark_module: Module) -> None:
    products = benchmark_module("_product_loads")
    generator = torch.Generator().manual_seed(1)
    for form in products.FORMATS.values():
        weights = products.random_weights(form, generator, 2, 256, 384)
        assert weights.shape == (256, 384)
        assert 0.5 < float(dequantise(weights).std()) * 384**0.5 < 2


def test_time_and_memory_that_do_not_suffice(benchmark_module: Module, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    argv = ["--device", "cpu", "--tiny", "--ops", "mla_decode", "--implementations", "torch"]
    argv += ["--kv-cache-dtypes", "auto", "--seconds", "0", "--output-json", str(path)]
    assert benchmark_module("kernels").main(argv) == 0
    report = json.loads(path.read_text())
    assert report["results"] == []
    assert [r["why"] for r in report["left_out"]] == ["out of time"] * 3
    loads = benchmark_module("_kernel_loads")
    platform = benchmark_module("atom.platform").cpu_platform()
    common = (platform, torch.float32, torch.float32, 64, 1 << 10, 16)
    small = loads.LatentDecode(loads.LatentSizes(2, 32, 16, 16, 16), *common)
    assert small.refusal(loads.Case(2, 32)) is None
    assert "there is memory for 4" in small.refusal(loads.Case(2, 33))


def test_an_implementation_that_differs_is_a_fault(benchmark_module: Module) -> None:
    kernels, loads = benchmark_module("kernels"), benchmark_module("_kernel_loads")
    case = loads.Case(1, 40)
    row = {**KERNEL_ROW, "cache": "None", "batch": 1, "context": 40}
    report = kernels.Report(1e12, 1e12, [row, {**row, "implementation": "torch"}])
    products, sizes = benchmark_module("_product_loads"), benchmark_module("_kernel_sizes")
    load = products.Experts(sizes.ExpertSizes(), None, torch.float32, 1)
    load.op, load.sizes = "paged_attention", row["sizes"]
    outputs = {("triton", case): torch.tensor([1.0, 2.1]), ("torch", case): torch.tensor([1.0, 2])}
    kernels._compare(load, outputs, 0.04, report)
    assert "differs from torch by 5.0e-02" in report.faults[0]
    assert row["error"] == pytest.approx(0.05)
    outputs["triton", case] = torch.tensor([1.0, float("nan")])
    kernels._compare(load, outputs, 0.04, report)
    assert len(report.faults) == 2
    assert loads.worst_error(torch.tensor([1, 2, 3, 9]), torch.tensor([1, 2, 3, 4])) == 0.25


@pytest.mark.parametrize("reaches", [True, False])
def test_steps_that_no_graph_serves_count(
    reaches: bool, benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts do not, but contexts near the longest do, and so do their drafts."""
    engines, steps = benchmark_module("_decode_engine"), benchmark_module("_decode_steps")
    shapes = benchmark_module("_decode_shapes")
    monkeypatch.setattr(planned_graphs, "capture_backend", lambda _: ReexecuteBackend())
    if not reaches:
        monkeypatch.setattr(planned_graphs, "default_context_bounds", lambda most, _: (most,))
    folders = shapes.write_configs(tmp_path, shapes.SHAPES["tiny"], 96)
    limits = (1, 4), 9, 96
    setup = engines.Setup(
        folders, 3, False, *limits, "float32", "auto", "cpu", num_threads=1, kv_cache_memory=1 << 24
    )
    engine = engines.DecodeEngine(setup)
    before = engine.stats
    engine.serve_others()
    after = engine.stats
    engine.shutdown()
    assert after.num_steps > after.num_decode_steps + 2 > 30
    assert after.num_draft_steps == after.num_decode_steps
    assert (steps._replayed(before, after) == 1.0) == reaches
    assert steps._replayed(before, after) > 0.5


def test_rehearsal_of_decode_steps(tmp_path: Path) -> None:
    """In a process of its own, since engines set the number of threads."""
    path = tmp_path / "report.json"
    program = str(BENCHMARKS / "decode_roofline.py")
    argv = ["--device", "cpu", "--tiny", "--dtype", "float32", "--shapes", "tiny"]
    argv += ["--batch-sizes", "2", "--long", "4", "20", "--num-threads", "1"]
    argv += ["--output-json", str(path)]
    done = subprocess.run(
        [sys.executable, program, *argv], capture_output=True, text=True, check=True
    )
    report = json.loads(path.read_text())
    assert report["faults"] == []
    rows = [(r["by"], r["k"], r["batch"], r["context"]) for r in report["results"]]
    assert rows == [
        ("atom", 0, 2, 9),
        ("atom", 0, 4, 20),
        ("atom", 3, 2, 9),
        ("transformers", 0, 2, 9),
    ]
    ours, long, verified, theirs = report["results"]
    assert ours["bytes"] == theirs["bytes"] < verified["bytes"]
    assert ours["bytes"] < long["bytes"]
    assert ours["tokens"] == 2 <= verified["tokens"] <= 8
    assert ours["overlapped"]
    assert ours["device_seconds"] is ours["host_seconds"] is ours["gap_seconds"] is None
    assert ours["trace"]["steps"] >= 6
    assert "paged_attention" in report["ops"]["tiny, k=0"]
    assert "| tiny | transformers (static cache) | 2 | 9 | 0 |" in done.stdout
    assert "shape tiny, atom, k 3, batch 2, context 9, mode eager: " in done.stderr


def test_tasks_and_their_time(benchmark_module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goals first; what is not begun, or fails, is in the report."""
    roofline, device = benchmark_module("decode_roofline"), benchmark_module("_device")
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda _: 1e12)
    args = roofline.parse_args([])
    platform = benchmark_module("atom.platform").Platform("cuda", "sm90", True)
    session = roofline.Session(args, platform)
    names = [roofline.named(task.about) for task in session.tasks()]
    assert names == [
        "shape 8b, atom, k 0, mode graph",
        "shape kimi, atom, k 0, mode graph",
        "shape 8b, atom, k 3, mode graph",
        "shape kimi, atom, k 3, mode graph",
        "shape 8b, transformers, k 0, batch 1",
        "shape 8b, transformers, k 0, batch 16",
        "shape 8b, transformers, k 0, batch 64",
    ]
    cases = roofline.DecodeCase
    short = [cases(batch, 1024) for batch in (1, 16, 64)]
    assert session._cases({"shape": "8b", "k": 0}) == [*short, cases(64, 8000, pretend=True)]
    assert session._cases({"shape": "8b", "k": 3}) == short
    assert session._cases({"shape": "kimi", "k": 0}) == short  # equal tokens, the same experts
    starts = roofline.Session(roofline.parse_args(["--start", "kimi"]), platform).tasks()
    assert [roofline.named(task.about) for task in starts] == ["shape kimi, atom, k 3"]
    monkeypatch.setattr(roofline, "free_device_memory", lambda _: None)

    def fail() -> None:
        raise ValueError("no such kernel")

    about = {"shape": "8b", "by": "atom", "k": 0}
    session.run(roofline.Task(about, fail), device.Clock(60))
    assert session.report.faults == ["shape 8b, atom, k 0: ValueError: no such kernel"]
    about = {"shape": "kimi", "by": "atom", "k": 0}
    session.run(roofline.Task(about, fail), device.Clock(10))
    assert session.report.left_out == [{**about, "why": "out of time"}]


def test_calls_on_a_gpu_are_captured(
    benchmark_module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bookkeeping only: the backend and the device's clock are stand-ins."""
    device = benchmark_module("_device")
    ran: list[str] = []
    monkeypatch.setattr(device, "CudaGraphBackend", ReexecuteBackend)

    def seconds(work: Callable[[], None]) -> float:
        work()
        return 6.0

    monkeypatch.setattr(device, "_device_seconds", seconds)
    calls = [lambda name=name: ran.append(name) for name in "ab"]
    timing = device.time_calls(calls, torch.device("cuda"), repeats=3)
    assert (timing.seconds, timing.how) == (3.0, "graph")
    assert ran == ["a", "b"] * (1 + 2 + 3)

    class Refusing:
        def capture(self, _: Callable[[], None]) -> None:
            raise RuntimeError("operation not permitted\nwhen capturing")

    monkeypatch.setattr(device, "CudaGraphBackend", Refusing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timing = device.time_calls(calls, torch.device("cuda"), repeats=1)
    assert timing.how == "launched, not capturable: operation not permitted"


def test_calls_rotate_over_more_than_a_cache(benchmark_module: Module) -> None:
    num_calls = benchmark_module("_device").num_calls
    assert num_calls(4 << 20, 100 << 30) == 128  # the most
    assert num_calls(100 << 20, 100 << 30) == 11
    assert num_calls(2 << 30, 100 << 30) == 1
    assert num_calls(100 << 20, 350 << 20) == 3  # no data for more


def test_long_prompts_that_do_not_fit_are_fewer(benchmark_module: Module) -> None:
    steps = benchmark_module("_decode_steps")

    class Engine:
        @staticmethod
        def most_seqs(num_tokens: int) -> int:
            room: int = 40 * (8000 + 32 + steps.UNTIMED_STEPS)
            return room // num_tokens

    def batch(wanted: int, k: int = 0, context: int = 8000) -> int:
        return int(steps.fitting(Engine(), steps.DecodeCase(wanted, context), 32, k))

    assert [batch(64), batch(32), batch(1)] == [32, 32, 1]
    assert batch(40) == 40
    assert batch(40, k=3) == 20
    assert batch(1, context=400_000) == 0


def test_how_long_capturing_took_is_read_from_the_log(benchmark_module: Module) -> None:
    """Of the layers, and of choices and drafts, which have a log of their own."""
    layers, others = map(
        logging.getLogger, ("atom.graphs.runner", "atom.model_engine.step.step_graphs")
    )
    before = layers.level, others.level
    with benchmark_module("decode_roofline").CaptureTimes() as times:
        layers.info("captured %d graphs in %.1f s", 42, 8.5)
        others.info("captured %d graphs of choices and drafts in %.1f s", 12, 1.5)
        layers.info("something else")
    layers.warning("captured %d graphs in %.1f s", 1, 1.0)
    assert (times.graphs, times.seconds) == (54, 10.0)
    assert (layers.level, others.level) == before
    atom = Path(__file__).parents[2] / "atom"
    for name, text in (
        ("graphs/runner.py", "captured %d graphs in %.1f s"),
        ("model_engine/step/step_graphs.py", "captured %d graphs of choices and drafts in %.1f s"),
    ):
        assert f'"{text}"' in (atom / name).read_text()


def test_the_8b_draft_can_reach_its_goal(benchmark_module: Module) -> None:
    """By bytes: three passes of its layer and its head, over the target's weights."""
    shape = benchmark_module("_decode_shapes").SHAPES["8b"]
    target, draft = shape.target, shape.draft
    hidden, inter = target["hidden_size"], target["intermediate_size"]
    narrow = hidden * target["num_key_value_heads"] // target["num_attention_heads"]
    layer = 2 * hidden * (hidden + narrow) + 3 * hidden * inter
    whole = target["num_hidden_layers"] * layer + target["vocab_size"] * hidden
    # It reads the hidden state and the embedding of a token, and in its first pass three states.
    one = layer + hidden * (hidden + 2 * narrow) + draft["draft_vocab_size"] * hidden
    assert 1 + (3 * one + 3 * hidden * hidden) / whole < 1.2
