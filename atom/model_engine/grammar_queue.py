"""Requests wait here, before the scheduler, until their grammars are compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_any
from typing import NamedTuple

from atom.messages import (
    EngineRequest,
    FinishReason,
    RefusedSequence,
    RequestRefusedError,
    SequenceOutput,
)
from atom.structured_output.base import Grammar, GrammarError
from atom.structured_output.cache import GrammarCache
from atom.structured_output.params import StructuredOutput
from atom.structured_output.trial_messages import TOO_LONG

logger = logging.getLogger(__name__)

PARAM = "structured_output"
# A new request or an abort is met with this delay at most while only grammars are awaited.
_WAIT_SECONDS = 0.02
# The last resort, should all else hang. `TrialLimits` say what compiling may take, and the first
# grammar waits for a process to start.
COMPILE_SECONDS = 180.0


class _Waiting(NamedTuple):
    """A request, and when it is given up, by `time.monotonic()`."""

    request: EngineRequest
    deadline: float


class GrammarQueue:
    """Holds waiting requests, and the grammars of those that the scheduler has.

    Args:
        compile_seconds: a request that waits longer than this for its grammar is refused.
    """

    def __init__(self, grammars: GrammarCache, compile_seconds: float = COMPILE_SECONDS) -> None:
        self._grammars = grammars
        self._compile_seconds = compile_seconds
        self._waiting: dict[str, _Waiting] = {}
        # Of every live sequence with a grammar: what is held stays compiled.
        self._futures: dict[str, Future[Grammar]] = {}

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: EngineRequest) -> None:
        """Begin to compile a request's grammar.

        Raises:
            ValueError: when a live sequence has its id.
        """
        if request.id in self._futures:
            raise ValueError(f"request id {request.id!r} is already in use by a live request")
        wanted = request.params.structured_output
        assert wanted is not None
        deadline = time.monotonic() + self._compile_seconds
        self._waiting[request.id] = _Waiting(request, deadline)
        self._futures[request.id] = self._grammars.submit(wanted)

    def compile(self, wanted: StructuredOutput) -> None:
        """Wait for a grammar.

        Raises:
            RequestRefusedError: when it cannot be compiled.
        """
        future = self._grammars.submit(wanted)
        try:
            _check(future, self._compile_seconds)
        finally:  # also when the user lost patience
            if not future.done():
                self._grammars.abandon(wanted)

    def wait(self) -> None:
        """Wait a little for one of the grammars, if any is awaited."""
        if self._waiting:
            futures = [self._futures[id] for id in self._waiting]
            wait_any(futures, _WAIT_SECONDS, FIRST_COMPLETED)

    def release(self, admit: Callable[[EngineRequest], None]) -> list[RefusedSequence]:
        """Hand on every request whose grammar is compiled; what cannot run is returned."""
        refused: list[RefusedSequence] = []
        now = time.monotonic()
        due = [
            id
            for id, waiting in self._waiting.items()
            if self._futures[id].done() or waiting.deadline <= now
        ]
        for id in due:
            request = self._waiting.pop(id).request
            try:
                _check(self._futures[id], 0)
                admit(request)
            except RequestRefusedError as error:
                self._abandon(request)
                refused.append(RefusedSequence(id, str(error), error.param))
        return refused

    def abort(self, ids: Iterable[str]) -> list[SequenceOutput]:
        """Let go of sequences; the outputs report the ends of those that were waiting."""
        outputs = []
        for id in ids:
            waiting = self._waiting.pop(id, None)
            if waiting is not None:
                self._abandon(waiting.request)
                outputs.append(SequenceOutput(id=id, finish_reason=FinishReason.ABORT))
            self._futures.pop(id, None)
        return outputs

    def forget(self, ids: Iterable[str]) -> None:
        """Let go of the grammars of sequences that ended."""
        for id in ids:
            self._futures.pop(id, None)

    def _abandon(self, request: EngineRequest) -> None:
        """Let nobody compile for a request alone that waits no more."""
        future = self._futures.pop(request.id)
        wanted = request.params.structured_output
        if wanted is not None and not any(other is future for other in self._futures.values()):
            self._grammars.abandon(wanted)


def _check(future: Future[Grammar], seconds: float) -> None:
    """Raises RequestRefusedError when the grammar could not be compiled, or not so soon."""
    try:
        future.result(seconds)
    except FutureTimeoutError as error:
        raise RequestRefusedError(f"{PARAM}: {TOO_LONG}", PARAM) from error
    except GrammarError as error:
        raise RequestRefusedError(f"{PARAM}: {error}", PARAM) from error
    except Exception as error:
        logger.exception("a grammar could not be compiled")
        message = f"{PARAM} cannot be compiled: {type(error).__name__}: {error}"
        raise RequestRefusedError(message, PARAM) from error
