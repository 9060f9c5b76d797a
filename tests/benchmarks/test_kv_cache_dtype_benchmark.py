"""kv_cache_dtype.py: whole runs on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Import = Callable[[str], Any]


@pytest.fixture
def benchmark(benchmark_module: Import) -> Any:
    return benchmark_module("kv_cache_dtype")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    lines = [{"question": f"again and again {i}", "answer": "and again " * 9} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def flags(model: Path, text: Path) -> list[str]:
    given = ["--model", str(model), "--dtype", "float32", "--num-threads", "1"]
    given += ["--kv-cache-memory", "4MB", "--max-model-len", "256", "--max-tokens", "24"]
    return [*given, "--text", str(text), "--num-tokens", "90", "--window", "40"]


def test_a_run_on_a_tiny_model(
    benchmark: Any, tiny_llama_dir: Path, records: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report"
    given = [*flags(tiny_llama_dir, records), "--text-field", "question", "answer"]
    given += ["--method", "suffix", "--num-speculative-tokens", "3", "--prompts", str(records)]
    given += ["--limit", "5", "--batch-size", "2", "--output-dir", str(output)]
    # Random weights: what 8 bits cost them says nothing.
    assert benchmark.main([*given, "--max-nll-rise", "9", "--max-acceptance-fall", "1"]) == 0
    report = json.loads((output / "kv_cache_dtype.json").read_text())
    likelihood, acceptance = report["likelihood"], report["acceptance"]
    assert likelihood["num_tokens"] == 90 - 3
    nll = likelihood["nll"]
    assert nll["fp8"] - nll["bf16"] == pytest.approx(likelihood["rise"])
    assert 0 < abs(likelihood["rise"]) < 1
    assert acceptance["num_prompts"] == 5
    assert min(acceptance["num_draft_tokens"].values()) > 0
    assert acceptance["interval"][0] <= acceptance["change"] <= acceptance["interval"][1]
    assert "| acceptance rate, 5 prompts |" in (output / "kv_cache_dtype.md").read_text()


def test_without_drafts_and_above_the_limit(
    benchmark: Any, tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 9)
    assert benchmark.main([*flags(tiny_llama_dir, text), "--max-nll-rise", "-9"]) == 1
    printed = capsys.readouterr().out
    assert "acceptance was not measured" in printed
    assert "| no |" in printed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--text-field", "body"], "records.jsonl:1 is no JSON object with body"),
        (["--text-field", "answer", "--num-tokens", "100000"], "100000 are to be scored"),
        (["--kv-cache-dtype", "fp8"], "leave --kv-cache-dtype out"),
        (["--text", "/no/such/file"], "cannot read /no/such/file"),
        (["--window", "1"], "must be larger"),
    ],
)
def test_wrong_options_are_refused(
    benchmark: Any,
    tiny_llama_dir: Path,
    records: Path,
    given: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main([*flags(tiny_llama_dir, records), *given])
    assert message in capsys.readouterr().err
