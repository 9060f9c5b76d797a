"""How many processors there are, in containers, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom import processors
from atom.model_loader import ahead
from atom.processors import cpus_by_core, default_num_threads


def version_1(quota: str, period: str = "100000", folder: str = "cpu") -> dict[str, str]:
    """Files below /sys/fs/cgroup."""
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 5),
        ({"cpu.max": "max 100000"}, 5),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "900000 100000"}, 5),
        ({"cpu.max": ""}, 5),
        (version_1("-1"), 5),
        (version_1("150000"), 2),
        (version_1("30000", "20000"), 2),
        (version_1("150000", folder="cpu,cpuacct"), 2),
        (version_1("150000", "0"), 5),
        (version_1("150000", ""), 5),
        ({"cpu.max": "max 100000"} | version_1("150000"), 2),
    ],
)
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes keep to none")
def test_a_quota_and_a_set_of_processors_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], count: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(processors, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 5, 7})
    assert default_num_threads() == count
    assert (cpus_by_core() == []) == (count < 5)


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 1), (5, 4)])
def test_what_is_hashed_ahead_leaves_one_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, threads: int
) -> None:
    given = []
    monkeypatch.setattr(ahead, "hash_ahead", lambda _, __, number: given.append(number))
    monkeypatch.setattr(ahead, "default_num_threads", lambda: count)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    ahead.begin_files([tmp_path / "model.gguf"])
    assert given == [threads]


def test_they_are_counted_before_torch_is_imported() -> None:
    program = "import sys, atom.model_loader.ahead; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
