"""The offline benchmarks on a tiny model: that they run, and what they report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def read_report(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    assert {"date", "command", "cpu", "torch", "atom"} <= set(report["environment"])
    return report


@pytest.fixture
def run(benchmark_module: Callable[[str], Any], tmp_path: Path) -> Run:
    def run(name: str, *args: str) -> dict[str, Any]:
        path = tmp_path / "report.json"
        benchmark_module(name).main([*args, "--output-json", str(path)])
        return read_report(path)

    return run


@pytest.mark.slow
def test_replicas(run: Run, tiny_llama_dir: Path) -> None:
    sizes = ("--requests", "3", "--clients", "2", "--max-tokens", "5", "--rounds", "2")
    model = ("--model", str(tiny_llama_dir), "--num-threads", "1", "--kv-cache-memory", "4MiB")
    report = run("replicas", *model, *sizes)
    assert [len(speeds) for speeds in report["output_tokens_per_s"].values()] == [2, 2]
    assert report["ratios"]["1"] == [1, 1]


def test_compare_transformers(run: Run, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """In float32 both must generate the same tokens, padded batch or not."""
    sizes = ("--rounds", "1", "--max-tokens", "8", "--prefill-tokens", "100")
    model = ("--model", str(tiny_llama_dir), "--dtype", "float32", "--num-threads", "1")
    markdown = tmp_path / "report.md"
    report = run("compare_transformers", *model, *sizes, "--output-md", str(markdown))
    assert [r["case"] for r in report["results"]] == ["decode-1", "decode-8", "prefill"]
    for result in report["results"]:
        assert result["same_tokens"] == 1
        assert result["ratio"] > 0
    assert "| decode-8 |" in markdown.read_text()


def test_compare_modelling_code(run: Run, tiny_llama_dir: Path) -> None:
    sizes = ("--rounds", "1", "--max-tokens", "4", "--cases", "decode-1")
    model = ("--model", str(tiny_llama_dir), "--dtype", "float32", "--num-threads", "1")
    report = run("compare_transformers", *model, *sizes, "--modelling-code")
    (result,) = report["results"]
    assert list(result["median_tokens_per_s"]) == ["native", "modelling code"]
    assert result["same_tokens"] == 1


@pytest.mark.slow
def test_images(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="transformers' processor needs it")
    sizes = ("--layers", "1", "--sizes", "56x56", "--rounds", "1", "--dtype", "float32")
    report = run("images", *sizes, "--num-threads", "1", "--folder", str(tmp_path / "model"))
    (result,) = report["results"]
    assert result["same_first_tokens"] == 1
    assert result["ratio"] > 0


def test_structured_output(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """As a program of its own."""
    path = tmp_path / "report.json"
    sizes = ("--batch-size", "2", "--max-tokens", "24", "--rounds", "1")
    model = ("--model", str(tiny_llama_dir), "--dtype", "float32", "--num-threads", "1")
    command = [sys.executable, str(BENCHMARKS / "structured_output.py"), *model, *sizes]
    subprocess.run([*command, "--output-json", str(path)], check=True, capture_output=True)
    report = read_report(path)
    assert report["tokens_per_s"].keys() == {"free", "json_schema"}
    assert report["ratio"] > 0
