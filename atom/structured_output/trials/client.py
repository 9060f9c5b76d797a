"""The engine's handle on the trial process."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import msgspec

from atom.structured_output.base import CompileStoppedError, GrammarError
from atom.structured_output.params import StructuredOutput
from atom.structured_output.trials.messages import (
    Cancel,
    FrameReader,
    Setup,
    ToTrials,
    TrialLimits,
    Try,
    Verdict,
    encode_frame,
)
from atom.structured_output.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 2.0
_PIECE_BYTES = 1 << 16
_ENDED = "the process that tries grammars ended"


class TrialsEndedError(RuntimeError):
    """The process ended before the trial did; a new process can be tried."""


class Trials(Protocol):
    """Finds out whether grammars compile within the limits."""

    limits: TrialLimits

    def start(self) -> None:
        """Start a process unless one is running, without waiting until it is ready.

        Raises:
            OSError, TrialsEndedError: when none can be started, or after `shutdown`.
        """

    def submit(self, vocabulary: Vocabulary, wanted: StructuredOutput) -> Future[float]:
        """Try a grammar; the result is the compile time in seconds.

        Cancelling the future ends the trial. It fails with GrammarError when the grammar cannot be
        used, and with TrialsEndedError when the process ends.

        Raises:
            OSError, TrialsEndedError: as `start`.
        """

    def shutdown(self) -> None: ...


class TrialProcess:
    """Starts the process on demand, and again after it has ended.

    Thread-safe. `submit` and cancelling never wait for the process.
    """

    def __init__(self, limits: TrialLimits | None = None) -> None:
        self.limits = limits or TrialLimits()
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id; None before the first trial."""
        return None if self._connection is None else self._connection.pid

    def start(self) -> None:
        with self._lock:
            self._connect()

    def submit(self, vocabulary: Vocabulary, wanted: StructuredOutput) -> Future[float]:
        with self._lock:
            return self._connect().submit(Setup(vocabulary, self.limits), wanted)

    def _connect(self) -> _Connection:
        if self._is_closed:
            raise TrialsEndedError("the engine is shutting down")
        if self._connection is None or self._connection.has_ended:
            self._connection = _Connection()
        return self._connection

    def shutdown(self) -> None:
        """End the process."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()


class _Connection:
    """One trial process, with a writer and a reader thread.

    The threads hold no reference to this object; they end when it is closed or garbage-collected.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "atom.structured_output.trials.process"]
        # Unbuffered, so that a read returns what is available.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._pending = _Pending()
        self._outbox: SimpleQueue[ToTrials | None] = SimpleQueue()
        self._num_trials = 0
        for run, argument in ((_write, self._outbox), (_read, self._pending)):
            threading.Thread(
                target=run, args=(self._process, argument), name="grammar-trials", daemon=True
            ).start()
        self._end = weakref.finalize(self, self._outbox.put, None)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._pending.is_closed

    def submit(self, setup: Setup, wanted: StructuredOutput) -> Future[float]:
        if self._num_trials == 0:
            self._outbox.put(setup)
        self._num_trials += 1
        trial = self._pending.add(self._num_trials)
        trial.add_done_callback(
            partial(_tell_cancelled, self._outbox, self._pending, self._num_trials)
        )
        self._outbox.put(Try(self._num_trials, wanted))
        return trial

    def close(self) -> None:
        """End the process and wait for it."""
        self._end()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Pending:
    """The unfinished trials of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: dict[int, Future[float]] = {}
        self.is_closed = False

    def add(self, trial_id: int) -> Future[float]:
        trial: Future[float] = Future()
        with self._lock:
            if not self.is_closed:
                self._trials[trial_id] = trial
                return trial
        trial.set_exception(TrialsEndedError(_ENDED))
        return trial

    def end(self, verdict: Verdict) -> None:
        with self._lock:
            trial = self._trials.pop(verdict.id, None)
        if trial is None or not trial.set_running_or_notify_cancel():
            return
        if verdict.error:
            kind = CompileStoppedError if verdict.was_stopped else GrammarError
            trial.set_exception(kind(verdict.error))
        else:
            trial.set_result(verdict.seconds)

    def forget(self, trial_id: int) -> None:
        with self._lock:
            self._trials.pop(trial_id, None)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            trials, self._trials = self._trials, {}
        for trial in trials.values():
            if trial.set_running_or_notify_cancel():
                trial.set_exception(TrialsEndedError(_ENDED))


def _tell_cancelled(
    outbox: SimpleQueue[ToTrials | None], pending: _Pending, trial_id: int, trial: Future[float]
) -> None:
    if trial.cancelled():
        pending.forget(trial_id)
        outbox.put(Cancel(trial_id))


def _write(process: subprocess.Popen[bytes], outbox: SimpleQueue[ToTrials | None]) -> None:
    """Send the messages in the outbox, until None."""
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            while (message := outbox.get()) is not None:
                data = memoryview(encode_frame(message))
                while data:
                    data = data[pipe.write(data) :]
    except BrokenPipeError:
        return  # the process ended; its reader tells


def _read(process: subprocess.Popen[bytes], pending: _Pending) -> None:
    """Handle verdicts until the process ends."""
    assert process.stdout is not None
    frames = FrameReader()
    with process.stdout as pipe:
        while piece := pipe.read(_PIECE_BYTES):
            for frame in frames.feed(piece):
                pending.end(msgspec.msgpack.decode(frame, type=Verdict))
    status = process.wait()
    if status:
        logger.warning("the process that tries grammars ended with status %d", status)
    pending.close()
