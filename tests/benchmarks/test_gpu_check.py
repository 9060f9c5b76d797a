"""The report that every run on a GPU adds to: its parts, goals, and what is missing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import is_gone, wait_until
from test_gpu import KERNEL_ROW

ROOT = Path(__file__).parents[2]
Module = Callable[[str], Any]

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")

TRACE = {
    "steps": 7, "step_us": 5000.0, "busy_us": 4700.0, "gap_us": 150.0, "longest_gap_us": 200.0,
    "launches": 330.0, "layers": 32,
    "kernels": [
        {"kernel": "_attend", "class": "attention", "calls": 32.0, "us": 900.0, "share": 0.19}
    ],
    "classes": [
        {"class": "attention", "calls": 32.0, "us": 900.0, "share": 0.19, "bytes": 1.8e9,
         "bytes_per_s": 2e12}
    ],
}  # fmt: skip
STEP_ROW = {
    "shape": "8b", "by": "atom", "k": 0, "mode": "graph", "batch": 1, "context": 1024,
    "seconds": 5e-3, "tokens": 1.0, "bytes": 16e9, "device_seconds": 4.7e-3, "overlapped": True,
    "host_seconds": 1e-4, "gap_seconds": 1.5e-4, "replayed": 1.0, "bytes_per_s": 3.2e12,
    "of_copy": 0.8, "tokens_per_s": 200.0, "trace": TRACE,
}  # fmt: skip
START_ROW = {
    "shape": "kimi", "by": "atom", "k": 3, "seconds": 75.0, "graphs": 42, "capture_seconds": 30.0,
    "compiled": 12, "layers": 5,
}  # fmt: skip


SUM_ROW = {
    "op": "all_reduce_add_rms_norm", "implementation": "aiter", "size": 7168, "rows": 1,
    "seconds": 1.5e-5,
}  # fmt: skip


def finished(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    report = {
        "copy_bytes_per_s": 4e12,
        "product_per_s": 8e14,
        "results": list(rows),
        "left_out": [],
        "faults": [],
    }
    report |= {"ops": {}, "starts": [], "warmed": [], "ranks": 8, **more}
    return {"passed": True, "status": 0, "seconds": 2.0, "output": "noise", "report": report}


def of_tests(**outcomes: str) -> dict[str, Any]:
    tests = [
        {"name": name, "outcome": outcome, "seconds": 1.0, "message": f"why {name}\nmore"}
        for name, outcome in outcomes.items()
    ]
    failed = "failure" in outcomes.values()
    return {
        "passed": not failed, "status": int(failed), "seconds": 3.0, "output": "1 failed",
        "tests": tests, "left_out": ["test_slow.py"],
    }  # fmt: skip


def report_of(**parts: Any) -> dict[str, Any]:
    gpu = {"device": "GPU 9000", "hip": None, "devices": 8}
    return {"environment": {"torch": "2"}, "gpu": gpu, "parts": parts}


class TestRun:
    def test_what_takes_too_long_is_ended_with_its_children(
        self, benchmark_module: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        child = tmp_path / "child"
        program = (
            "import pathlib, subprocess, sys, time; print('begun', flush=True); "
            "print('told', file=sys.stderr, flush=True); "
            "process = subprocess.Popen(['sleep', '600']); "
            f"pathlib.Path({str(child)!r}).write_text(str(process.pid)); time.sleep(600)"
        )
        run = benchmark_module("_gpu_run").run
        status, printed = run([sys.executable, "-c", program], 5, shows=True)
        assert status is None
        assert printed == "begun\ntold\n"
        assert capsys.readouterr().err == "  told\n"
        wait_until(lambda: is_gone(int(child.read_text())))

    def test_the_exit_status(self, benchmark_module: Module) -> None:
        run = benchmark_module("_gpu_run").run
        assert run([sys.executable, "-c", "print('x'); exit(3)"], 20, keeps=1) == (3, "\n")

    def test_a_benchmark_is_run_within_its_time(
        self, benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parts = benchmark_module("_gpu_parts")
        commands: list[list[str]] = []

        def run(command: list[str], seconds: float, shows: bool) -> tuple[int | None, str]:
            commands.append(command)
            assert shows
            Path(command[-1]).write_text('{"results": []}')
            return (None, "stuck") if seconds < 50 else (0, "")

        monkeypatch.setattr(parts, "run", run)
        turn = parts.Turn("steps", 60, tmp_path, ("8b",), False)
        part = parts.PARTS["steps"].run(turn)
        assert (part["passed"], part["report"]) == (True, {"results": []})
        shown = ["--shapes", "8b", "--seconds", "45", "--output-json", str(tmp_path / "steps.json")]
        assert commands[0][2:] == shown
        stopped = parts.run_benchmark("kernels", turn, 40)
        assert (stopped["passed"], stopped["status"]) == (False, None)
        assert stopped["report"] == {"results": []}

    def test_modules_that_aiter_builds(
        self, benchmark_module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As its log says; tests that fail are not this part's."""
        parts = benchmark_module("_gpu_parts")
        log = "[aiter] start build [module_moe]\n[aiter] \033[32mfinish build [module_norm], cost "
        log += "7.5s \033[0m\nfinish build [module_moe], cost 57.80000000s\n"
        given: dict[str, Any] = {}

        def tests(files: list[Path], *_: object, **options: object) -> dict[str, Any]:
            given.update(options, files=files)
            about = {"status": 1, "output": "", "left_out": [], "files": [], "unfinished": []}
            return {**about, "log": log}

        monkeypatch.setattr(parts, "run_tests", tests)
        compiled = finished() | {"passed": True}
        monkeypatch.setattr(parts, "run_benchmark", lambda *_: compiled)
        turn = parts.Turn("warm", 300, tmp_path, (), True)
        part = parts.PARTS["warm"].run(turn)
        assert part["modules"] == [
            {"module": "module_moe", "seconds": 57.8},
            {"module": "module_norm", "seconds": 7.5},
        ]
        assert part["passed"]
        later = parts.PARTS["warm"].run(dataclasses.replace(turn, earlier=part))
        assert [row["seconds"] for row in later["modules"]] == [57.8, 7.5]
        assert given["earlier"] == part
        assert (given["seconds_of_a_test"], given["options"]) == (0, ["-s"])  # builds take minutes


