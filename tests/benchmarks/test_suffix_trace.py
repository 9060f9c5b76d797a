"""The trace that measures the suffix lookup."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.model_loader.source import embedded_model
from atom.options import ConfigError

Load = Callable[[str], Any]


def has_model() -> bool:
    try:
        return embedded_model().is_file()
    except ConfigError:
        return False


def test_the_trace_is_always_the_same(benchmark_module: Load) -> None:
    agent_trace = benchmark_module("_agent_trace").agent_trace
    steps = agent_trace(96)
    assert steps == agent_trace(200)[:96]
    assert steps != agent_trace(96, seed=1)
    assert len({step.output for step in steps}) > 60
    # What a session knows is in the prompt of its next step.
    assert steps[8].prompt.startswith(steps[0].prompt + steps[0].output)


def test_the_scan_takes_the_latest_of_the_longest_matches(benchmark_module: Load) -> None:
    scan = benchmark_module("suffix_trace").NgramScan(most=3, least=2, longest=3, shortest=1)
    scan.start(0)
    assert scan.find(0, [1, 2, 3], [9]) == []
    assert scan.find(0, [1, 2, 3], [9, 2]) == [3, 9, 2]
    assert scan.find(0, [1, 2, 3], [9, 2, 4, 2]) == [4, 2]
    assert scan.find(0, [1, 2, 3], [9, 2, 4, 2, 3, 1, 2]) == [3, 9, 2]


@pytest.mark.skipif(not has_model(), reason="needs the embedded model's tokenizer")
def test_the_report(benchmark_module: Load, tmp_path: Path) -> None:
    program = benchmark_module("suffix_trace")
    report, prompts = tmp_path / "report.json", tmp_path / "prompts.jsonl"
    assert program.main(["--num-requests", "64", "--output-json", str(report)]) == 0
    results = json.loads(report.read_text())["results"]
    scan, _, own, recent = (r["tokens_per_forward"] for r in results)
    assert len({r["num_tokens"] for r in results}) == 1
    assert own > 1.2 * scan
    assert recent > 1.5 * scan
    assert program.main(["--num-requests", "9", "--write-prompts", str(prompts)]) == 0
    assert len(prompts.read_text().splitlines()) == 9
