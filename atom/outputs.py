"""What generation returns; fields follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from atom.stats import SpecDecodeStats


@dataclass(frozen=True)
class Logprob:
    """One candidate token at one position; `rank` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


# Candidates of one position by token id: the chosen token first, then the most likely ones.
PositionLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One of the `n` completions of a request.

    Attributes:
        index: 0 to n - 1.
        text, token_ids, logprobs: everything, or only what is new when streaming.
        finish_reason: None while running; then `stop`, `length` or `abort`.
        stop_reason: the stop string or stop token id that ended it; None for the model's EOS token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of a request in seconds on the monotonic clock; None before the event."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A request's result, whole or, when streaming, as a delta.

    `spec_decode` has the request's totals so far; None when no draft was verified.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    spec_decode: SpecDecodeStats | None = None
