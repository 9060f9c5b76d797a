"""`atom bench latency` and `throughput` on a tiny model: that they run, and what they report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.entrypoints.terminal import command


def _run(folder: Path, tmp_path: Path, *words: str) -> dict[str, Any]:
    path = tmp_path / "report.json"
    model = (str(folder), "--dtype", "float32", "--num-threads", "1")
    assert command.main(["bench", *words, *model, "--output-json", str(path)]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    assert {"date", "command", "cpu", "torch", "atom"} <= set(report["environment"])
    assert report["engine"]["model"]["dtype"] == "float32"
    return report


def test_throughput(tiny_llama_dir: Path, tmp_path: Path) -> None:
    sizes = ("--num-prompts", "5", "--output-len", "7", "--rounds", "2", "--input-len", "20")
    report = _run(tiny_llama_dir, tmp_path, "throughput", *sizes)
    assert len(report["rounds"]) == 2
    assert report["median"]["output_tokens"] == 35
    assert report["median"]["prompt_tokens"] == 100
    assert report["median"]["output_tokens_per_s"] > 0


def test_latency(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--batch-size", "2", "--max-tokens", "40", "--num-iters", "3", "--input-len", "20")
    lookup = ("--method", "suffix", "--num-speculative-tokens", "3")
    report = _run(tiny_llama_dir, tmp_path, "latency", *sizes, *lookup)
    assert report["output_tokens"] == [80, 80, 80]
    assert 0 < report["ttft_ms"]["mean"] < report["latency_ms"]["mean"]
    assert report["tokens_per_forward"] > 1
    assert not report["engine"]["cache"]["enable_prefix_caching"]
    assert "| latency_ms |" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["latency", "--num-iters", "0"], ["throughput", "no-model"]])
def test_what_cannot_be_is_said_plainly(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["bench", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
