"""The GPU lane on whatever machine this is: what it measures, reports, and says without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.graphs.capture import ReexecuteBackend

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


class TestParts:
    def test_which_files_have_something_to_show(self, benchmark_module: Module) -> None:
        tests = benchmark_module("_gpu_tests")
        marked = [path.name for path in tests.marked_files()]
        adapters = {
            f"test_aiter{what}.py" for what in ("", "_mla", "_moe", "_quant", "_quant_experts")
        }
        assert {"test_graphs_on_gpu.py", *adapters} <= set(marked)
        kernels = [path.name for path in tests.kernel_files()]
        assert {"test_triton_attention.py", "test_triton_mla.py"} <= set(kernels)
        assert not any("aot" in name for name in kernels)

    @without_gpu
    def test_skipped_tests_are_no_success(self, benchmark_module: Module, tmp_path: Path) -> None:
        tests = benchmark_module("_gpu_tests")
        files = [path for path in tests.marked_files() if "capturable" in path.name]
        part = tests.run_tests(files, 200, tmp_path, marked=True)
        assert {test["outcome"] for test in part["tests"]} == {"skipped"}
        assert not part["passed"]
        assert part["status"] == 0

    def test_several_files_side_by_side(self, benchmark_module: Module, tmp_path: Path) -> None:
        for name, body in (("good", "pass"), ("bad", "assert 1 == 2")):
            (tmp_path / f"test_{name}.py").write_text(f"def test_{name}(): {body}\n")
        files = sorted(tmp_path.glob("test_*.py"))
        part = benchmark_module("_gpu_tests").run_tests(
            files, 200, tmp_path, marked=False, processes=2
        )
        assert [test["outcome"] for test in part["tests"]] == ["failure", "passed"]
        assert (part["passed"], part["status"], part["left_out"]) == (False, 1, [])
        assert "assert 1 == 2" in part["output"]

    def test_out_of_time(self, benchmark_module: Module, tmp_path: Path) -> None:
        part = benchmark_module("_gpu_tests").run_tests(
            [Path("test_a.py"), Path("test_b.py")], 0, tmp_path, marked=False
        )
        assert part["left_out"] == ["test_a.py", "test_b.py"]
        assert (part["passed"], part["status"]) == (False, None)

    def test_a_run_that_takes_too_long_is_stopped(self, benchmark_module: Module) -> None:
        program = "import time; print('begun', flush=True); time.sleep(60)"
        status, printed = benchmark_module("_gpu_tests").run([sys.executable, "-c", program], 2)
        assert status is None
        assert printed == "begun\n"

    def test_each_part_leaves_time_for_the_others(
        self, benchmark_module: Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check = benchmark_module("gpu_check")
        allowed: dict[str, float] = {}

        def tests(_: object, seconds: float, *__: object, marked: bool, **___: object) -> Any:
            allowed["graphs" if marked else "kernel tests"] = seconds
            return {"passed": True}

        def benchmark(program: str, seconds: float, *flags: object) -> Any:
            allowed[program] = seconds
            return {"passed": True, "flags": flags[1:]}

        monkeypatch.setattr(check, "run_tests", tests)
        monkeypatch.setattr(check, "run_benchmark", benchmark)
        whole = sum(check._SECONDS.values())
        parts = check.run_parts(list(check._SECONDS), whole / 60, ["8b"])
        assert list(parts) == list(check._SECONDS)
        assert parts["decode steps"]["flags"] == ("--shapes", "8b")
        # Nobody used its share, so it passed on.
        shares = list(check._SECONDS.values())
        for i, seconds in enumerate(allowed.values()):
            assert sum(shares[: i + 1]) - 5 < seconds < sum(shares[: i + 1])

    def test_a_benchmark_is_run_within_its_time(
        self, benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check = benchmark_module("gpu_check")
        commands: list[list[str]] = []

        def run(command: list[str], seconds: float) -> tuple[int | None, str]:
            commands.append(command)
            (tmp_path / "kernels.json").write_text('{"results": []}')
            return (None, "stuck") if seconds < 50 else (0, "")

        monkeypatch.setattr(check, "run", run)
        part = check.run_benchmark("kernels", 60, tmp_path)
        assert (part["passed"], part["report"]) == (True, {"results": []})
        assert commands[0][-4:-1] == ["--seconds", "45", "--output-json"]
        stopped = check.run_benchmark("kernels", 40, tmp_path)
        assert (stopped["passed"], stopped["status"]) == (False, None)
        assert stopped["report"] == {"results": []}


KERNEL_ROW = {
    "op": "paged_attention", "implementation": "triton", "cache": "bfloat16",
    "sizes": "32/8 heads of 128", "batch": 64, "context": 8192, "bytes": 2e9, "seconds": 1e-3,
    "how": "graph", "calls": 1, "bytes_per_s": 2e12, "of_copy": 0.5, "error": 1e-3,
    "torch_over_this": 4.25,
}  # fmt: skip
STEP_ROW = {
    "shape": "8b", "by": "atom", "k": 0, "mode": "graph", "batch": 1, "context": 1024,
    "seconds": 5e-3, "tokens": 1.0, "bytes": 16e9, "device_seconds": 4.9e-3,
    "host_seconds": 1e-4, "bytes_per_s": 3.2e12, "of_copy": 0.8, "tokens_per_s": 200.0,
}  # fmt: skip


def report_of(**parts: Any) -> dict[str, Any]:
    return {
        "environment": {"torch": "2.13.0"},
        "gpu": {"device": "GPU 9000", "hip": None},
        "not run": [],
        "parts": parts,
    }


class TestReport:
    def finished(self, row: dict[str, Any]) -> dict[str, Any]:
        report = {"copy_bytes_per_s": 4e12, "results": [row], "left_out": [], "faults": []}
        report |= {"ops": {"8b, k=0": "op  runs"}}
        return {"passed": True, "status": 0, "seconds": 2.0, "output": "noise", "report": report}

    def test_all_parts(self, benchmark_module: Module) -> None:
        check = benchmark_module("gpu_check")
        failed = {"name": "t.b", "outcome": "failure", "seconds": 2.0, "message": "assert 1\n== 2"}
        passed = {"name": "t.a", "outcome": "passed", "seconds": 1, "message": ""}
        tests = {"passed": False, "status": 1, "seconds": 3.0, "output": "1 failed"}
        tests |= {"tests": [passed, failed], "left_out": ["test_slow.py"]}
        report = report_of(
            **{
                "graphs": {**tests, "passed": True},
                "kernel tests": tests,
                "kernels": self.finished(KERNEL_ROW),
                "decode steps": self.finished(STEP_ROW),
            }
        )
        report["goals"] = check.goals(report["parts"])
        text = check.markdown(report)
        for expected in (
            "- device: GPU 9000",
            "| kernel tests | failed (exit status 1) | 3 s |",
            "| t.a | passed | 1.0 s |",
            "| t.b | failure | 2.0 s | assert 1 |",
            "1 failure, 1 passed.",
            "out of time: test_slow.py.",
            "| paged_attention, bfloat16, batch 64, context 8192 | at least 75 % of copy "
            "| 50 % of copy, MISSED |",
            "| mla_decode, bfloat16, batch 64, context 8192 | at least 70 % of copy "
            "| not measured |",
            "| decode step of the 8B shape, batch 1 | at least 80 % of copy | 80 % of copy |",
            "| at most 250 us | 100 us |",
            "| paged_attention | 32/8 heads of 128 | triton | bfloat16 | 64 | 8192 | 1000.0 | 2 "
            "| 2000 | 50 % | 4.2 x | 1e-03 |",
            "| 8b | atom (graph) | 1 | 0 | 5.00 | 4.90 | 100 | 16.00 | 3200 | 80 % | 200 |",
        ):
            assert expected in text
        assert "noise" not in text

    def test_parts_that_were_stopped_or_never_begun(self, benchmark_module: Module) -> None:
        check = benchmark_module("gpu_check")
        stuck = {"passed": False, "status": None, "seconds": 9.0, "output": "stuck", "report": None}
        report = report_of(kernels=stuck) | {"not run": ["graphs"]}
        report["goals"] = check.goals(report["parts"])
        text = check.markdown(report)
        assert "| kernels | out of time | 9 s |" in text
        assert "Not run, by --parts: graphs." in text
        assert "stuck" in text
        assert text.count("not measured") == 4


def test_rehearsal_of_the_kernels(benchmark_module: Module, tmp_path: Path) -> None:
    """On a CPU: plain torch, both storages; what cannot run is listed with its reason."""
    path = tmp_path / "report.json"
    argv = ["--device", "cpu", "--tiny", "--dtype", "float32", "--output-json", str(path)]
    kernels = benchmark_module("kernels")
    assert kernels.main([*argv, "--implementations", "torch", "native"]) == 0
    report = json.loads(path.read_text())
    rows = {
        (r["op"], r["cache"], r["batch"])
        for r in report["results"]
        if r["implementation"] == "torch"
    }
    assert rows == {
        (op, cache, batch)
        for op, caches in (
            ("paged_attention", ("float32", "float8_e4m3fn")),
            ("mla_decode", ("float32", "float8_e4m3fn")),
            ("moe_experts", ("None",)),
        )
        for cache in caches
        for batch in (1, 3)
    }
    for row in report["results"]:
        assert row["of_copy"] == pytest.approx(
            row["bytes"] / row["seconds"] / report["copy_bytes_per_s"]
        )
    natively = [r for r in report["results"] if r["implementation"] == "native"]
    refused = [r for r in report["left_out"] if r["implementation"] == "native"]
    assert {r["cache"] for r in refused} <= {"float32", "float8_e4m3fn"}
    assert len(natively) + len(refused) > 0
    assert all("cannot run here" in r["why"] for r in refused)
    assert all(r["error"] < 1e-3 and r["torch_over_this"] > 0 for r in natively)


def test_time_and_memory_that_do_not_suffice(benchmark_module: Module, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    argv = ["--device", "cpu", "--tiny", "--ops", "mla_decode", "--implementations", "torch"]
    argv += ["--kv-cache-dtypes", "auto", "--seconds", "0", "--output-json", str(path)]
    assert benchmark_module("kernels").main(argv) == 0
    report = json.loads(path.read_text())
    assert report["results"] == []
    assert [r["why"] for r in report["left_out"]] == ["out of time"] * 2
    loads = benchmark_module("_kernel_loads")
    platform = benchmark_module("atom.platform").cpu_platform()
    common = (platform, torch.float32, torch.float32, 64, 1 << 10)
    small = loads.LatentDecode(loads.LatentSizes(2, 32, 16, 16, 16), *common)
    assert small.refusal(loads.Case(2, 32)) is None
    assert "there is memory for 4" in small.refusal(loads.Case(2, 33))


def test_an_implementation_that_differs_is_a_fault(benchmark_module: Module) -> None:
    kernels, loads = benchmark_module("kernels"), benchmark_module("_kernel_loads")
    case = loads.Case(1, 40)
    row = {**KERNEL_ROW, "cache": "None", "batch": 1, "context": 40}
    report = kernels.Report(1e12, [row, {**row, "implementation": "torch"}])
    load = loads.Experts(loads.ExpertSizes(), None, torch.float32, 1)
    load.op, load.sizes = "paged_attention", row["sizes"]
    outputs = {("triton", case): torch.tensor([1.0, 2.1]), ("torch", case): torch.tensor([1.0, 2])}
    kernels._compare(load, outputs, 0.04, report)
    assert "differs from torch by 5.0e-02" in report.faults[0]
    assert row["error"] == pytest.approx(0.05)
    outputs["triton", case] = torch.tensor([1.0, float("nan")])
    kernels._compare(load, outputs, 0.04, report)
    assert len(report.faults) == 2


def test_rehearsal_of_decode_steps(tmp_path: Path) -> None:
    """In a process of its own, since engines set the number of threads."""
    path = tmp_path / "report.json"
    program = str(BENCHMARKS / "decode_roofline.py")
    argv = ["--device", "cpu", "--tiny", "--dtype", "float32", "--shapes", "tiny"]
    argv += ["--batch-sizes", "2", "--num-threads", "1", "--output-json", str(path)]
    done = subprocess.run(
        [sys.executable, program, *argv], capture_output=True, text=True, check=True
    )
    report = json.loads(path.read_text())
    assert report["faults"] == []
    rows = [(r["shape"], r["by"], r["k"], r["batch"]) for r in report["results"]]
    assert rows == [("tiny", "atom", 0, 2), ("tiny", "transformers", 0, 2), ("tiny", "atom", 3, 2)]
    ours, theirs, verified = report["results"]
    assert ours["bytes"] == theirs["bytes"] < verified["bytes"]
    assert ours["tokens"] == 2 <= verified["tokens"] <= 8
    assert ours["device_seconds"] is None
    assert "paged_attention" in report["ops"]["tiny, k=0"]
    assert "| tiny | transformers (static cache) | 2 | 0 |" in done.stdout


def test_tasks_and_their_time(benchmark_module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goals first; what is not begun, or fails, is in the report."""
    roofline, device = benchmark_module("decode_roofline"), benchmark_module("_device")
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda _: 1e12)
    args = roofline.parse_args([])
    platform = benchmark_module("atom.platform").Platform("cuda", "sm90", True)
    session = roofline.Session(args, platform)
    names = [roofline._named(task.about) for task in session.tasks()]
    assert names == [
        "shape 8b, atom, k 0, mode graph",
        "shape kimi, atom, k 0, mode graph",
        "shape 8b, transformers, k 0, batch 1",
        "shape 8b, atom, k 3, mode graph",
        "shape kimi, atom, k 3, mode graph",
        "shape 8b, transformers, k 0, batch 16",
        "shape 8b, transformers, k 0, batch 64",
    ]
    monkeypatch.setattr(roofline, "free_device_memory", lambda _: None)

    def fail() -> None:
        raise ValueError("no such kernel")

    about = {"shape": "8b", "by": "atom", "k": 0}
    session.run(roofline.Task(about, fail), device.Clock(60))
    assert session.report.faults == ["shape 8b, atom, k 0: ValueError: no such kernel"]
    about = {"shape": "kimi", "by": "atom", "k": 0}
    session.run(roofline.Task(about, fail), device.Clock(10))
    assert session.report.left_out == [{**about, "why": "out of time"}]


def test_busy_time_counts_overlaps_once(benchmark_module: Module) -> None:
    events = [
        {"cat": "kernel", "ts": 10, "dur": 5},
        {"cat": "gpu_memcpy", "ts": 12, "dur": 6},
        {"cat": "kernel", "ts": 13, "dur": 1},
        {"cat": "gpu_memset", "ts": 30.5, "dur": 0.5},
        {"cat": "cpu_op", "ts": 0, "dur": 100},
        {"name": "metadata"},
    ]
    engine = benchmark_module("_decode_engine")
    assert engine.busy_seconds(events) == pytest.approx(8.5e-6)
    assert engine.busy_seconds([]) == 0


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
