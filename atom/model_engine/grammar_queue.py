"""Requests that wait for their grammar to be compiled before they enter the scheduler."""

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
from atom.structured_output.trials.messages import TOO_LONG

logger = logging.getLogger(__name__)

PARAM = "structured_output"
# While only grammars are pending, new requests and aborts are handled with at most this delay.
_WAIT_SECONDS = 0.02
# A last resort: the limits of compilation are in `TrialLimits`. Includes the start of the trial
# process, which the first grammar waits for.
COMPILE_SECONDS = 180.0


class _Waiting(NamedTuple):
    """A request and its deadline, by `time.monotonic()`."""

    request: EngineRequest
    deadline: float


class GrammarQueue:
    """Holds waiting requests, and the grammars of live sequences.

    Attributes:
        waiting: requests whose grammar is not compiled yet, by id; read-only for callers.

    Args:
        compile_seconds: a request that waits longer than this is refused.
    """

    def __init__(self, grammars: GrammarCache, compile_seconds: float = COMPILE_SECONDS) -> None:
        self._grammars = grammars
        self._compile_seconds = compile_seconds
        self.waiting: dict[str, _Waiting] = {}
        # One for each live sequence with a grammar, which keeps the grammar in the cache.
        self._futures: dict[str, Future[Grammar]] = {}

    def add(self, request: EngineRequest) -> None:
        """Start compiling the request's grammar.

        Raises:
            ValueError: when a live sequence has its id.
        """
        if request.id in self._futures:
            raise ValueError(f"request id {request.id!r} is already in use by a live request")
        wanted = request.params.structured_output
        assert wanted is not None
        deadline = time.monotonic() + self._compile_seconds
        self.waiting[request.id] = _Waiting(request, deadline)
        self._futures[request.id] = self._grammars.submit(wanted)

    def compile(self, wanted: StructuredOutput) -> None:
        """Compile a grammar, blocking.

        Raises:
            RequestRefusedError: when it cannot be compiled.
        """
        future = self._grammars.submit(wanted)
        try:
            _check(future, self._compile_seconds)
        finally:  # also on an interrupt
            if not future.done():
                self._grammars.abandon(wanted)

    def wait(self) -> None:
        """Wait up to 20 ms for one of the pending grammars."""
        if self.waiting:
            futures = [self._futures[id] for id in self.waiting]
            wait_any(futures, _WAIT_SECONDS, FIRST_COMPLETED)

    def release(self, admit: Callable[[EngineRequest], None]) -> list[RefusedSequence]:
        """Pass requests whose grammar is ready to `admit`; returns those that are refused."""
        refused: list[RefusedSequence] = []
        now = time.monotonic()
        due = [
            id
            for id, waiting in self.waiting.items()
            if self._futures[id].done() or waiting.deadline <= now
        ]
        for id in due:
            request = self.waiting.pop(id).request
            try:
                _check(self._futures[id], 0)
                admit(request)
            except RequestRefusedError as error:
                self._abandon(request)
                refused.append(RefusedSequence(id, str(error), error.param))
        return refused

    def abort(self, ids: Iterable[str]) -> list[SequenceOutput]:
        """Forget sequences; returns the outputs of those that were still waiting here."""
        outputs = []
        for id in ids:
            waiting = self.waiting.pop(id, None)
            if waiting is not None:
                self._abandon(waiting.request)
                outputs.append(SequenceOutput(id=id, finish_reason=FinishReason.ABORT))
            self._futures.pop(id, None)
        return outputs

    def forget(self, ids: Iterable[str]) -> None:
        """Release the grammars of finished sequences."""
        for id in ids:
            self._futures.pop(id, None)

    def _abandon(self, request: EngineRequest) -> None:
        """Cancel the compilation unless another request waits for it."""
        future = self._futures.pop(request.id)
        wanted = request.params.structured_output
        if wanted is not None and not any(other is future for other in self._futures.values()):
            self._grammars.abandon(wanted)


def _check(future: Future[Grammar], seconds: float) -> None:
    """Raise RequestRefusedError if compilation failed or is not done within `seconds`."""
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
