"""Trials as processes of this one: limits, places, and ends."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import psutil
import pytest
from patience import wait_until
from structured_output.pathological import easy, hard

from atom import StructuredOutput
from atom.structured_output.base import Grammar
from atom.structured_output.trials.messages import TOO_LONG, TOO_MANY, TrialLimits, Try, Verdict
from atom.structured_output.trials.workers import TrialWorkers
from atom.structured_output.xgrammar_backend import XGrammarBackend

LIMITS = TrialLimits(slices=(0.1, 0.2), places=1)


@dataclass
class Lane:
    """Workers and the verdicts that they brought."""

    backend: XGrammarBackend
    limits: TrialLimits = LIMITS
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workers = TrialWorkers(self.backend, self.limits, self._report, ())

    def _report(self, verdict: Verdict) -> None:
        assert verdict.id not in self.verdicts
        self.verdicts[verdict.id] = verdict

    def add(self, trial_id: int, wanted: StructuredOutput) -> None:
        self.workers.add(Try(trial_id, wanted))

    def run_until(self, condition: Callable[[], bool]) -> None:
        def happened() -> bool:
            if condition():
                return True
            self.workers.turn()
            return False

        wait_until(happened)

    @property
    def running(self) -> dict[int, int]:
        """The level of each trial that has a process."""
        return {w.trial.asked.id: w.level for w in self.workers._workers.values()}

    def pid(self, trial_id: int) -> int:
        [pid] = [w.pid for w in self.workers._workers.values() if w.trial.asked.id == trial_id]
        return pid


@pytest.fixture
def create(backend: XGrammarBackend) -> Iterator[Callable[[TrialLimits], Lane]]:
    lanes: list[Lane] = []

    def create(limits: TrialLimits) -> Lane:
        lanes.append(Lane(backend, limits))
        return lanes[-1]

    yield create
    for lane in lanes:
        lane.workers.kill_all()


CreateLane = Callable[[TrialLimits], Lane]


def test_verdicts(create: CreateLane) -> None:
    lane = create(LIMITS)
    assert lane.workers.turn() is None
    lane.add(1, easy(1))
    lane.add(2, StructuredOutput.ebnf("root ::= other"))
    lane.run_until(lambda: len(lane.verdicts) == 2)
    assert lane.verdicts[1].error == ""
    assert "not defined" in lane.verdicts[2].error
    assert not lane.verdicts[2].was_stopped
    assert lane.workers.turn() is None


def test_quick_trials_pass_slow_ones(create: CreateLane) -> None:
    """Of those as many run as there are places; the others wait aside."""
    lane = create(LIMITS)
    for trial_id in range(6):
        lane.add(trial_id, hard(trial_id))
    lane.add(10, easy(1))
    lane.run_until(lambda: 10 in lane.verdicts)
    assert lane.verdicts.keys() == {10}
    lane.run_until(lambda: len(lane.workers._queues[-1]) == 5)
    assert list(lane.running.values()) == [2]
    [first] = lane.running
    assert os.getpriority(os.PRIO_PROCESS, lane.pid(first)) > os.getpriority(os.PRIO_PROCESS, 0)
    lane.workers.cancel(first)
    lane.workers.turn()
    [second] = lane.running
    assert second != first
    assert lane.running[second] == 2


def test_all_slow_trials_end_by_their_deadline(create: CreateLane) -> None:
    lane = create(msgspec.structs.replace(LIMITS, seconds=1.0))
    for trial_id in range(4):
        lane.add(trial_id, hard(trial_id))
    lane.run_until(lambda: len(lane.verdicts) == 4)
    assert {v.error for v in lane.verdicts.values()} <= {TOO_LONG, TOO_MANY}
    assert all(v.was_stopped for v in lane.verdicts.values())
    assert lane.running == {}


def test_a_worker_that_nobody_watches_ends_by_its_deadline(create: CreateLane) -> None:
    lane = create(msgspec.structs.replace(LIMITS, seconds=0.5, slices=(10.0,)))
    lane.add(1, hard(1))
    lane.workers.turn()
    result = os.waitid(os.P_PID, lane.pid(1), os.WEXITED | os.WNOWAIT)
    assert result is not None
    assert (result.si_code, result.si_status) == (os.CLD_KILLED, signal.SIGALRM)


class HungryBackend(XGrammarBackend):
    """Needs a lot of memory for choices."""

    def compile(self, wanted: StructuredOutput) -> Grammar:
        if wanted.kind != "choice":
            return super().compile(wanted)
        # A map of its own: for a `bytearray`, what other tests have freed may be enough.
        with suppress(OSError), mmap.mmap(-1, 1 << 30):
            return super().compile(wanted)
        raise MemoryError


def test_memory_is_bounded(backend: XGrammarBackend) -> None:
    limits = msgspec.structs.replace(LIMITS, memory_bytes=512 << 20)
    lane = Lane(HungryBackend(backend.vocabulary), limits)
    lane.add(1, StructuredOutput.choice(["a"]))
    lane.add(2, easy(1))
    lane.run_until(lambda: len(lane.verdicts) == 2)
    assert "takes more than 512 MiB of memory" in lane.verdicts[1].error
    assert lane.verdicts[1].was_stopped
    assert lane.verdicts[2].error == ""


def test_a_killed_worker_fails_its_trial_alone(create: CreateLane) -> None:
    lane = create(LIMITS)
    lane.add(1, hard(1))
    lane.workers.turn()
    os.kill(lane.pid(1), signal.SIGKILL)
    lane.add(2, easy(1))
    lane.run_until(lambda: len(lane.verdicts) == 2)
    assert "ended by signal 9" in lane.verdicts[1].error
    assert lane.verdicts[1].was_stopped
    assert lane.verdicts[2].error == ""


def test_cancelled_trials_end(create: CreateLane) -> None:
    lane = create(LIMITS)
    for trial_id in range(4):
        lane.add(trial_id, hard(trial_id))
    lane.workers.turn()
    pids = [lane.pid(trial_id) for trial_id in lane.running]
    for trial_id in range(5):
        lane.workers.cancel(trial_id)
    assert lane.workers.turn() is None
    assert lane.running == {}
    assert not any(psutil.pid_exists(pid) for pid in pids)
