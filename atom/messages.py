"""The engine's interface: requests in, step reports out.

Used in process, and as msgpack between the server and its engine process. No tensors.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import msgspec

from atom.quoting import quote
from atom.sampling_params import SamplingParams
from atom.stats import ExpectedAcceptance, SpecDecodeStats


class FinishReason(str, enum.Enum):
    """Why a sequence ended; the values are those of the API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class MRopeGrid(msgspec.Struct, frozen=True):
    """Where the tokens of an image are that rotate by three numbers: time, row and column.

    Attributes:
        times: of each frame, ascending from 0.
        rows, columns: of each frame; its tokens come row by row.
    """

    times: tuple[int, ...]
    rows: int
    columns: int

    @property
    def extent(self) -> int:
        """How far behind its first place the next token's is."""
        return max(self.times[-1] + 1, self.rows, self.columns)


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """An image in a prompt, as its encoder takes it.

    Attributes:
        digest: SHA-256 of all that its encoder reads: equal images have equal digests.
        ranges: where its rows go in the prompt, in order: first position and number.
        pixels, shape: uint8, channels third from the end, not normalised yet.
        grid: what else the encoder must know, as the family's processor makes it.
        mean, std: of each channel, in units of `pixels`; what is encoded is (pixels - mean) / std.
        mrope_grid: of the tokens in each range; None where tokens rotate by their position.
    """

    digest: bytes
    ranges: tuple[tuple[int, int], ...]
    pixels: bytes
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mrope_grid: MRopeGrid | None = None

    @property
    def start(self) -> int:
        """The first position that depends on it."""
        return self.ranges[0][0]

    @property
    def stop(self) -> int:
        """The position behind its last row."""
        return sum(self.ranges[-1])

    @property
    def num_tokens(self) -> int:
        return sum([count for _, count in self.ranges])


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate; a request with n > 1 becomes n of these.

    Attributes:
        id: unique among live sequences.
        seed: drawn by the frontend if the user gave none.
        priority: lower runs earlier; ties go by turn, then by arrival.
        cache_salt: prefixes are shared only between sequences with the same salt.
        arrival_time: seconds, `time.monotonic()`.
        turn: of one priority the lowest runs first.
        images: in the order of their places, which do not overlap.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    priority: int = 0
    cache_salt: str = ""
    arrival_time: float = 0.0
    turn: int = 0
    images: tuple[ImageInput, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of one position: the chosen token first, then the most likely tokens.

    They are of the model's unmodified distribution. `ranks` start at 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SequenceOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one step produced for one sequence.

    Attributes:
        token_ids: new tokens; empty only when the end alone is reported.
        logprobs: one entry per new token, if requested.
        prompt_logprobs: one entry per prompt token (the first is None), in the first output.
        finish_reason, stop_reason: set in the last output; `stop_reason` is the stop token id that
            ended the sequence, None if it is the model's EOS token.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_draft_tokens, num_accepted_tokens: drafts that the step verified, and accepted.
        draft_source: their source; None without drafts.
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
    """The engine's state after a step; counters are totals since start.

    Attributes:
        num_lookup_tokens: that the lookup for drafts holds: live sequences and recent outputs.
        num_decode_steps: those of `num_steps` that compute no prompts.
        num_replayed_decode_steps: of them, those whose target was a graph, or a program on a CPU.
        num_replayed_choice_steps: of them, those whose choice of tokens was.
        num_draft_steps, num_replayed_draft_steps: the same of what their proposer does, in steps
            in which there is one.
        num_mixed_steps: those of `num_steps` that compute prompts beside sequences that decode.
        mm_cache_queries, mm_cache_hits: images that steps needed, and those of them whose rows were
            known; each counts once each time its sequence starts.
        encoder_seconds: that the others took to encode.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    block_size: int = 0
    kv_cache_dtype: str = ""
    num_used_blocks: int = 0
    num_window_blocks: int = 0
    num_used_window_blocks: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    num_decode_steps: int = 0
    num_replayed_decode_steps: int = 0
    num_replayed_choice_steps: int = 0
    num_draft_steps: int = 0
    num_replayed_draft_steps: int = 0
    num_mixed_steps: int = 0
    num_lookup_tokens: int = 0
    mm_cache_queries: int = 0
    mm_cache_hits: int = 0
    encoder_seconds: float = 0.0
    spec_decode: SpecDecodeStats | None = None
    expected_acceptance: ExpectedAcceptance | None = None

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks held by live sequences, 0 to 1; where layers with a window have
        blocks of their own, the larger of both shares.
        """
        share = self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0
        if self.num_window_blocks:
            share = max(share, self.num_used_window_blocks / self.num_window_blocks)
        return share


class RefusedSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that ended because it cannot run as requested.

    `is_fault`: computing it raised an error, which the request need not have caused.
    """

    id: str
    message: str
    param: str | None = None
    is_fault: bool = False

    def error(self) -> RequestRefusedError | RequestFailedError:
        """The exception to end its request with."""
        if self.is_fault:
            return RequestFailedError(self.message)
        return RequestRefusedError(self.message, self.param)


class StepReport(msgspec.Struct, kw_only=True):
    """The results of one engine step.

    Attributes:
        stats: after the step, for those who cannot ask the engine: in another process.
        num_tokens, seconds: that it computed and took, for the same.
    """

    outputs: list[SequenceOutput]
    stats: EngineStats | None = None
    refused: list[RefusedSequence] = []
    num_tokens: int = 0
    seconds: float = 0.0

    def check(self) -> None:
        """Raise if any sequence was refused.

        Raises:
            RequestRefusedError, RequestFailedError: for the first one.
        """
        if self.refused:
            raise self.refused[0].error()


class WindowLimits(msgspec.Struct, frozen=True):
    """Blocks of layers with a sliding window.

    Attributes:
        num_tokens, tile: as in `CacheWindow`.
        num_blocks: of their pool.
    """

    num_tokens: int
    tile: int
    num_blocks: int


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend has to know of a model, which the engine finds.

    Attributes:
        folder: in Hugging Face format.
        name: as the user gave it.
        model_type: of its configuration.
        sampling_defaults: `SamplingParams` fields for requests that do not give them.
        sees: whether transformers' code computes it and reads images.
    """

    folder: str
    name: str
    model_type: str
    sampling_defaults: dict[str, Any]
    sees: bool

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must fit in, known once the KV pool is allocated.

    Attributes:
        kv_cache_dtype: torch's name of the storage dtype.
        weights: how they are quantised and their inputs rounded, in words; "" if they are not.
        runs_on: dtype, device and kernels, in words.
        synthetic_acceptance_length: drafts are accepted at random, so that texts mean nothing; None
            if they are not.
        window: of layers that have blocks of their own for it; None if there are none.
        state_slots: recurrent states that are kept for prefix caching; None where no layer has any.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    max_logprobs: int
    kv_cache_dtype: str = ""
    weights: str = ""
    runs_on: str = ""
    synthetic_acceptance_length: float | None = None
    window: WindowLimits | None = None
    state_slots: int | None = None

    @property
    def fingerprint(self) -> str | None:
        """What every answer must say of how it was made; None where it was made as it should be."""
        length = self.synthetic_acceptance_length
        return None if length is None else f"synthetic-acceptance-length-{length:g}"

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.block_size


class RequestRefusedError(ValueError):
    """The request can never run as given; the message has the numbers.

    `param` is the name of the offending request field.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestRefusedError):
    """The prompt, or the prompt and what may be generated, exceeds the context.

    Its first words are those by which clients tell this error from others.

    Args:
        num_prompt_tokens: of the prompt; with `is_at_least`, a lower bound.
        max_tokens: that may be generated; None where the prompt leaves no room for any.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        max_tokens: int | None = None,
        *,
        is_at_least: bool = False,
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens
        limit = f"This model's maximum context length is {max_model_len} tokens"
        if max_tokens is None:
            has = "has at least" if is_at_least else "has"
            super().__init__(
                f"{limit}, and the prompt {has} {num_prompt_tokens}, which leaves no room to "
                "generate; shorten it",
                "prompt",
            )
        else:
            super().__init__(
                f"{limit}, and this request needs up to {num_prompt_tokens + max_tokens}: "
                f"{num_prompt_tokens} of the prompt and {max_tokens} to generate; shorten the "
                "prompt or ask for fewer",
                "max_tokens",
            )


class RequestFailedError(RuntimeError):
    """Computing this request raised an error, also when it ran alone."""


class EngineDeadError(RuntimeError):
    """The engine stopped; nothing more can be generated."""


def check_text(text: str, param: str) -> None:
    """Raises RequestRefusedError for half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestRefusedError(f"{param} is not valid Unicode: {error}", param) from error


def check_request(
    prompt_token_ids: list[int], params: SamplingParams, limits: EngineLimits
) -> None:
    """Refuse a request that could never finish, or part of which would be ignored.

    Raises:
        RequestRefusedError: with the numbers that do not fit; a `ContextLengthError` where it
            is the context that they do not fit in.
    """
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestRefusedError("the prompt holds no tokens", "prompt")
    if num_prompt + (params.max_tokens != 0) > limits.max_model_len:
        raise ContextLengthError(num_prompt, limits.max_model_len)
    lowest, highest = min(prompt_token_ids), max(prompt_token_ids)
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestRefusedError(
            f"prompt token id {quote(wrong)} is outside the vocabulary of {limits.vocab_size}",
            "prompt",
        )
    if params.max_tokens is not None and num_prompt + params.max_tokens > limits.max_model_len:
        raise ContextLengthError(num_prompt, limits.max_model_len, params.max_tokens)
    budget = params.max_tokens
    if budget is None:
        budget = limits.max_model_len - num_prompt
    # The last generated token is never written to the KV cache.
    if num_prompt + max(budget - 1, 0) > limits.num_kv_tokens:
        raise RequestRefusedError(
            f"{num_prompt} prompt tokens and up to {budget} generated ones need more KV cache than "
            f"the {limits.num_kv_tokens} tokens there are ({limits.num_blocks} blocks of "
            f"{limits.block_size}); lower max_tokens or give the engine more KV cache memory",
            "max_tokens",
        )
    _check_logprobs(params, limits)
    if params.structured_output is not None and limits.synthetic_acceptance_length is not None:
        raise RequestRefusedError(
            "structured output is not possible with --speculative-synthetic-acceptance-length: "
            "drafts are accepted at random, against any grammar",
            "structured_output",
        )
    _check_token_ids(params, limits)


def _check_logprobs(params: SamplingParams, limits: EngineLimits) -> None:
    for name, wanted in (
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ):
        if wanted is None:
            continue
        if wanted > limits.max_logprobs or (
            wanted == -1 and limits.max_logprobs < limits.vocab_size
        ):
            raise RequestRefusedError(
                f"{name}={wanted} exceeds the engine's max_logprobs={limits.max_logprobs}", name
            )


def _check_token_ids(params: SamplingParams, limits: EngineLimits) -> None:
    token_ids = [
        *(params.stop_token_ids or ()),
        *(params.logit_bias or ()),
        *(params.allowed_token_ids or ()),
    ]
    bad = next((t for t in token_ids if t >= limits.vocab_size), None)
    if bad is not None:
        raise RequestRefusedError(
            f"token id {quote(bad)} of stop_token_ids, logit_bias or allowed_token_ids is outside "
            f"the vocabulary of {limits.vocab_size}"
        )
