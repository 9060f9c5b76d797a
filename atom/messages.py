"""What crosses the boundary of the engine: requests in, step reports out.

The same types serve the in-process engine and, encoded by msgspec, the server's
engine process. Nothing here holds tensors.
"""

from __future__ import annotations

import enum

import msgspec

from atom.quoting import quote
from atom.sampling_params import SamplingParams
from atom.stats import SpecDecodeStats


class FinishReason(str, enum.Enum):
    """Why a sequence ended; the values are the API's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A request with n > 1 becomes n of these.

    Attributes:
        id: unique among live sequences.
        seed: always set; the frontend draws one when the user gave none.
        priority: lower runs earlier; ties go by order of arrival.
        cache_salt: sequences share cached prefixes only within one salt.
        arrival_time: seconds, `time.monotonic()`.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    priority: int = 0
    cache_salt: str = ""
    arrival_time: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Candidates of one position: the chosen token first, then the most likely ones.

    Log-probabilities are those of the model's unmodified distribution. `ranks` start at 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SequenceOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one step produced for one sequence.

    Attributes:
        token_ids: new tokens, one or more; empty when only the end is reported.
        logprobs: one entry per new token, when asked for.
        prompt_logprobs: one entry per prompt token (the first None), with the first output.
        finish_reason, stop_reason: set on the last output; `stop_reason` is the stop token
            id that ended the sequence unless it is the model's own end token.
        num_cached_tokens: prompt tokens served by the prefix cache.
        num_draft_tokens, num_accepted_tokens: drafts that the step verified, and kept.
        draft_source: who made them; None when there were none.
        first_scheduled_time: seconds, `time.monotonic()`.
    """

    id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_source: str | None = None
    first_scheduled_time: float | None = None


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The engine's state after a step; counters are totals since start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    block_size: int = 0
    kv_cache_dtype: str = ""
    num_used_blocks: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    spec_decode: SpecDecodeStats | None = None

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that live sequences hold, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0


class RefusedSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that ended because it turned out that it cannot run as given.

    `is_fault` says that computing it raised an error, for which the request need not be to blame.
    """

    id: str
    message: str
    param: str | None = None
    is_fault: bool = False

    def error(self) -> RequestRefusedError | RequestFailedError:
        """What its request ends with."""
        if self.is_fault:
            return RequestFailedError(self.message)
        return RequestRefusedError(self.message, self.param)


class StepReport(msgspec.Struct, kw_only=True):
    """All that one engine step has to tell the frontend."""

    outputs: list[SequenceOutput]
    stats: EngineStats
    refused: list[RefusedSequence] = []

    def check(self) -> None:
        """For programs all of whose sequences have to finish.

        Raises:
            RequestRefusedError, RequestFailedError: when one cannot.
        """
        if self.refused:
            raise self.refused[0].error()


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must fit in, known once the KV pool is allocated.

    Attributes:
        kv_cache_dtype: torch's name of the type that the pool is stored in.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    max_logprobs: int
    kv_cache_dtype: str = ""

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.block_size


class RequestRefusedError(ValueError):
    """The request can never run as given; the message holds the numbers.

    `param` names the offending field of the request.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestFailedError(RuntimeError):
    """Computing this request raised an error, also when it was tried again by itself."""


class EngineDeadError(RuntimeError):
    """The engine stopped; nothing more can be generated."""


def check_request(
    prompt_token_ids: list[int], params: SamplingParams, limits: EngineLimits
) -> None:
    """Refuse at submission what could never finish or would be silently ignored.

    Raises:
        RequestRefusedError: with the numbers that do not fit.
    """
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestRefusedError("the prompt holds no tokens", "prompt")
    if num_prompt >= limits.max_model_len:
        raise RequestRefusedError(
            f"the prompt has {num_prompt} tokens, which leaves no room to generate in a context "
            f"of {limits.max_model_len}",
            "prompt",
        )
    lowest, highest = min(prompt_token_ids), max(prompt_token_ids)
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestRefusedError(
            f"prompt token id {quote(wrong)} is outside the vocabulary of {limits.vocab_size}",
            "prompt",
        )
    if params.max_tokens is not None and num_prompt + params.max_tokens > limits.max_model_len:
        raise RequestRefusedError(
            f"{num_prompt} prompt tokens and max_tokens={params.max_tokens} exceed the context of "
            f"{limits.max_model_len}",
            "max_tokens",
        )
    budget = params.max_tokens or (limits.max_model_len - num_prompt)
    # The last generated token is never written to the cache.
    if num_prompt + budget - 1 > limits.num_kv_tokens:
        raise RequestRefusedError(
            f"{num_prompt} prompt tokens and up to {budget} generated ones need more KV cache than "
            f"the {limits.num_kv_tokens} tokens there are ({limits.num_blocks} blocks of "
            f"{limits.block_size}); lower max_tokens or give the engine more KV cache memory",
            "max_tokens",
        )
    for name, wanted in (
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ):
        if wanted is not None and wanted > limits.max_logprobs:
            raise RequestRefusedError(
                f"{name}={wanted} exceeds the engine's max_logprobs={limits.max_logprobs}", name
            )
    token_ids = [*(params.stop_token_ids or ()), *(params.logit_bias or ())]
    bad = next((t for t in token_ids if t >= limits.vocab_size), None)
    if bad is not None:
        raise RequestRefusedError(
            f"token id {quote(bad)} of stop_token_ids or logit_bias is outside the vocabulary of "
            f"{limits.vocab_size}"
        )
