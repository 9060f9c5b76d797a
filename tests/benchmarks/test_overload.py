"""The benchmark of goodput under overload, shortly: that it counts what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_goodput_is_counted(benchmark_module: Callable[[str], Any], tmp_path: Path) -> None:
    """How much it is depends on who else uses the machine."""
    overload = benchmark_module("overload")
    run = ["--tiny", "--running", "2", "--waiting", "1", "--seconds", "1", "--rounds", "1"]
    run += ["--max-tokens", "12"]
    overload.main([*run, "--least", "0", "--output", str(tmp_path / "report.md")])
    report = json.loads((tmp_path / "report.json").read_text())
    (calm,), (busy,) = report["turns"]["at capacity"], report["turns"]["overload"]
    assert busy["rate"] == 10 * calm["rate"] == 10 * report["capacity"]
    assert calm["results"]["in time"] > 0
    assert busy["results"]["429"] == len(busy["retry_after"]) > 0
    assert min(busy["retry_after"]) >= 1
    assert report["goodput"]["overload"] == busy["results"].get("in time", 0) / busy["seconds"]
    assert "Goodput under overload is" in (tmp_path / "report.md").read_text()
