"""Trials: each grammar is compiled in a fork of this process, which can be killed.

A trial begins with a small slice of processor time. If it exceeds that, it is killed and restarted
on the next level, with a larger slice and lower priority; on the last level only its deadline ends
it. Each level has a fixed number of places. So slow trials wait for each other, and a quick one
waits at most for the smallest slice of the trials before it.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atom.structured_output.base import GrammarBackend, GrammarError
from atom.structured_output.trials.messages import TOO_LONG, TOO_MANY, TrialLimits, Try, Verdict

# Added to the niceness per level, so that quick trials and the engine have priority.
_NICENESS = 5
_PIECE_BYTES = 1 << 16
_LONGEST_ERROR = 1000
# Exit status of a worker.
_OUT_OF_MEMORY = 3


@dataclass(frozen=True)
class _Trial:
    """A request and its deadline, by `time.monotonic()`."""

    asked: Try
    deadline: float


@dataclass
class _Worker:
    """A process that compiles a grammar and sends its verdict through a pipe."""

    trial: _Trial
    pid: int
    pipe: int
    level: int


class TrialWorkers:
    """All unfinished trials. Not thread-safe.

    Args:
        report: receives each verdict.
        stdio: descriptors of the parent's pipes, which workers close.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        limits: TrialLimits,
        report: Callable[[Verdict], None],
        stdio: tuple[int, ...],
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._report = report
        self._stdio = stdio
        # Waiting trials, per level.
        self._queues: list[deque[_Trial]] = [deque() for _ in (*limits.slices, None)]
        self._workers: dict[int, _Worker] = {}

    @property
    def pipes(self) -> list[int]:
        """Descriptors to wait for."""
        return list(self._workers)

    def add(self, asked: Try) -> None:
        self._queues[0].append(_Trial(asked, time.monotonic() + self._limits.seconds))

    def cancel(self, trial_id: int) -> None:
        for queue in self._queues:
            for trial in [t for t in queue if t.asked.id == trial_id]:
                queue.remove(trial)
        for worker in [w for w in self._workers.values() if w.trial.asked.id == trial_id]:
            self._kill(worker)

    def kill_all(self) -> None:
        for worker in list(self._workers.values()):
            self._kill(worker)

    def turn(self) -> float | None:
        """Do all work that is due; returns the seconds until the next deadline, or None."""
        self._collect()
        now = time.monotonic()
        self._give_up(now)
        self._start_waiting()
        due = [trial.deadline for queue in self._queues for trial in queue]
        due += [w.trial.deadline for w in self._workers.values()]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _collect(self) -> None:
        """Handle the workers that have ended."""
        if not self._workers:
            return
        for pipe in select.select(self.pipes, [], [], 0)[0]:
            worker = self._workers[pipe]
            # A verdict is written atomically, so it arrives whole or not at all.
            data = os.read(pipe, _PIECE_BYTES)
            status = self._end(worker)
            if data:
                self._report(msgspec.msgpack.decode(data, type=Verdict))
            elif status == -signal.SIGPROF:
                self._queues[worker.level + 1].append(worker.trial)
            else:
                self._fail(worker.trial, self._explain(status))

    def _explain(self, status: int) -> str:
        """Why a worker ended without a verdict."""
        if status == -signal.SIGALRM:
            return TOO_LONG
        if status == _OUT_OF_MEMORY:
            return (
                f"compiling it takes more than {self._limits.memory_bytes >> 20} MiB of memory; "
                f"make it smaller"
            )
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"the process that compiled it {how}; make it smaller, or try again"

    def _give_up(self, now: float) -> None:
        for level, queue in enumerate(self._queues):
            for trial in [t for t in queue if t.deadline <= now]:
                queue.remove(trial)
                self._fail(trial, TOO_LONG if level else TOO_MANY)
        for worker in [w for w in self._workers.values() if w.trial.deadline <= now]:
            self._kill(worker)
            self._fail(worker.trial, TOO_LONG)

    def _start_waiting(self) -> None:
        for level, queue in enumerate(self._queues):
            running = sum(worker.level == level for worker in self._workers.values())
            for _ in range(min(len(queue), self._limits.places - running)):
                self._start(queue.popleft(), level)

    def _start(self, trial: _Trial, level: int) -> None:
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            self._fail(trial, f"no process can be started to compile it: {error}")
            return
        if pid == 0:
            self._run(trial, writing, level)
        os.close(writing)
        self._workers[reading] = _Worker(trial, pid, reading, level)

    def _run(self, trial: _Trial, pipe: int, level: int) -> None:
        """The worker process; never returns."""
        status = 1
        try:
            # Kernel timers kill this process, even if its parent is gone.
            _end_by(signal.ITIMER_REAL, signal.SIGALRM, trial.deadline - time.monotonic())
            if level < len(self._limits.slices):
                _end_by(signal.ITIMER_PROF, signal.SIGPROF, self._limits.slices[level])
            for descriptor in self._stdio:
                os.close(descriptor)
            os.nice(level * _NICENESS)
            _limit_memory(self._limits.memory_bytes)
            verdict = _try(self._backend, trial.asked)
            os.write(pipe, msgspec.msgpack.encode(verdict))
            status = 0
        except MemoryError:
            status = _OUT_OF_MEMORY
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _fail(self, trial: _Trial, error: str) -> None:
        self._report(Verdict(trial.asked.id, error=error, was_stopped=True))

    def _kill(self, worker: _Worker) -> None:
        os.kill(worker.pid, signal.SIGKILL)
        self._end(worker)

    def _end(self, worker: _Worker) -> int:
        """Remove a worker and wait for it; returns its exit status, or minus its signal."""
        del self._workers[worker.pipe]
        os.close(worker.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


def _try(backend: GrammarBackend, asked: Try) -> Verdict:
    started = time.process_time()
    try:
        backend.compile(asked.wanted)
    except GrammarError as error:
        # Short enough for an atomic write to a pipe.
        return Verdict(asked.id, error=str(error)[:_LONGEST_ERROR])
    return Verdict(asked.id, seconds=time.process_time() - started)


def _end_by(timer: int, timers_signal: signal.Signals, seconds: float) -> None:
    signal.signal(timers_signal, signal.SIG_DFL)
    signal.setitimer(timer, max(1e-3, seconds))


def _limit_memory(num_bytes: int) -> None:
    """Limit further address space to `num_bytes`, and disable core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere than on Linux nothing tells what there is already
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
