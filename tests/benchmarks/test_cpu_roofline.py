"""The CPU's roofline: what counts as bytes and operations, and a rehearsal on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

Module = Callable[[str], Any]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Engines set their number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_longer_time_is_the_least(benchmark_module: Module) -> None:
    limits = benchmark_module("_cpu_limits").Limits(
        {1: 5.0, 2: 10.0}, {"bfloat16": 2.0, "int8": 8.0}, {"bfloat16": 4.0, "int8": 1.0}
    )
    assert limits.seconds(100, {"bfloat16": 4}) == 10
    assert limits.seconds(10, {"bfloat16": 4, "int8": 16}) == 1 + 2


@pytest.fixture
def tiny(
    benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the program on a tiny model, small limits, and a cache of 420 tokens; its report."""
    limits, ops = benchmark_module("_cpu_limits"), benchmark_module("_cpu_ops")
    for name, value in (("_READ_BYTES", 4096), ("_SIZE", 64), ("_ROWS", 16), ("_REPEATS", 1)):
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(ops, "_EVICTING_BYTES", 4096)
    shapes = benchmark_module("_decode_shapes")
    target, draft = shapes.write_configs(tmp_path, shapes.SHAPES["tiny"], 512)
    path = tmp_path / "report.json"
    argv = ["--model", str(target), "--draft-model", str(draft), "--load-format", "dummy"]
    argv += ["--dtype", "float32", "--num-threads", "1", "--steps", "1"]
    argv += ["--prefill-tokens", "32", "--kv-cache-memory", str(2 * 2 * 2 * 16 * 4 * 420)]

    def run(*more: str) -> dict[str, Any]:
        program = benchmark_module("cpu_roofline")
        assert program.main([*argv, *more, "--output-json", str(path)]) == 0
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    return run


def test_growth(
    benchmark_module: Module,
    tiny: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Steps by sequences and context and nothing else, in a picture with those of a report."""
    program = benchmark_module("cpu_roofline")
    monkeypatch.setattr(program, "_GROWING_BATCHES", [1, 2])
    monkeypatch.setattr(program, "_GROWING_CONTEXTS", [20, 40, 1000])
    report = tiny("--growth", "--contexts", "40")
    assert report["left_out"] == []
    steps = [(r["what"], r["batch"], r["context"], r["k"]) for r in report["steps"]]
    assert steps == [("decode", n, context, 0) for context in (20, 40) for n in (1, 2)]
    assert report["ops"] == []
    for row in report["steps"]:
        assert row["least_seconds"] <= row["seconds"] <= row["most_seconds"]
    other, plot = tmp_path / "other.json", tmp_path / "plot.png"
    other.write_text(json.dumps(report))
    drawn: list[list[dict[str, Any]]] = []
    draw = program.plot_steps
    monkeypatch.setattr(program, "plot_steps", lambda r, path: (drawn.append(r), draw(r, path)))
    tiny("--growth", "--contexts", "20", "--plot", str(plot), "--plot-with", str(other))
    assert [len(r["steps"]) for r in drawn[0]] == [4, 2]
    assert plot.stat().st_size > 0
    for wrong in (["--plot", "a.png"], ["--growth", "--plot-with", "a.json"]):
        with pytest.raises(SystemExit):
            program.parse_args(wrong)
    assert "--plot-with needs --plot FILE" in capsys.readouterr().err


def test_a_rehearsal(tiny: Callable[..., dict[str, Any]]) -> None:
    report = tiny("--batch-sizes", "2", "--contexts", "40", "200")
    steps = [(r["what"], r["batch"], r["context"], r["k"]) for r in report["steps"]]
    assert steps == [("decode", 2, 40, 0), ("prefill", 1, 32, 0), ("decode", 2, 40, 3)]
    assert "batch 2 at 200 tokens, k=0: the cache is too small" in report["left_out"]
    found = {(r["step"], r["op"]): r for r in report["ops"]}
    down = found["decode, batch 2", "mlp.down_proj"]
    assert down["calls"] == 2
    assert down["bytes"] == 2 * 4 * (64 * 128 + 2 * 128 + 2 * 64)
    assert down["operations"] == {"float32": 2 * 2 * 2 * 64 * 128}
    # Both sequences have the prompt, its first successor and the warm-up behind them.
    attention = found["decode, batch 2", "self_attn.attn"]
    cached = attention["operations"]["float32"] / (2 * 4 * 2 * 64)
    assert 40 < cached <= 47
    ends = 2 * 2 * (4 * (64 + 32 + 32 + 64) + 8)  # and a position
    assert attention["bytes"] == 2 * 2 * cached * 2 * 2 * 16 * 4 + ends
    prefill = found["prefill of 32", "self_attn.attn"]
    assert prefill["operations"]["float32"] == 2 * 4 * (32 * 33 / 2) * 64
    assert found["decode, batch 2", "output head"]["operations"] == {"float32": 2 * 2 * 64 * 128}
    for row in report["steps"]:
        least = max(
            row["bytes"] / max(report["limits"]["bandwidth"].values()),
            row["operations"]["float32"]
            / max(report["limits"]["ours"]["float32"], report["limits"]["torchs"]["float32"]),
        )
        assert row["of_roofline"] == pytest.approx(least / row["seconds"])
