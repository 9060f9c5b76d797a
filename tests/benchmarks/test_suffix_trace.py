"""The trace that measures the suffix lookup."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.model_loader.locate import embedded_model
from atom.options.fields import ConfigError
from atom.spec_decode.suffix_index import BYTES_PER_TOKEN, SuffixIndex

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


def test_what_is_held_is_counted_once(benchmark_module: Load) -> None:
    held_bytes = benchmark_module("suffix_trace").held_bytes
    token = 1 << 40
    alone = held_bytes([token, 5])
    assert alone == sys.getsizeof([token, 5]) + sys.getsizeof(token) + sys.getsizeof(5)
    assert held_bytes([token, token]) == alone - sys.getsizeof(5)
    index = SuffixIndex()
    empty = held_bytes(index)
    index.extend(range(1000, 2000))
    # A token, and of each run a hash, its end and an entry; three chains of 8 bytes.
    assert held_bytes(index) - empty > 1000 * (28 + 3 * (28 + 28 + 8))


@pytest.mark.skipif(not has_model(), reason="needs the embedded model's tokenizer")
def test_the_report(benchmark_module: Load, tmp_path: Path) -> None:
    program = benchmark_module("suffix_trace")
    report, prompts = tmp_path / "report.json", tmp_path / "prompts.jsonl"
    assert program.main(["--num-requests", "64", "--output-json", str(report)]) == 0
    results = json.loads(report.read_text())["results"]
    for r in results[2:]:
        assert 100 < r["peak_bytes"] / r["peak_tokens"] < BYTES_PER_TOKEN
    assert results[3]["peak_tokens"] > results[2]["peak_tokens"]
    scan, _, own, recent = (r["tokens_per_forward"] for r in results)
    assert len({r["num_tokens"] for r in results}) == 1
    assert own > 1.2 * scan
    assert recent > 1.5 * scan
    assert program.main(["--num-requests", "9", "--write-prompts", str(prompts)]) == 0
    assert len(prompts.read_text().splitlines()) == 9
