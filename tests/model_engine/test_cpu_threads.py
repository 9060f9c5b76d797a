"""The number of threads follows the processors that other programs leave free."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from atom.config import EngineConfig, ModelOptions, ParallelOptions
from atom.model_engine import cpu_threads
from atom.model_engine.cpu_threads import AdaptedThreads, ThreadChoice
from atom.model_engine.worker import Worker
from atom.platform import busy_cpu_seconds, default_num_threads


def run(choice: ThreadChoice, others: float, windows: int, cpus: int) -> int:
    """Simulated windows of a second beside programs that could use `others` processors."""
    for _ in range(windows):
        wanted = choice.num_threads + others
        share = min(1.0, cpus / wanted)  # processors are shared fairly
        choice.observe(1.0, 1.0, min(wanted, cpus), choice.num_threads * share)
    return choice.num_threads


@pytest.mark.parametrize(
    ("cpus", "others", "threads"),
    [
        (2, 0.0, 2),
        (2, 0.2, 2),
        (2, 1.0, 1),
        (2, 2.0, 1),
        (2, 3.0, 2),  # no processor is free: two threads get two shares
        (2, 50.0, 2),
        (4, 8.0, 4),
        (16, 12.0, 5),
        (4, 2.0, 2),
        (8, 1.0, 7),
        (64, 3.0, 61),
        (1, 1.0, 1),
    ],
)
def test_beside_other_programs(cpus: int, others: float, threads: int) -> None:
    assert run(ThreadChoice(cpus), others, 10, cpus) == threads


def test_one_window_is_enough_to_step_back_and_two_to_return() -> None:
    choice = ThreadChoice(2)
    assert run(choice, 1.0, 1, 2) == 1
    assert run(choice, 0.0, 1, 2) == 1
    assert run(choice, 0.0, 1, 2) == 2
    run(choice, 1.0, 1, 2)
    for _ in range(5):  # free in every other window only
        assert run(choice, 0.0, 1, 2) == 1
        assert run(choice, 1.0, 1, 2) == 1


def test_half_a_processor_does_not_change_the_number_again_and_again() -> None:
    for start in (1, 2):
        choice = ThreadChoice(2)
        if start == 1:
            run(choice, 1.0, 1, 2)
        seen = {run(choice, 0.4, 1, 2) for _ in range(10)}
        assert seen == {start}


def test_own_work_is_not_anybody_elses() -> None:
    choice = ThreadChoice(2)
    choice.observe(1.0, 1.0, busy=2.0, own=2.0)
    choice.observe(1.0, 1.0, busy=0.5, own=0.6)  # clocks differ by rounding
    assert choice.num_threads == 2


def test_processor_times_are_measured() -> None:
    busy, started = busy_cpu_seconds(), time.process_time()
    while time.process_time() - started < 0.3:
        pass
    assert busy_cpu_seconds() - busy > 0.2


def test_torch_gets_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    clock = iter([(0.0, 0.0, 0.0), (1.0, 2.0, 1.3), (2.0, 3.0, 2.3), (3.0, 4.0, 3.3)])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpu_threads, "default_num_threads", lambda: 2)
    monkeypatch.setattr(AdaptedThreads, "_now", staticmethod(lambda: next(clock)))
    monkeypatch.setattr(cpu_threads.time, "perf_counter", lambda: 100.0)
    try:
        threads = AdaptedThreads()
        assert torch.get_num_threads() == 2
        seen = []
        for _ in range(3):
            threads.step_ended(1.0)
            seen.append(torch.get_num_threads())
        assert seen == [1, 1, 2]
    finally:
        torch.set_num_threads(before)


def test_fewer_threads_than_processors_leave_room_for_others() -> None:
    choice = ThreadChoice(16, 4)
    for _ in range(4):
        choice.observe(1.0, 1.0, 12.0, 4.0)  # others use 8 of the 12 that are left
    assert choice.num_threads == 4
    for _ in range(4):
        choice.observe(1.0, 1.0, 16.0, 3.0)
    assert choice.num_threads == 3


@pytest.mark.parametrize(
    ("variable", "most"), [("1", 1), ("2,4", 2), ("9", 3), ("0", 1), ("many", 3), ("", 3)]
)
def test_the_variable_of_openmp_bounds_the_number(
    variable: str,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(cpu_threads, "default_num_threads", lambda: 3)
    try:
        with caplog.at_level("INFO", "atom"):
            AdaptedThreads()
        assert torch.get_num_threads() == most
        assert ("OMP_NUM_THREADS" in caplog.text) == (most < 3)
    finally:
        torch.set_num_threads(before)


def test_a_stated_number_is_never_changed(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the user said how many")

    monkeypatch.setattr(AdaptedThreads, "__init__", fail)
    before = torch.get_num_threads()
    try:
        config = EngineConfig(
            model=ModelOptions(str(tiny_llama_dir)), parallel=ParallelOptions(num_threads=3)
        )
        executor = Worker(config)
        assert torch.get_num_threads() == 3
        executor.shutdown()
    finally:
        torch.set_num_threads(before)


def test_busy_programs_are_seen() -> None:
    spin = "print(flush=True)\nwhile True: pass"
    count = default_num_threads()
    command = [sys.executable, "-c", spin]
    spinners = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for spinner in spinners:
            assert spinner.stdout is not None
            assert spinner.stdout.readline()
        choice = ThreadChoice(count)
        started, busy, own = AdaptedThreads._now()
        time.sleep(1.0)
        now = AdaptedThreads._now()
        choice.observe(now[0] - started, 0.0, now[1] - busy, now[2] - own)
        assert choice.num_threads == 1
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.communicate()


def test_an_idle_engine_is_not_a_starved_one() -> None:
    choice = ThreadChoice(2)
    choice.observe(1.0, 0.01, busy=1.02, own=0.02)
    assert choice.num_threads == 1
