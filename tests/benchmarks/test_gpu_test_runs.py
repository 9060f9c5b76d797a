"""Tests that a run on a GPU takes along: which they are, and how a later run goes on with them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Module = Callable[[str], Any]

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")

# Its fourth test is stopped in any run, unless a file says otherwise.
_LONG_FILE = """
import os, pathlib, signal
import pytest

RAN = pathlib.Path(os.environ["RAN"])

def ran(name):
    with RAN.open("a") as file:
        file.write(name + " ")

@pytest.mark.parametrize("n", [0, 1])
def test_a(n):
    ran(f"a{n}")
    assert n == 0

class TestB:
    def test_b(self):
        pytest.skip("no reason")

def test_stuck():
    ran("stuck")
    if not RAN.with_name("is quick").exists():
        os.kill(os.getpid(), signal.SIGKILL)

def test_last():
    ran("last")
"""


def write_long_file(path: Path, tests: Any, patch: pytest.MonkeyPatch) -> None:
    """A file of tests in which no run of `tests` comes to the end."""
    path.write_text(_LONG_FILE)
    patch.setenv("RAN", str(path.parent / "ran"))
    run = tests.run

    def out_of_time(*args: Any, **options: Any) -> tuple[int | None, str]:
        status, printed = run(*args, **options)
        return None if status == -signal.SIGKILL else status, printed

    patch.setattr(tests, "run", out_of_time)


def test_which_files_have_something_to_show(benchmark_module: Module) -> None:
    tests = benchmark_module("_gpu_tests")
    marked = [path.name for path in tests.marked_files()]
    adapters = {
        f"test_aiter{what}.py"
        for what in (
            "",
            "_linear",
            "_mla",
            "_mla_8_bits",
            "_mla_prefill",
            "_moe",
            "_quant",
            "_quant_experts",
        )
    }
    assert {"test_graphs_on_gpu.py", "test_flash_mla.py", *adapters} <= set(marked)
    of_all = {"test_every_implementation.py"}
    assert {path.name for path in tests.aiter_files()} == adapters | of_all
    kernels = {path.name for path in tests.kernel_files()}
    assert {"test_triton_attention.py", "test_every_implementation.py"} <= kernels
    assert not any("aot" in name for name in kernels)


@without_gpu
def test_skipped_tests_are_no_success(benchmark_module: Module, tmp_path: Path) -> None:
    tests = benchmark_module("_gpu_tests")
    files = [path for path in tests.marked_files() if "capturable" in path.name]
    part = tests.run_tests(files, 200, tmp_path, marked=True)
    assert {test["outcome"] for test in part["tests"]} == {"skipped"}
    assert not part["passed"]
    assert part["status"] == 0


def test_several_files_side_by_side(
    benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = benchmark_module("_gpu_tests")
    monkeypatch.setattr(tests, "is_installed", lambda name: name != "hypothesis")
    bodies = {"good": "pass", "bad": "assert 1 == 2", "lacking": "from hypothesis import given"}
    for name, body in bodies.items():
        (tmp_path / f"test_{name}.py").write_text(f"def test_{name}(): {body}\n")
    files = sorted(tmp_path.glob("test_*.py"))
    part = tests.run_tests(files, 200, tmp_path, marked=False, processes=2)
    assert [test["outcome"] for test in part["tests"]] == ["failure", "passed"]
    assert (part["passed"], part["status"]) == (False, 1)
    assert part["left_out"] == ["test_lacking.py (needs hypothesis)"]
    assert "assert 1 == 2" in part["output"]


def test_out_of_time(benchmark_module: Module, tmp_path: Path) -> None:
    part = benchmark_module("_gpu_tests").run_tests(
        [Path("test_a.py"), Path("test_b.py")], 0, tmp_path, marked=False
    )
    assert part["left_out"] == ["test_a.py", "test_b.py"]
    assert (part["passed"], part["status"]) == (False, None)


def test_a_later_run_goes_on_with_the_files_that_are_left(
    benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was stopped comes first; those that ended are not run again."""
    tests = benchmark_module("_gpu_tests")
    files = [tmp_path / f"test_{name}.py" for name in "abcd"]
    ran: list[str] = []
    ends = {"test_b.py": 1, "test_c.py": None}
    kept: list[dict[str, Any]] = []
    clock = [0.0]

    def run(command: list[str], *_: object, **__: object) -> tuple[int | None, str]:
        name = Path(command[-1]).name
        ran.append(name)
        clock[0] += 40
        return ends.get(name, 0), f"output of {name}"

    monkeypatch.setattr(tests, "run", run)
    monkeypatch.setattr(tests, "_can_import", lambda _: True)
    monkeypatch.setattr(tests.time, "perf_counter", lambda: clock[0])
    first = tests.run_tests(files, 120, tmp_path, False, keep=kept.append)
    assert ran == ["test_a.py", "test_b.py", "test_c.py"]
    assert first["unfinished"] == first["left_out"] == ["test_c.py", "test_d.py"]
    assert (first["passed"], first["status"]) == (False, 1)
    assert [len(found["unfinished"]) for found in kept] == [4, 3, 2, 2]
    ends["test_c.py"] = 0
    earlier = json.loads(json.dumps(first))
    files.append(tmp_path / "test_e.py")
    second = tests.run_tests(files, 80, tmp_path, False, earlier=earlier)
    assert ran[3:] == ["test_c.py", "test_d.py"]
    third = tests.run_tests(files, 80, tmp_path, False, earlier=second)
    assert ran[5:] == ["test_e.py"]
    assert third["unfinished"] == []
    assert third["status"] == 1
    assert third["output"] == "output of test_b.py"


