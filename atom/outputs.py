"""What generation returns; fields follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from atom.stats import SpecDecodeStats


@dataclass(frozen=True)
class Logprob:
    """One candidate token at one position; `rank` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


# Candidates of one position by token id: the chosen token first, then the most likely ones.
PositionLogprobs = dict[int, Logprob]


class StepTokens(NamedTuple):
    """How the tokens came that one step added to a completion.

    The first `num_accepted` of them are accepted drafts, all of them where the text ended earlier.
    The token after these corrects a refused draft, or was sampled because no draft was left.

    Attributes:
        num_tokens: tokens of the completion.
        num_drafts, num_accepted: drafts that the step verified, and accepted.
        source: who made the drafts, such as `eagle3` or `lookup`; None without drafts.
    """

    num_tokens: int
    num_drafts: int = 0
    num_accepted: int = 0
    source: str | None = None


@dataclass
class CompletionOutput:
    """One of the `n` completions of a request.

    Attributes:
        index: 0 to n - 1.
        text, token_ids, logprobs, steps: everything, or only what is new when streaming.
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
    steps: list[StepTokens] = field(default_factory=list)

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
    `num_image_tokens` are those of the prompt that images fill.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_image_tokens: int = 0
    spec_decode: SpecDecodeStats | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """What embedding a text returns; `prompt_token_ids` include special tokens."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """How well one text answers another."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """What scoring a pair of texts returns.

    Attributes:
        prompt_token_ids: of the pair, or, where a model embeds, of both one after the other.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
