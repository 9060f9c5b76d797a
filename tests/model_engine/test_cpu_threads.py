"""Torch's threads follow the processors that other programs leave free; C++ kernels take all."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atom.config import EngineConfig, ModelOptions, ParallelOptions
from atom.distributed.parallel_state import ALONE
from atom.model_engine.start_up import cpu_threads
from atom.model_engine.start_up.cpu_threads import (
    AdaptedThreads,
    ThreadChoice,
    take_threads,
    waited_seconds,
)
from atom.model_engine.worker import Worker
from atom.platform import cpu_platform
from atom.processors import default_num_threads


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("most", "lost", "number"),
    [(2, 0.0, 2), (2, 0.4, 2), (2, 0.7, 1), (2, 3.0, 1), (8, 1.2, 7), (8, 3.1, 5), (1, 0.9, 1)],
)
def test_one_window_is_enough_to_step_back(most: int, lost: float, number: int) -> None:
    choice = ThreadChoice(most)
    choice.observe(0.1, 0.1 * lost)
    assert choice.num_threads == number


def test_all_are_tried_again_after_pauses_that_grow() -> None:
    choice = ThreadChoice(2)
    tries = []
    for window in range(200):
        if choice.num_threads == 2:
            tries.append(window)
        choice.observe(0.125, 0.1 if choice.num_threads == 2 else 0.06)
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == [5, 9, 17, 33, 65, 65]
    choice = ThreadChoice(2)
    seen = set()
    for window in range(40):  # the neighbour ends
        choice.observe(0.1, 0.07 if window < 3 else 0.0)
        seen.add(choice.num_threads)
    assert seen == {1, 2}
    assert choice.num_threads == 2
    choice.observe(0.1, 0.07)
    choice.begin()
    assert choice.num_threads == 2


def test_torch_gets_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = 0.0, 0.0
    monkeypatch.setattr(cpu_threads, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(cpu_threads, "waited_seconds", lambda: waited)
    torch.set_num_threads(2)
    threads = AdaptedThreads(2)

    def step(seconds: float, lost: float, idle: float = 0.0) -> int:
        nonlocal now, waited
        now, waited = now + idle + seconds, waited + lost
        threads.step_ended(seconds)
        return torch.get_num_threads()

    assert [step(0.06, 0.04) for _ in range(2)] == [2, 1]
    assert step(0.06, 0.0, idle=2.0) == 2  # a request after a rest begins with all
    # What others did while the engine was at rest counts for nothing.
    assert step(0.12, 0.0, idle=0.9) == 2


def test_waiting_is_measured() -> None:
    """Beside more programs than there are processors."""
    if not list(Path("/proc/self/task").glob("*/schedstat")):
        assert waited_seconds() == 0
        pytest.skip("the system does not count what threads wait")
    program = """
import os, sys, time
from atom.model_engine.start_up.cpu_threads import waited_seconds
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        os.write(1, f"{waited_seconds()}\\n".encode())
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""
    count = 2 * default_num_threads()
    command = [sys.executable, "-c", program, str(count)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    waited = [float(line) for line in said.splitlines()]
    assert len(waited) == count
    # Together they need twice what the processors have.
    assert max(waited) > 0.05


@pytest.mark.parametrize(
    ("variable", "most"), [("1", 1), ("2,4", 2), ("9", 3), ("0", 1), ("many", 3), ("", 3)]
)
def test_the_variable_of_openmp_bounds_the_number(
    variable: str, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(cpu_threads, "default_num_threads", lambda: 3)
    with caplog.at_level("INFO", "atom"):
        take_threads(ParallelOptions(), ALONE, cpu_platform())
    assert torch.get_num_threads() == most
    assert ("OMP_NUM_THREADS" in caplog.text) == (most < 3)


@pytest.mark.parametrize("library", [None, object()])
def test_only_torchs_operations_are_adapted(
    library: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = SimpleNamespace(library=library)
    monkeypatch.setattr(cpu_threads, "native_build", lambda: build)
    threads = take_threads(ParallelOptions(), ALONE, cpu_platform())
    assert isinstance(threads, AdaptedThreads) == (library is None)


def test_a_stated_number_is_never_changed(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the user said how many")

    monkeypatch.setattr(AdaptedThreads, "__init__", fail)
    config = EngineConfig(
        model=ModelOptions(str(tiny_llama_dir)), parallel=ParallelOptions(num_threads=3)
    )
    executor = Worker(config)
    assert torch.get_num_threads() == 3
    executor.shutdown()
