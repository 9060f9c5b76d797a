"""accuracy.py: entries, gates, lm_eval's files, and whole runs without lm_eval or a large model."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from atom.entrypoints.openai_server import create_parser
from atom.entrypoints.server_options import ServerOptions
from atom.model_engine.arg_utils import (
    choose_draft,
    engine_config,
    engine_options,
)
from atom.stats import SpecDecodeStats

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENTRIES = ROOT / "recipes" / "accuracy.toml"
FAKE = f"{sys.executable} {HERE / 'fake_lm_eval.py'}"

Import = Callable[[str], Any]


@pytest.fixture
def accuracy(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(benchmark_module("_server"), "free_port", free_port)
    return benchmark_module("accuracy")


@pytest.fixture
def stub(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are stub_server.py."""
    program = (str(HERE / "stub_server.py"),)
    monkeypatch.setattr(benchmark_module("_server"), "PROGRAM", program)


def write_entries(folder: Path, text: str) -> Path:
    path = folder / "entries.toml"
    path.write_text(text)
    return path


def run(accuracy: Any, folder: Path, entries: str, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and results of a run with the fake lm_eval."""
    given = ["--entries", str(write_entries(folder, entries)), "--output-dir", str(folder)]
    before = signal.getsignal(signal.SIGTERM)
    try:
        status = accuracy.main([*given, "--lm-eval", FAKE, *flags])
    finally:
        signal.signal(signal.SIGTERM, before)
    report = json.loads((folder / "accuracy.json").read_text())
    assert report["environment"]["atom"]
    return status, report["results"]


TWO = """
[plain]
task = "gsm8k"
limit = 3
min_accuracy = 0.4

[draft]
model = "some/model"
task = "gsm8k"
limit = 3
min_accuracy = 0.4
min_acceptance = 0.39
same_as = "plain"
note = "A note."
"""


@pytest.mark.usefixtures("stub")
def test_a_run_that_passes(accuracy: Any, tmp_path: Path) -> None:
    status, (plain, draft) = run(accuracy, tmp_path, TWO)
    assert status == 0
    assert (plain["status"], draft["status"]) == ("passed", "passed")
    assert draft["metrics"] == {
        "exact_match,strict-match": 0.25,
        "exact_match,flexible-extract": 0.5,
    }
    # Three answers: 12 of 30 drafts accepted in each.
    assert draft["acceptance"]["rate"] == pytest.approx(0.4)
    assert draft["acceptance"]["distribution"] == [12, 6, 6, 6]
    assert "--model some/model" in draft["server"]
    assert "--model_args model=stub,base_url=http://127.0.0.1:" in draft["lm_eval"]
    text = (tmp_path / "accuracy.md").read_text()
    assert "| draft | passed | 50.00% | 25.00% | 40.00% | 40.00% | 39.00% | 2.20 |" in text
    assert "A note." in text
    for result in (plain, draft):
        port = int(result["server"].rpartition("--port ")[2])
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", port)) != 0, "the server still runs"


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("old", "new", "lm_eval", "reason"),
    [
        ("min_accuracy = 0.4", "min_accuracy = 0.6", "", "accuracy 0.5000 is below 0.6"),
        ('task = "gsm8k"', 'task = "gsm8k"\nflags = ["--die"]', "", "no such model"),
        (
            'task = "gsm8k"',
            'task = "gsm8k"\nstart_minutes = 0.02\nflags = ["--never-healthy"]',
            "",
            "not ready after 1.2 s",
        ),
        ("", "", "--fail", "lm_eval has had enough"),
    ],
    ids=["below the gate", "server dies", "never healthy", "lm_eval fails"],
)
def test_runs_that_fail(
    accuracy: Any, tmp_path: Path, old: str, new: str, lm_eval: str, reason: str
) -> None:
    entries = TWO.partition("[draft]")[0].replace(old, new)
    status, (plain,) = run(accuracy, tmp_path, entries, "--lm-eval", f"{FAKE} {lm_eval}")
    assert status == 1
    assert plain["status"] == "failed"
    assert reason in "".join(plain["reasons"])
    assert "| plain | failed |" in (tmp_path / "accuracy.md").read_text()


def test_a_real_server_is_scraped(accuracy: Any, tiny_llama_dir: Path, tmp_path: Path) -> None:
    flags = ["--method", "suffix", "--num-speculative-tokens", "2", "--dtype", "float32"]
    flags += ["--num-threads", "1", "--kv-cache-memory", "4MiB"]
    entries = f"""
[tiny]
model = "{tiny_llama_dir}"
task = "gsm8k"
limit = 2
min_accuracy = 0.4
flags = {json.dumps(flags)}
"""
    status, (tiny,) = run(accuracy, tmp_path, entries)
    assert status == 0, tiny["reasons"]
    assert sum(tiny["acceptance"]["distribution"]) > 0
    assert "Ready: http://127.0.0.1:" in (tmp_path / "tiny" / "server.log").read_text()


@pytest.mark.usefixtures("stub")
def test_local_questions(accuracy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "test.jsonl").touch()
    entries = TWO.partition("[draft]")[0]
    status, (plain,) = run(accuracy, tmp_path, entries, "--data-dir", str(data))
    assert status == 1
    assert "no " + str(data / "train.jsonl") in plain["reasons"][0]
    (data / "train.jsonl").touch()
    status, (plain,) = run(accuracy, tmp_path, entries, "--data-dir", str(data))
    assert status == 0
    assert "--tasks gsm8k_local" in plain["lm_eval"]
    other = write_entries(tmp_path, entries.replace("gsm8k", "mmlu"))
    assert accuracy.main(["--entries", str(other), "--data-dir", str(data)]) == 2
    assert "--data-dir holds gsm8k, not mmlu" in capsys.readouterr().err


def test_termination_stops_the_server(tmp_path: Path) -> None:
    """A run that is told to stop leaves no server behind."""
    text = '[slow]\ntask = "gsm8k"\nmin_accuracy = 0.0\nflags = ["--never-healthy"]\n'
    code = (
        "import sys, _server, accuracy\n"
        f"_server.PROGRAM = ({str(HERE / 'stub_server.py')!r},)\n"
        "wait = _server.Server.wait_healthy\n"
        "def waiting(self, seconds):\n"
        "    print(self._process.pid, flush=True); wait(self, seconds)\n"
        "_server.Server.wait_healthy = waiting\n"
        "sys.exit(accuracy.main(sys.argv[1:]))\n"
    )
    flags = ["--entries", str(write_entries(tmp_path, text)), "--output-dir", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    server = int(process.stdout.readline())
    process.terminate()
    assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_the_entries_of_the_project(benchmark_module: Import) -> None:
    """Every flag is one that the server takes; what needs GPUs is refused where there are none."""
    entries = benchmark_module("_accuracy_entries").read_entries(ENTRIES)
    for entry in entries.values():
        namespace = create_parser().parse_args(entry.server_flags)
        ServerOptions.from_cli_args(namespace)
        options = choose_draft(engine_options(namespace), namespace.no_speculation)
        if not entry.rocm_gpus:
            engine_config(**options)
        reason = benchmark_module("_accuracy_entries").why_not_here(entry)
        assert reason is None or str(entry.rocm_gpus) in reason
    kimi = entries["kimi-k2.5"]
    assert (kimi.min_accuracy, kimi.min_acceptance, kimi.rocm_gpus) == (0.91, 0.67, 8)
    assert entries["smollm2-draft"].same_as == "smollm2"
    plain, draft = entries["smollm2"], entries["smollm2-draft"]
    assert "float32" in plain.flags
    assert (plain.task, plain.limit, plain.num_fewshot) == (
        draft.task,
        draft.limit,
        draft.num_fewshot,
    )


def test_refused_where_there_are_no_gpus(
    accuracy: Any, benchmark_module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", None)
    entries = '[big]\ntask = "gsm8k"\nmin_accuracy = 0.9\nrocm_gpus = 8\n'
    status, (big,) = run(accuracy, tmp_path, entries, "big")
    assert status == 2
    assert big["status"] == "refused"
    assert big["reasons"] == ["it takes 8 ROCm GPUs, and this machine has none"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    (entry,) = (
        benchmark_module("_accuracy_entries").read_entries(tmp_path / "entries.toml").values()
    )
    assert benchmark_module("_accuracy_entries").why_not_here(entry) is None


@pytest.mark.parametrize(
    ("statuses", "named", "expected"),
    [
        (["passed", "refused"], False, 0),
        (["passed", "refused"], True, 2),
        (["refused"], False, 2),
        (["failed", "refused"], True, 1),
    ],
)
def test_exit_status(accuracy: Any, statuses: list[str], named: bool, expected: int) -> None:
    assert accuracy.exit_status([{"status": s} for s in statuses], named) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no entry"),
        ("x = 1", "is no table"),
        ("[a", "cannot read"),
        ('[a]\ntask = "t"', "lacks min_accuracy"),
        ('[a]\ntask = "t"\nmin_accuracy = 0.5\nflag = []', "unknown: flag"),
        ('[a]\ntask = "t"\nmin_accuracy = "0.5"', "min_accuracy must be of type float"),
        ('[a]\ntask = "t"\nmin_accuracy = true', "min_accuracy must be of type float"),
        ('[a]\ntask = "t"\nmin_accuracy = 1.5', "must be in [0, 1]"),
        ('[a]\ntask = "t"\nmin_accuracy = 1\nflags = [1]', "flags must be of type"),
        ('[a]\ntask = "t"\nmin_accuracy = 1\nsame_as = "b"', "no entry 'b' comes before"),
        ('[a]\ntask = "t"\nmin_accuracy = 1\nlimit = -1', "must not be negative"),
    ],
)
def test_bad_entries(
    accuracy: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    message: str,
) -> None:
    assert accuracy.main(["--entries", str(write_entries(tmp_path, text))]) == 2
    assert message in capsys.readouterr().err


def test_unknown_names(accuracy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main(["smollm3"]) == 2
    assert "no entry 'smollm3'; there are smollm2, " in capsys.readouterr().err


def test_gates(accuracy: Any, benchmark_module: Import) -> None:
    outcome = benchmark_module("_lm_eval").Outcome
    entry = benchmark_module("_accuracy_entries").Entry(
        name="e", task="t", min_accuracy=0.9, min_acceptance=0.5, same_as="other"
    )

    def measured(accuracy_found: float, accepted: int, outputs: dict[str, Any]) -> Any:
        metrics = {"exact_match,flexible-extract": accuracy_found}
        drafts = SpecDecodeStats(
            num_drafts=10, num_draft_tokens=10, accepted_counts=[10 - accepted, accepted]
        )
        return accuracy.Measured(outcome(metrics, outputs), drafts, 1.0, "", "")

    good = measured(0.9, 5, {"x/1": "a"})
    assert accuracy.judge(entry, good, good) == []
    assert accuracy.judge(entry, measured(0.9, 4, {"x/1": "a"}), good) == [
        "acceptance 0.4000 is below 0.5"
    ]
    assert accuracy.judge(entry, measured(0.95, 5, {"x/1": "b"}), good) == [
        "exact_match,flexible-extract is 0.95, and 0.9 in other",
        "1 of 1 outputs differ from other, the first in x/1",
    ]
    assert accuracy.judge(entry, good, None) == ["nothing to compare with: other did not run"]
    none = dataclasses.replace(good, drafts=None)
    assert accuracy.judge(entry, none, good) == [
        "the server verified no drafts, and there is an acceptance gate"
    ]
    odd = dataclasses.replace(good, outcome=outcome({"acc,none": 1.0}, {"x/1": "a"}))
    assert "lm_eval reports no exact_match,flexible-extract" in accuracy.judge(entry, odd, good)[0]


def test_the_command(benchmark_module: Import) -> None:
    entry = benchmark_module("_accuracy_entries").Entry(
        name="e",
        task="gsm8k",
        min_accuracy=0.0,
        limit=7,
        num_fewshot=2,
        gen_kwargs="temperature=0.7",
    )
    command = benchmark_module("_lm_eval").lm_eval_command(
        "python -m lm_eval", entry, "gsm8k", "http://h:1", "m", Path("/out"), Path("/tasks")
    )
    assert command[:4] == ["python", "-m", "lm_eval", "--model"]
    for flag, value in {
        "--model": "local-completions",
        "--tasks": "gsm8k",
        "--num_fewshot": "2",
        "--limit": "7",
        "--gen_kwargs": "temperature=0.7",
        "--include_path": "/tasks",
        "--output_path": "/out",
    }.items():
        assert command[command.index(flag) + 1] == value
    assert "base_url=http://h:1/v1/completions" in command[command.index("--model_args") + 1]


@pytest.mark.slow
@pytest.mark.network
def test_the_real_lm_eval(accuracy: Any, tmp_path: Path) -> None:
    """SmolLM2 with and without lookup speculation gives the same answers to four questions."""
    program = shutil.which("lm_eval")
    if program is None:
        pytest.skip("lm_eval is not installed")
    flags = ["--no-speculation", "--dtype", "float32", "--kv-cache-memory", "1GiB"]
    suffix = ["--method", "suffix", "--num-speculative-tokens", "3", *flags[1:]]
    common = 'task = "gsm8k"\nlimit = 4\nmin_accuracy = 0.0\nflags = '
    entries = f"[off]\n{common}{json.dumps(flags)}\n"
    entries += f'[on]\nsame_as = "off"\nmin_acceptance = 0.05\n{common}{json.dumps(suffix)}\n'
    status, results = run(accuracy, tmp_path, entries, "--lm-eval", program)
    assert status == 0, results
