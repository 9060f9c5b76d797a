"""The GPU lane on whatever machine this is: what it measures, reports, and says without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch):
    """The module; benchmarks are programs and import each other by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    return gpu_check


def test_decode_steps(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sizes = ["--batch-sizes", "1", "3", "--prompt-len", "9", "--steps", "2", "--rounds", "2"]
    model = ["--shape", "tiny", "--dtype", "float32", "--device", "cpu"]
    command = [sys.executable, str(BENCHMARKS / "gpu_decode.py"), *model, *sizes]
    done = subprocess.run(
        [*command, "--output-json", str(path)], check=True, capture_output=True, text=True
    )
    assert "no GPU: there are no graphs" in done.stderr
    report = json.loads(path.read_text())
    assert [(r["speculation"], r["batch_size"], r["mode"]) for r in report["results"]] == [
        (speculation, size, "eager") for speculation in ("off", "eagle3, k=3") for size in (1, 3)
    ]
    for r in report["results"]:
        steps, accepted = 1000 / r["step_ms"], r["tokens_per_s_if_all_accepted"]
        assert r["batch_size"] * steps * 0.999 <= r["tokens_per_s"] <= accepted * 1.001
    assert "| eagle3, k=3 | 3 | eager |" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is no GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    output = tmp_path / "report.md"
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--output", str(output)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "no CUDA or ROCm device" in done.stdout
    assert not output.exists()


def test_outcomes_of_the_marked_tests(gpu_check, tmp_path: Path) -> None:
    """Skipped tests alone are no success."""
    tests = gpu_check.run_tests(200, tmp_path)
    assert any("graphs_on_gpu" in test["name"] for test in tests["tests"])
    if not torch.cuda.is_available():
        assert {test["outcome"] for test in tests["tests"]} == {"skipped"}
        assert not tests["passed"]


def test_a_run_that_takes_too_long_is_stopped(gpu_check) -> None:
    program = "import time; print('begun', flush=True); time.sleep(60)"
    status, printed = gpu_check.run([sys.executable, "-c", program], 1)
    assert status is None
    assert printed == "begun\n"


def test_report(gpu_check) -> None:
    failed = {"name": "t.b", "outcome": "failure", "seconds": 2.0, "message": "assert 1\n== 2"}
    row = {"speculation": "off", "batch_size": 8, "mode": "graph", "step_ms": 1.5}
    row |= {"tokens_per_s": 5333.0, "tokens_per_s_if_all_accepted": 5333.0}
    report = {
        "environment": {"torch": "2.13.0"},
        "gpu": {"device": "GPU 9000", "hip": None},
        "shape": "1b",
        "tests": {
            "passed": False,
            "status": 1,
            "seconds": 3.0,
            "output": "1 failed",
            "tests": [{"name": "t.a", "outcome": "passed", "seconds": 1, "message": ""}, failed],
        },
        "benchmark": {"passed": True, "status": 0, "output": "noise", "results": [row]},
    }
    text = gpu_check.markdown(report)
    assert "- device: GPU 9000" in text
    assert "failed (exit status 1), 3 s" in text
    assert "| t.b | failure | 2.0 s | assert 1 |" in text
    assert "| off | 8 | graph | 1.50 | 5333 | 5333 |" in text
    assert "1 failed" in text
    assert "noise" not in text
    report["benchmark"] = {"passed": False, "status": None, "output": "stuck"}
    assert "out of time" in gpu_check.markdown(report)
