"""The last steps of an engine: what is kept, written and shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.entrypoints.terminal import flight
from atom.messages import EngineStats, FinishReason, SequenceOutput, StepReport
from atom.model_engine.processes.wire import StepProgress
from atom.model_engine.replicas.flight_recorder import FlightRecorder, read_flight
from atom.stats import SpecDecodeStats


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path))
    return tmp_path / "flights"


def stats(step: int) -> EngineStats:
    """After as many steps, each of which verifies three drafts and accepts one."""
    drafts = SpecDecodeStats(num_drafts=step, num_draft_tokens=3 * step, accepted_counts=[0, step])
    return EngineStats(
        num_steps=step,
        num_running=2,
        num_blocks=64,
        num_used_blocks=5,
        num_mixed_steps=step // 2,
        num_replayed_decode_steps=(step + 1) // 2,
        num_preemptions=step // 3,
        spec_decode=drafts,
    )


def report(step: int) -> StepReport:
    outputs = [
        SequenceOutput(id="a", token_ids=[7, 8], finish_reason=None),
        SequenceOutput(id="b", token_ids=[9], finish_reason=FinishReason.STOP),
    ]
    return StepReport(outputs=outputs, stats=stats(step), num_tokens=8, seconds=0.25)


def test_the_last_steps_are_kept(cache: Path) -> None:
    recorder = FlightRecorder(stats(0))
    for step in range(1, 251):
        recorder.note(report(step))
        recorder.note(StepReport(outputs=[], stats=stats(step)))  # of an abort
    path = recorder.write("was killed", 4711, StepProgress(9, 1.5, 30.0))
    assert path is not None
    assert path.parent == cache
    known = read_flight(path)
    assert (known.reason, known.pid, known.running) == ("was killed", 4711, (9, 1.5))
    assert len(known.steps) == 200
    first, second = known.steps[:2]
    assert (first.num_drafts, first.num_accepted, first.num_new_tokens) == (3, 1, 3)
    assert (first.num_outputs, first.num_ended, first.num_tokens) == (2, 1, 8)
    # Steps 51 and 52.
    assert (first.is_mixed, first.is_replayed, first.num_preempted) == (False, True, 1)
    assert (second.is_mixed, second.is_replayed, second.num_preempted) == (True, False, 0)
    text = path.read_text()
    assert "token_ids" not in text


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = FlightRecorder(stats(0))
    for step in range(1, 6):
        recorder.note(report(step))
    path = recorder.write("was killed", 4711, None)
    assert path is not None
    assert flight.main(["--last", "3"]) == 0
    newest = capsys.readouterr().out
    assert flight.main([str(path), "--last", "3"]) == 0
    assert capsys.readouterr().out == newest
    lines = newest.splitlines()
    assert "process 4711" in lines[1]
    assert "no step was known to run" in lines[2]
    assert "the last 3 of 5 steps, 64 blocks" in lines[3]
    assert len(lines) == 8
    shown = lines[-1].split(maxsplit=2)[2]
    assert " ".join(shown.split()) == "250.0 8 2 3 3 1 2 0 5 replayed, 1 ended"


def test_files_that_are_none(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flight.main([]) == 1
    assert "no engine has died" in capsys.readouterr().err
    cache.mkdir()
    (cache / "x.json").write_text("{}")
    assert flight.main([str(cache / "x.json")]) == 1
    assert "error:" in capsys.readouterr().err


def test_few_files_are_kept_and_none_without_steps(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert FlightRecorder(stats(0)).write("died", 1, None) is None
    recorder = FlightRecorder(stats(0))
    recorder.note(report(1))
    for pid in range(30):
        recorder.write("died", 100 + pid, None)
    assert len(list(cache.iterdir())) == 20
    for path in cache.iterdir():
        path.unlink()
    cache.rmdir()
    cache.write_text("in the way")
    assert recorder.write("died", 1, None) is None
    assert "cannot be kept" in caplog.text