class TestCheck:
    """The bookkeeping: parts are stand-ins that take no time."""

    @pytest.fixture
    def check(self, benchmark_module: Module, monkeypatch: pytest.MonkeyPatch) -> Any:
        check = benchmark_module("gpu_check")
        ran: list[tuple[str, float]] = []

        def part(turn: Any) -> dict[str, Any]:
            ran.append((turn.name, turn.seconds))
            return {
                **of_tests(a="passed"),
                "status": check.outcomes.get(turn.name, 0),
                "log": "long",
            }

        parts = {n: dataclasses.replace(p, run=part, memory=0) for n, p in check.PARTS.items()}
        monkeypatch.setattr(check, "PARTS", parts)
        monkeypatch.setattr(check, "missing_of", lambda name: [])
        monkeypatch.setattr(check, "outcomes", {}, raising=False)
        monkeypatch.setattr(check, "ran", ran, raising=False)
        return check

    def run(self, check: Any, path: Path, *argv: str, **parts: Any) -> tuple[list[str], Any]:
        args = check.parse_args(list(argv))
        report = {**report_of(**parts), "key": {"code": "1"}}
        session = check.Check(args, path, report, 80.0)
        return session.run(), json.loads(path.with_suffix(".json").read_text())

    def test_parts_run_while_there_is_time(self, check: Any, tmp_path: Path) -> None:
        path = tmp_path / "report.md"
        remaining, report = self.run(check, path, "--minutes", "1.5")
        assert [name for name, _ in check.ran] == [
            "warm", "graphs", "kernel-tests", "kernels", "other-kernels", "kimi", "start",
            "ranks",
        ]  # fmt: skip
        assert remaining == ["steps"]
        assert max(seconds for _, seconds in check.ran) < 87
        assert "log" not in report["parts"]["warm"]
        assert "Not run yet: steps." in path.read_text()

    def test_a_later_run_adds_what_remains(
        self, check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        there = {"warm": of_tests(a="passed"), "graphs": {**of_tests(a="passed"), "status": None}}
        remaining, report = self.run(check, tmp_path / "report.md", **there)
        assert remaining == []
        assert [name for name, _ in check.ran] == [n for n in check.PARTS if n != "warm"]
        assert set(report["parts"]) == set(check.PARTS)
        told = capsys.readouterr().err
        assert "[1/8] graphs: passed, " in told
        assert "[8/8] ranks: passed, " in told

    def test_what_a_part_kept_is_there_when_it_is_cut_off(
        self, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A failure that it knows of, too, is no end of it."""
        path = tmp_path / "report.md"
        begun = {**of_tests(a="failure"), "unfinished": ["test_b.py"], "files": [{"file": "a"}]}
        given: list[Any] = []

        def part(turn: Any) -> dict[str, Any]:
            given.append(turn.earlier)
            turn.keep({**begun, "log": "long"})
            if len(given) == 1:
                raise KeyboardInterrupt
            return of_tests(a="failure")

        parts = check.PARTS
        tests = dataclasses.replace(parts["kernel-tests"], run=part)
        monkeypatch.setattr(check, "PARTS", {**parts, "kernel-tests": tests})
        args = ["--parts", "kernel-tests"]
        with pytest.raises(KeyboardInterrupt):
            self.run(check, path, *args)
        there = json.loads(path.with_suffix(".json").read_text())["parts"]
        assert there["kernel-tests"]["files"] == [{"file": "a"}]
        assert "| kernel-tests | failed (exit status 1), out of time |" in path.read_text()
        remaining, report = self.run(check, path, *args, **there)
        assert [earlier and earlier["files"] for earlier in given] == [None, [{"file": "a"}]]
        assert remaining == []
        assert report["parts"]["kernel-tests"]["seconds"] >= there["kernel-tests"]["seconds"]

    def test_parts_that_are_asked_for_run_again(self, check: Any, tmp_path: Path) -> None:
        there = {"warm": of_tests(a="passed"), "start": of_tests(a="failure")}
        remaining, report = self.run(check, tmp_path / "r.md", "--parts", "start", **there)
        assert [name for name, _ in check.ran] == ["start"]
        assert remaining == []
        assert set(report["parts"]) == {"warm", "start"}
        assert report["parts"]["start"]["passed"]

    def test_every_part_ends_within_nine_minutes(self, benchmark_module: Module) -> None:
        parts = benchmark_module("_gpu_parts").PARTS
        assert max(part.most for part in parts.values()) <= 8.8 * 60
        assert all(part.least < part.most for part in parts.values())
        assert set(parts) == set(benchmark_module("_gpu_needs").NEEDS)

    def test_what_lacks_is_left_out(
        self, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lacking = {"steps": ["msgspec"]}
        monkeypatch.setattr(check, "missing_of", lambda name: lacking.get(name, []))
        path = tmp_path / "report.md"
        self.run(check, path)
        assert "steps" not in [name for name, _ in check.ran]
        assert "| steps | left out | it needs msgspec |" in path.read_text()

    def test_one_gpu_is_too_few_for_ranks(self, check: Any, tmp_path: Path) -> None:
        path = tmp_path / "report.md"
        report = report_of()
        report["gpu"]["devices"] = 1
        session = check.Check(check.parse_args(["--parts", "ranks"]), path, report, 80.0)
        assert session.run() == []
        assert check.ran == []
        assert "| ranks | left out | it needs 2 GPUs, there is 1 |" in path.read_text()

    def test_another_machine_is_another_report(
        self, benchmark_module: Module, tmp_path: Path
    ) -> None:
        report = benchmark_module("_gpu_report")
        path, key = tmp_path / "report.md", {"device": "a", "code": "1"}
        assert report.load_parts(path, key) == {}
        report.write(path, {**report_of(graphs=of_tests(a="passed")), "key": key})
        assert set(report.load_parts(path, key)) == {"graphs"}
        with pytest.raises(report.OtherReportError, match=r"code 1 there, 2 here.* --new"):
            report.load_parts(path, {**key, "code": "2"})
        assert report.default_name("NVIDIA H100 80GB", "abc") == "gpu-check-nvidia-h100-80gb-abc.md"

    def test_the_code_is_told_apart(self, benchmark_module: Module, tmp_path: Path) -> None:
        digest = benchmark_module("_gpu_report").code_digest
        (tmp_path / "atom" / "sub").mkdir(parents=True)
        (tmp_path / "atom" / "a.py").write_text("x = 1")
        first = digest(tmp_path)
        (tmp_path / "atom" / "sub" / "b.cpp").write_text("int x;")
        assert first != digest(tmp_path)
        (tmp_path / "atom" / "sub" / "b.cpp").unlink()
        (tmp_path / "notes.txt").write_text("no code")
        assert first == digest(tmp_path)


class TestGoals:
    def test_reached_and_missed(self, benchmark_module: Module) -> None:
        report = benchmark_module("_gpu_report")
        latent = {**KERNEL_ROW, "op": "mla_decode", "sizes": "8 heads, latent 512 + 64"}
        verify = {**latent, "queries": 4, "of_copy": 0.66}
        kernels = [KERNEL_ROW, {**KERNEL_ROW, "implementation": "torch", "of_copy": 0.9}]
        kernels[0] = {**KERNEL_ROW, "kernels": TRACE["kernels"]}
        drafted = {**STEP_ROW, "k": 3, "seconds": 7e-3, "replayed": 0.5, "gap_seconds": 2e-5}
        sizes = benchmark_module("_gpu_goals").REAL
        form = benchmark_module("_product_loads").FORMATS["fp8"]
        quantised = {**KERNEL_ROW, "op": "quant_linear", "sizes": f"{sizes.product}, {form}"}
        filtered = {**KERNEL_ROW, "op": "choose_tokens", "sizes": sizes.choice}
        no_room = {**STEP_ROW, "batch": 64, "context": 8000, "why": "the cache has room for 9"}
        parts = {
            "kernels": finished(*kernels, latent, verify),
            "steps": finished(STEP_ROW, drafted, left_out=[no_room]),
            "start": finished(starts=[START_ROW]),
            "ranks": finished(SUM_ROW, {**SUM_ROW, "implementation": "torch", "seconds": 3e-5}),
            "other-kernels": finished(quantised, filtered),
        }
        text = report.markdown(report_of(**parts))
        for line in (
            "| decode step, batch 1, 8b | at least 85 % of copy | 80 % of copy, MISSED |",
            "| decode step, batch 64, context 8000, 8b | at least 75 % of copy | not measured: the "
            "cache has room for 9 |",
            "| paged_attention, bfloat16, batch 64, context 8192, k = 0 | at least 80 % of copy | "
            "50 % of copy, MISSED |",
            "| mla_decode, bfloat16, batch 64, context 8192, k = 0 | at least 75 % of copy | "
            "50 % of copy, MISSED |",
            "| mla_decode, bfloat16, batch 64, context 8192, k = 3 | at least 65 % of copy | "
            "66 % of copy |",
            "| quant_linear, fp8, batch 64 | at least 60 % of the bound | 50 % of the bound, "
            "MISSED |",
            "| quant_experts, int4, batch 64 | at least 60 % of the bound | not measured: the part "
            "other-kernels did not run it |",
            "| choose_tokens, 163840 tokens, top-k 50, top-p 0.9, batch 64 | at least 25 % of the "
            "bound | 50 % of the bound |",
            "| gap between steps on the device, all engines | at most 100 us | 150 us, MISSED |",
            "| a step with Eagle3 k = 3 over one without, batch 1, 8b | at most 1.25 x | 1.40 x, "
            "MISSED |",
            "| start with graphs, kimi | at most 60.0 s | 75.0 s, MISSED |",
            "| decode steps on graphs, all engines | at least 100 % | 50 %, MISSED |",
            # Where the time goes.
            "gap between steps 150 us (longest 200); other idle time 150 us. 330 kernels and "
            "copies, 10.3 for each of 32 layers",
            "| attention | 32.0 | 900.0 | 19 % | 1.8 | 2000 | 50 % |",
            "paged_attention (32/8 heads of 128) by triton, cache bfloat16, batch 64, context 8192",
            "| `_attend` | attention | 32.0 | 900.0 | 28.1 | 19.0 % |",
            "There is no trace of its kernels.",
            "| sum of one row over the ranks, with residual and norm | at most 12 us | 15 us, "
            "MISSED |",
            "- aiter: 15.0 us\n- torch: 30.0 us",
            "42 graphs of 5 layers were captured in 30.0 s; Triton compiled 12 kernels.",
        ):
            assert line in text, line
        assert text.count("### Missed") == 9

    def test_not_measured_and_why(self, benchmark_module: Module) -> None:
        goals = benchmark_module("_gpu_goals").goals
        assert {goal.reached for goal in goals({})} == {None}
        assert {goal.outcome for goal in goals({})} == {
            f"not measured: the part {part} has not run"
            for part in ("steps", "kernels", "other-kernels", "start", "ranks")
        }
        stuck = {"passed": False, "status": None, "seconds": 9.0, "output": "", "report": None}
        parts = {"kernels": stuck, "steps": finished(faults=["it broke"])}
        outcomes = {goal.outcome for goal in goals(parts)}
        assert "not measured: the part kernels has no report (see its output)" in outcomes
        assert "not measured: the part steps failed: it broke" in outcomes
        left_out = {"shape": "8b", "by": "atom", "k": 3, "why": "out of time"}
        found = goals({"steps": finished(STEP_ROW, left_out=[left_out])})
        (drafts,) = (goal for goal in found if "Eagle3" in goal.name)
        assert drafts.outcome == "not measured: out of time"


class TestReport:
    def test_parts(self, benchmark_module: Module) -> None:
        report = benchmark_module("_gpu_report")
        warm = finished(warmed=[{**KERNEL_ROW, "seconds": 2.5}])
        warm["modules"] = [{"module": "module_moe", "seconds": 57.8}]
        parts = {
            "warm": warm,
            "graphs": of_tests(a="passed", b="skipped"),
            "kernel-tests": of_tests(c="passed", d="failure", e="skipped"),
            "kernels": finished(KERNEL_ROW),
            "steps": finished(STEP_ROW),
        }
        text = report.markdown(report_of(**parts))
        for line in (
            "- device: GPU 9000",
            "| warm | passed | 2 s, 1 modules of aiter built, 1 measured, 0 left out |",
            "| module_moe | 57.8 s |",
            "| kernel-tests | failed (exit status 1) | 3 s, 1 failure, 1 passed, 1 skipped |",
            "| a | passed | 1.0 s | why a |",
            "| d | failure | 1.0 s | why d |",
            "- 1 skipped: why e",
            "Not run to the end: test_slow.py.",
            "Not run yet: other-kernels, kimi, start, ranks.",
            "| paged_attention | 32/8 heads of 128 | triton | bfloat16 | 64 | 8192 | 1 | 1000.0 | "
            "2 | 2000 | 50 % | 1 | 50 % | 4.2 x | 1e-03 |",
            "| 8b | atom (graph) | 1 | 1024 | 0 | 5.00 | 4.70 | 100 | 150 | 100 % | 16.00 | 3200 | "
            "80 % | 200 |",
        ):
            assert line in text, line
        assert "| c | passed" not in text
        assert "noise" not in text

    def test_lines_for_whoever_watches(self, benchmark_module: Module) -> None:
        line = benchmark_module("_gpu_report").summary_line
        stuck = {**finished(STEP_ROW), "passed": False, "status": None}
        assert line("steps", stuck, ["kernels", "steps"]) == (
            "[2/2] steps: out of time, 2 s, 1 measured, 0 left out"
        )


class TestNeeds:
    def test_what_is_missing_is_named(self, benchmark_module: Module) -> None:
        """torch, triton, transformers and pytest alone."""
        needs = benchmark_module("_gpu_needs")
        there = {"torch", "triton", "transformers", "pytest"}
        lines, status = needs.describe(list(needs.NEEDS), there.__contains__)
        assert status == needs.SOME
        for line in (
            "steps cannot run: it needs msgspec",
            "graphs cannot run: it needs msgspec",
            "hypothesis is missing: files of tests that need it are left out",
            "missing, and not needed here: fastapi, pyzmq, xgrammar, apache-tvm-ffi, gguf",
        ):
            assert line in lines
        assert not any(line.startswith("kernels cannot") for line in lines)
        assert lines[-1].endswith("-m pip install msgspec psutil")
        assert needs.describe(["steps"], lambda _: True) == ([], 0)
        assert needs.describe(["kernels"], lambda _: False)[1] == needs.NO_TORCH

    @pytest.mark.parametrize("version", ["2.10.0+rocm7.0", "2.9.1", "1.13.1"])
    def test_an_old_torch_is_refused(self, benchmark_module: Module, version: str) -> None:
        needs = benchmark_module("_gpu_needs")
        lines, status = needs.describe(["kernels"], lambda _: True, lambda: version)
        assert status == needs.OLD_TORCH
        assert lines[0].startswith(f"torch {version} is too old: ATOM needs 2.11 or newer")

    @pytest.mark.parametrize("version", ["2.11.0", "2.12.0a0+git1234", "3.0", None])
    def test_others_are_not(self, benchmark_module: Module, version: str | None) -> None:
        needs = benchmark_module("_gpu_needs")
        assert needs.describe(["kernels"], lambda _: True, lambda: version) == ([], 0)

    def test_the_least_torch_is_that_of_the_package(self, benchmark_module: Module) -> None:
        least = ".".join(map(str, benchmark_module("_gpu_needs").LEAST_TORCH))
        assert f'"torch>={least}"' in (ROOT / "pyproject.toml").read_text()

    def test_it_imports_nothing_else(self) -> None:
        """Any Python can be asked, without site packages."""
        program = str(ROOT / "benchmarks" / "_gpu_needs.py")
        done = subprocess.run(
            [sys.executable, "-I", "-S", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == 4
        assert "kernels cannot run: it needs torch" in done.stderr

    def test_kernels_need_little(self) -> None:
        """What the table of needs says of the kernels, and of whole steps."""
        absent = "fastapi zmq xgrammar tvm_ffi gguf hypothesis pydantic uvicorn psutil"
        program = (
            "import sys; sys.path.insert(0, 'benchmarks')\n"
            "sys.modules.update(dict.fromkeys(sys.argv[1].split()))\n"
            "import _kernel_loads, kernels, gpu_check\n"
            "assert 'msgspec' not in sys.modules\n"
            "import decode_roofline, atom.spec_decode.proposers.eagle3, atom.models.registry\n"
        )
        command = [sys.executable, "-c", program, absent]
        subprocess.run(command, cwd=ROOT, check=True)
