"""Tries to compile grammars for an engine: `python -m atom.structured_output.trials.process`.

Whether a grammar compiles in bounded time and memory is only known by compiling it, which cannot be
stopped within a process. So this process compiles each grammar before the engine does. It exits
when its standard input closes, that is, when the engine is gone.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from typing import NoReturn

import msgspec

from atom.structured_output.params import StructuredOutput
from atom.structured_output.trials.messages import (
    Cancel,
    FrameReader,
    Setup,
    ToTrials,
    Try,
    Verdict,
    encode_frame,
)
from atom.structured_output.trials.workers import TrialWorkers
from atom.structured_output.xgrammar_backend import XGrammarBackend
from atom.structured_output.xgrammar_import import import_xgrammar_alone

_PIECE_BYTES = 1 << 16
_MODULE = "atom.structured_output.trials.process"
# Argument of a process that imports xgrammar with all its dependencies.
_COMPLETE = "--complete"


class TrialLoop:
    """Handles messages and runs the workers.

    Args:
        requests, verdicts: pipe descriptors.
    """

    def __init__(self, requests: int, verdicts: int) -> None:
        self._requests = requests
        self._verdicts = verdicts
        self._frames = FrameReader()
        self._workers: TrialWorkers | None = None

    def run(self) -> None:
        """Serve until the engine is gone."""
        seconds: float | None = None
        try:
            while True:
                pipes = [] if self._workers is None else self._workers.pipes
                ready = select.select([self._requests, *pipes], [], [], seconds)[0]
                if self._requests in ready and not self._receive():
                    return
                seconds = None if self._workers is None else self._workers.turn()
        finally:
            if self._workers is not None:
                self._workers.kill_all()

    def _receive(self) -> bool:
        """Handle what has arrived; returns false at the end of the stream."""
        piece = os.read(self._requests, _PIECE_BYTES)
        for frame in self._frames.feed(piece):
            self._handle(msgspec.msgpack.decode(frame, type=ToTrials))
        return bool(piece)

    def _handle(self, message: ToTrials) -> None:
        match message:
            case Setup(vocabulary, limits):
                backend = XGrammarBackend(vocabulary)
                # Fills xgrammar's cache with parts of most schemas, which the forks inherit.
                backend.compile(StructuredOutput.json_object())
                stdio = (self._requests, self._verdicts)
                self._workers = TrialWorkers(backend, limits, self._report, stdio)
            case Try():
                self._require_workers().add(message)
            case Cancel(trial_id):
                self._require_workers().cancel(trial_id)

    def _require_workers(self) -> TrialWorkers:
        if self._workers is None:
            raise TypeError("the first message must be Setup")
        return self._workers

    def _report(self, verdict: Verdict) -> None:
        data = memoryview(encode_frame(verdict))
        while data:
            data = data[os.write(self._verdicts, data) :]


def main() -> NoReturn:
    # Signals reach the whole process group; this process must not exit before the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _COMPLETE not in sys.argv:
        try:
            import_xgrammar_alone()
        except Exception:
            # Slower and larger, but works; nothing has been read from the pipe yet.
            os.execv(sys.executable, [sys.executable, "-m", _MODULE, _COMPLETE])
    requests, verdicts = os.dup(0), os.dup(1)
    # Keep libraries from reading or writing the pipes.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    with suppress(BrokenPipeError):  # the engine is gone
        TrialLoop(requests, verdicts).run()
    # Normal interpreter shutdown would take a second.
    os._exit(0)


if __name__ == "__main__":
    main()
