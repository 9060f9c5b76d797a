"""Sums over ranks and layers split over them: a rehearsal on a CPU, and what wrong sums become."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from atom.distributed.parallel_state import ParallelGroup
from atom.platform import Platform, cpu_platform

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Module = Callable[[str], Any]

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def test_a_rehearsal(tmp_path: Path) -> None:
    """Two processes over gloo."""
    path = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARKS / "several_gpus.py"), "--device", "cpu", "--tiny"]
    command += ["--dtype", "float32", "--output-json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(path.read_text())
    rows = [(row["op"], row["implementation"], row["rows"]) for row in report["results"]]
    ops = ("all_reduce", "all_reduce_add_rms_norm", "layer")
    assert rows == [(op, "torch", n) for op in ops for n in (1, 3)]
    assert (report["ranks"], report["faults"], report["left_out"]) == (2, [], [])
    assert all(row["seconds"] > 0 for row in report["results"])
    assert done.stdout.count("| layer | torch |") == 2


def test_time_that_does_not_suffice(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARKS / "several_gpus.py"), "--device", "cpu", "--tiny"]
    command += ["--seconds", "0", "--output-json", str(path)]
    subprocess.run(command, capture_output=True, check=True)
    report = json.loads(path.read_text())
    assert report["results"] == []
    assert {row["why"] for row in report["left_out"]} == {"out of time"}


@without_gpu
def test_without_gpus_it_says_so(
    benchmark_module: Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = benchmark_module("several_gpus")
    assert ranks.main([]) == 2
    assert "no CUDA or ROCm device" in capsys.readouterr().err
    monkeypatch.setattr(ranks, "chosen_platform", lambda *_: Platform("cuda", "sm90", True))
    monkeypatch.setattr(ranks, "num_gpus", lambda: 1)
    assert ranks.main([]) == 2
    assert "there is 1" in capsys.readouterr().err
    assert [ranks.most_ranks(n) for n in (0, 1, 2, 3, 4, 7, 8, 16)] == [1, 1, 2, 2, 4, 4, 8, 8]


@pytest.mark.parametrize("op", ["all_reduce", "all_reduce_add_rms_norm"])
@pytest.mark.parametrize("is_right", [True, False])
def test_sums_are_checked(benchmark_module: Module, op: str, is_right: bool) -> None:
    loads = benchmark_module("_rank_loads")

    def check(group: ParallelGroup) -> bool:
        setup = loads.RankSetup(cpu_platform(), group, torch.bfloat16, "tiny-kimi-whole", 9)
        sums = loads.Sum(setup, op, "torch")
        if not is_right:
            right = sums._function
            sums._function = lambda partial, *rest: right(partial * 2, *rest)
        return bool(sums.is_right(3))

    assert run_ranks(2, check) == [is_right, is_right]
