"""The interface of what watches requests: metrics, logs, traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from atom.outputs import RequestMetrics
from atom.sampling_params import SamplingParams


@dataclass(frozen=True)
class Caller:
    """Who asks, by the names that logs, counters and traces say.

    Attributes:
        request_id: of the HTTP request; several requests of a client may share one.
        key: the name of the API key, never the key; empty without keys.
        trace_parent: the client's span, as W3C's header `traceparent` names it.
    """

    request_id: str = ""
    key: str = ""
    trace_parent: str | None = None


NOBODY = Caller()


@dataclass(frozen=True)
class FinishedRequest:
    """A request that finished or was aborted.

    Attributes:
        finish_reason: with n > 1 that of the first sequence, or `abort` if any was aborted.
        num_output_tokens: of all sequences.
    """

    caller: Caller
    params: SamplingParams
    metrics: RequestMetrics
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class EngineObserver(Protocol):
    """Called by the thread that processes the engine's outputs; must be fast.

    Times are in seconds. A request with n > 1 has one time to first token and n sequences.
    """

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """A request's first token arrived `seconds` after the request."""

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        """A sequence got tokens, `seconds` after its previous ones (None for the first)."""

    def on_request_finished(self, request: FinishedRequest) -> None:
        """A request finished or was aborted."""


class NullObserver:
    """Ignores all events."""

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        pass

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        pass

    def on_request_finished(self, request: FinishedRequest) -> None:
        pass


class Observers:
    """Tells several."""

    def __init__(self, observers: Sequence[EngineObserver]) -> None:
        self._observers = observers

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        for observer in self._observers:
            observer.on_first_token(seconds, num_prompt_tokens)

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        for observer in self._observers:
            observer.on_tokens(num_tokens, seconds)

    def on_request_finished(self, request: FinishedRequest) -> None:
        for observer in self._observers:
            observer.on_request_finished(request)
