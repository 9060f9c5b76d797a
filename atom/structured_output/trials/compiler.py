"""Compiles grammars in threads, each after a trial in a process that can be killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from atom.structured_output.base import CompileStoppedError, Grammar, GrammarBackend
from atom.structured_output.params import StructuredOutput
from atom.structured_output.plain import is_plain
from atom.structured_output.trials.client import Trials, TrialsEndedError
from atom.structured_output.trials.messages import TOO_LONG

_NUM_QUICK_THREADS = 2
# Attempts with a new process when the process ends, before the request is refused.
_NUM_ATTEMPTS = 2


@dataclass
class _Attempt:
    """The running trial, if any.

    The only link from the future to the trial, and cleared when the trial ends: then only those who
    want the grammar keep its future alive.
    """

    trial: Future[float] | None = None

    def cancel_with(self, future: Future[Grammar]) -> None:
        trial = self.trial
        if future.cancelled() and trial is not None:
            trial.cancel()


@dataclass
class _Job:
    """A grammar to compile. The future is cancelled or set to running before it gets a result."""

    wanted: StructuredOutput
    future: Future[Grammar]
    attempt: _Attempt = field(default_factory=_Attempt)
    attempts_left: int = _NUM_ATTEMPTS

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class TriedCompiler:
    """Compiles in this process only grammars that a trial compiled within the limits, or that are
    plain.

    A compiling thread cannot be stopped, but a trial can. Compiling twice is cheaper than sending
    compiled grammars between processes, since they are large. Grammars with slow trials have a
    thread of their own.

    Args:
        create_backend: creates the backend, in a thread, for the first grammar.
    """

    def __init__(self, create_backend: Callable[[], GrammarBackend], trials: Trials) -> None:
        self._create_backend = create_backend
        self._trials = trials
        self._backend: GrammarBackend | None = None
        self._lock = threading.Lock()
        self._quick = _started_pool(_NUM_QUICK_THREADS, "grammar")
        self._slow = _started_pool(1, "slow-grammar")

    def submit(self, wanted: StructuredOutput) -> Future[Grammar]:
        job = _Job(wanted, Future())
        job.future.add_done_callback(job.attempt.cancel_with)
        self._quick.submit(self._begin, job)
        return job.future

    def shutdown(self) -> None:
        self._trials.shutdown()
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)

    def _begin(self, job: _Job) -> None:
        if job.future.cancelled():
            return
        try:
            needs_trial = not is_plain(job.wanted)
            if needs_trial:
                self._trials.start()  # starts up while the backend is created
            backend = self._get_backend()
        except (OSError, TrialsEndedError) as error:
            job.fail(_stopped(error))
            return
        except Exception as error:
            job.fail(error)
            return
        if needs_trial:
            self._try(backend, job)
        else:
            self._compile(backend, job)

    def _get_backend(self) -> GrammarBackend:
        with self._lock:
            if self._backend is None:
                self._backend = self._create_backend()
            return self._backend

    def _try(self, backend: GrammarBackend, job: _Job) -> None:
        job.attempts_left -= 1
        try:
            trial = self._trials.submit(backend.vocabulary, job.wanted)
        except (OSError, TrialsEndedError) as error:
            job.fail(_stopped(error))
            return
        job.attempt.trial = trial
        job.attempt.cancel_with(job.future)  # it may have been cancelled before this
        trial.add_done_callback(lambda trial: self._go_on(backend, job, trial))

    def _go_on(self, backend: GrammarBackend, job: _Job, trial: Future[float]) -> None:
        """Continue after a trial; runs in a thread of `Trials`."""
        job.attempt.trial = None
        if trial.cancelled():
            return
        error = trial.exception()
        if isinstance(error, TrialsEndedError) and job.attempts_left and not job.future.cancelled():
            self._try(backend, job)
        elif isinstance(error, TrialsEndedError):
            job.fail(_stopped(error))
        elif error is not None:
            job.fail(error)
        else:
            self._compile_later(backend, job, trial.result())

    def _compile_later(self, backend: GrammarBackend, job: _Job, trial_seconds: float) -> None:
        limits = self._trials.limits
        give_up = time.monotonic() + limits.seconds
        pool = self._slow if limits.is_slow(trial_seconds) else self._quick

        def compile() -> None:
            if time.monotonic() < give_up:
                self._compile(backend, job)
            else:
                job.fail(CompileStoppedError(TOO_LONG))

        try:
            pool.submit(compile)
        except RuntimeError:  # shut down in the meantime
            job.fail(CompileStoppedError("the engine is shutting down"))

    def _compile(self, backend: GrammarBackend, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            job.future.set_result(backend.compile(job.wanted))
        except Exception as error:
            job.future.set_exception(error)


def _started_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool that starts no thread later, when the engine may have no memory left for one."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    all_started = threading.Barrier(num_threads)
    try:
        for _ in range(num_threads):
            pool.submit(all_started.wait)
    except RuntimeError:  # no thread can be started: the process would wait for the others at exit
        all_started.abort()
        raise
    return pool


def _stopped(error: Exception) -> CompileStoppedError:
    return CompileStoppedError(f"it cannot be compiled now, try again: {error}")
