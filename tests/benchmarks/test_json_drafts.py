"""json_drafts.py: a whole run on a tiny model, and when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.stats import SpecDecodeStats

Import = Callable[[str], Any]


@pytest.fixture
def benchmark(benchmark_module: Import) -> Any:
    return benchmark_module("json_drafts")


def flags(model: Path) -> list[str]:
    given = ["--model", str(model), "--dtype", "float32", "--num-threads", "1"]
    given += ["--kv-cache-memory", "8MB", "--method", "suffix", "--num-speculative-tokens", "3"]
    return [*given, "--limit", "2", "--max-tokens", "32", "--show-schema", "off"]


def test_a_run_on_a_tiny_model(benchmark: Any, tiny_llama_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    given = [*flags(tiny_llama_dir), "--output-json", str(output)]
    assert benchmark.main([*given, "--min-ratio", "1.05"]) == 0
    report = json.loads(output.read_text())
    without, with_grammars = report["tokens_per_forward"]
    assert report["same"] == 2
    assert with_grammars > without >= 1  # keys are drafted
    assert report["ratio"] == pytest.approx(with_grammars / without)
    assert report["engine"]["speculative"]["method"] == "suffix"


@pytest.mark.parametrize(
    ("answers", "accepted", "min_ratio", "code"),
    [
        ([[1, 2]], 3, "1.9", 0),
        ([[1, 2]], 3, "2.1", 1),
        ([[1, 3]], 3, "0", 1),
    ],
)
def test_other_answers_and_too_few_tokens_fail(
    answers: list[list[int]],
    accepted: int,
    min_ratio: str,
    code: int,
    benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def side(answers: list[list[int]], accepted: int) -> Any:
        counts = [0] * accepted + [1]
        return benchmark.Side(
            answers,
            SpecDecodeStats(num_drafts=1, num_draft_tokens=3, accepted_counts=counts),
            1.0,
        )

    sides = iter([side([[1, 2]], 1), side(answers, accepted)])
    monkeypatch.setattr(benchmark, "run", lambda *_: next(sides))
    assert benchmark.main(["--limit", "1", "--min-ratio", min_ratio]) == code