def test_a_file_that_no_run_has_time_for_fails(
    benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = benchmark_module("_gpu_tests")
    monkeypatch.setattr(tests, "run", lambda *_, **__: (None, "stuck"))
    file = tmp_path / "test_a.py"
    stopped = tests.run_tests([file], 50, tmp_path, False, most=90)
    assert (stopped["status"], stopped["unfinished"]) == (None, ["test_a.py"])
    failed = tests.run_tests([file], 100, tmp_path, False, earlier=stopped, most=90)
    assert (failed["status"], failed["unfinished"]) == (tests.TOO_LONG, [])
    assert failed["left_out"] == ["test_a.py"]
    assert "no test ended in 100 s, and no run has more time" in failed["output"]


def test_a_later_run_goes_on_with_the_tests_that_are_left(
    benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file that no run has time for as a whole; also without what the first run wrote."""
    tests, file = benchmark_module("_gpu_tests"), tmp_path / "test_long.py"
    folder = tmp_path / "ended"
    write_long_file(file, tests, monkeypatch)

    def turn(earlier: Any = None) -> Any:
        part = tests.run_tests([file], 200, folder, False, earlier=earlier, most=0)
        return json.loads(json.dumps(part))

    first = turn()
    assert (first["status"], first["unfinished"]) == (None, ["test_long.py"])
    ended = {test["name"].partition("::")[2]: test["outcome"] for test in first["tests"]}
    assert ended == {"test_a[0]": "passed", "test_a[1]": "failure", "TestB::test_b": "skipped"}
    (folder / "test_long.ended").unlink()
    (tmp_path / "ran").write_text("")
    (tmp_path / "is quick").touch()
    last = turn(first)
    assert (tmp_path / "ran").read_text().split() == ["stuck", "last"]
    assert [test["outcome"] for test in last["tests"]] == [*ended.values(), "passed", "passed"]
    assert (last["status"], last["unfinished"], last["passed"]) == (1, [], False)
    assert "failed in an earlier run: " in last["output"]
    assert "test_long.py::test_a[1]: assert 1 == 0" in last["output"]
    assert [test["message"] for test in last["tests"]][2] == "no reason"


def test_a_test_that_no_run_has_time_for_fails(
    benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is stopped with all the time there is, and no other test is before it."""
    tests, file = benchmark_module("_gpu_tests"), tmp_path / "test_long.py"
    write_long_file(file, tests, monkeypatch)
    part, statuses = None, []
    for _ in range(2):
        part = tests.run_tests([file], 200, tmp_path, False, earlier=part, most=0)
        statuses.append(part["status"])
    assert statuses == [None, tests.TOO_LONG]
    assert len(part["tests"]) == 3


def test_a_file_whose_tests_have_all_ended(benchmark_module: Module, tmp_path: Path) -> None:
    """It was stopped before its end."""
    tests = benchmark_module("_gpu_tests")
    file = tmp_path / "test_a.py"
    file.write_text("def test_a(): pass\n")
    first = tests.run_tests([file], 200, tmp_path, False)
    stopped = {"files": [{**first["files"][0], "status": None}]}
    part = tests.run_tests([file], 200, tmp_path, False, earlier=stopped)
    assert (part["status"], part["passed"], part["tests"]) == (0, True, first["tests"])
    assert "1 deselected" in part["log"]


def test_what_an_older_run_wrote_does_not_count(benchmark_module: Module, tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("def test_a(): pass\n")
    tests = benchmark_module("_gpu_tests")
    for _ in range(2):
        part = tests.run_tests([file], 200, tmp_path, False)
        assert [test["outcome"] for test in part["tests"]] == ["passed"]
        assert "1 passed" in part["log"]
