"""What a request may ask of the sampler."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from atom.quoting import quote
from atom.structured_output.outputs_params import StructuredOutputsParams
from atom.structured_output.params import StructuredOutput

# (generated token ids, logits) -> logits, or (prompt token ids, generated token ids, logits) ->
# logits; the logits are [vocab] float32 on the CPU.
LogitsProcessor = Callable[..., Any]

# As `logprobs`: of the whole vocabulary.
ALL_LOGPROBS = -1


class Needs(enum.IntFlag):
    """What choosing a request's tokens takes beyond argmax."""

    TEMPERATURE = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    LOGPROBS = 16
    PROMPT_LOGPROBS = 32
    # From here on: edits of the logits.
    GRAMMAR = 64
    MIN_TOKENS = 128
    BIAS = 256
    PENALTIES = 512
    ALLOWED = 1024
    BAD_WORDS = 2048
    PROCESSORS = 4096


EDITS = (
    Needs.GRAMMAR
    | Needs.MIN_TOKENS
    | Needs.BIAS
    | Needs.PENALTIES
    | Needs.ALLOWED
    | Needs.BAD_WORDS
    | Needs.PROCESSORS
)

# What looks at the tokens so far: the host must know the last one before the next is chosen, so no
# step that samples it is launched ahead. `MIN_TOKENS` counts them, and is over once there are so
# many.
READS_OUTPUTS = Needs.GRAMMAR | Needs.BAD_WORDS | Needs.PROCESSORS
# Tokens that the device counts; of drafts only the host knows which they are.
COUNTS_OUTPUTS = Needs.PENALTIES


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """How the tokens of one request are chosen and when generation ends.

    Field names, defaults and the order of the first sixteen are those of vLLM's API. Every
    impossible value raises `ValueError` when an instance is built, and when one that was changed
    since is used: a request has a copy of its own.

    Attributes:
        n: number of independent completions.
        presence_penalty, frequency_penalty: OpenAI's, over the generated tokens, in [-2, 2].
        repetition_penalty: over prompt and generated tokens, in [1e-6, 1e6]; 1 is off. Beyond,
            float32 logits could overflow.
        temperature: the logits are divided by it; below 1e-5 the most likely token is taken, as
            with 0: differences between logits would drown in rounding errors.
        top_p: smallest set of tokens whose probability reaches it, in (0, 1]; below 1e-7 that is
            the most likely token in every vocabulary there is.
        top_k: number of most likely tokens kept; 0 or -1 keeps all.
        min_p: tokens less likely than `min_p` times the most likely are dropped, in [0, 1].
        seed: makes the output a function of the request alone; None draws one per request.
        stop: strings that end generation, removed from the text unless
            `include_stop_str_in_output`.
        stop_token_ids: token ids that end generation, besides the model's own end tokens.
        ignore_eos: go on after the model's end tokens.
        max_tokens: most tokens to generate; None means up to the end of the context, 0 computes
            the prompt alone.
        min_tokens: end tokens cannot be sampled, nor stop strings match, before that many tokens.
        logprobs: None, or how many alternatives to report beside the sampled token; -1 for all.
        prompt_logprobs: the same for every prompt token but the first.
        include_stop_str_in_output: leave the stop string that ended generation in the text.
        skip_special_tokens: leave special tokens out of the text.
        kept_special_tokens: texts of special tokens that stay in the text nevertheless.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        allowed_token_ids: no other token can be sampled, end tokens included.
        bad_words: texts that are not generated: the last token of each cannot follow the others.
        bad_word_ids: the same as lists of token ids; what `bad_words` become is added to them.
        logits_processors: change the logits of each token on the host, before everything else;
            only offline, and each has to depend on its arguments alone.
        structured_output: a grammar that the text obeys; it decides where end tokens may come,
            also before `min_tokens` when it allows nothing else, and excludes `ignore_eos`.
        structured_outputs: another way to write `structured_output`, which it becomes.
        speculation: False verifies no drafts for this request; its tokens are the same.
        num_speculative_tokens: drafts that each forward verifies at most; None: all that are made.
            The tokens are the same.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    kept_special_tokens: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_word_ids: list[list[int]] | None = None
    logits_processors: list[Any] | None = None
    structured_output: StructuredOutput | None = None
    structured_outputs: StructuredOutputsParams | None = None
    speculation: bool = True
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            self.structured_output = self.structured_outputs.constraint()
            self.structured_outputs = None
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            wanted = (int,) if name in _INTEGERS else (int, float)
            if isinstance(value, bool) or not isinstance(value, wanted):
                raise ValueError(f"{name} must be a number, got {quote(value)}")
            is_open = name in _OPEN
            if not low <= value <= high or (is_open and value == low):  # NaN fails every comparison
                range_text = f"{'(' if is_open else '['}{_number(low)}, {_number(high)}]"
                hint = _HINTS.get(name, "")
                raise ValueError(f"{name} must be in {range_text}, got {quote(value)}{hint}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        if self.structured_output is not None and self.ignore_eos:
            raise ValueError("ignore_eos cannot be combined with structured_output")
        if not all(isinstance(s, str) and s for s in self.stop_strings):
            raise ValueError(f"stop must hold non-empty strings, got {quote(self.stop)}")
        _check_tokens("stop_token_ids", self.stop_token_ids or ())
        self._check_logit_constraints()

    @property
    def needs(self) -> Needs:
        """What choosing its tokens takes beyond argmax."""
        needs = Needs(0)
        if not self.is_greedy:
            needs |= Needs.TEMPERATURE
            needs |= Needs.TOP_K if self.top_k > 0 else Needs(0)
            needs |= Needs.TOP_P if self.top_p != 1 else Needs(0)
            needs |= Needs.MIN_P if self.min_p != 0 else Needs(0)
        if self.logprobs is not None:
            needs |= Needs.LOGPROBS
        if self.prompt_logprobs is not None:
            needs |= Needs.PROMPT_LOGPROBS
        if self.structured_output is not None:
            needs |= Needs.GRAMMAR
        if self.min_tokens > 0:
            needs |= Needs.MIN_TOKENS
        if self.logit_bias:
            needs |= Needs.BIAS
        if self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1:
            needs |= Needs.PENALTIES
        if self.allowed_token_ids is not None:
            needs |= Needs.ALLOWED
        if self.bad_word_ids:
            needs |= Needs.BAD_WORDS
        if self.logits_processors:
            needs |= Needs.PROCESSORS
        return needs

    def _check_logit_constraints(self) -> None:
        """Check what changes the logits of single tokens."""
        for token_id, bias in (self.logit_bias or {}).items():
            if not isinstance(token_id, int) or token_id < 0:
                raise ValueError(f"logit_bias keys must be token ids, got {quote(token_id)}")
            if not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise ValueError(
                    f"logit_bias[{quote(token_id)}] must be in [-100, 100], got {quote(bias)}"
                )
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must hold at least one token id")
            _check_tokens("allowed_token_ids", self.allowed_token_ids)
        if not all(isinstance(word, str) and word for word in self.bad_words or ()):
            raise ValueError(f"bad_words must hold non-empty strings, got {quote(self.bad_words)}")
        for word in self.bad_word_ids or ():
            if not word:
                raise ValueError("bad_word_ids must hold lists of at least one token id")
            _check_tokens("bad_word_ids", word)
        if not all(callable(processor) for processor in self.logits_processors or ()):
            raise ValueError("logits_processors must hold functions")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, whichever spelling was given."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, the lowest id among equals."""
        return self.temperature < _GREEDY_TEMPERATURE or self.top_p < _GREEDY_TOP_P


def _number(value: float) -> str:
    """All digits of an integer."""
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _check_tokens(name: str, token_ids: Iterable[Any]) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ValueError(f"{name} must hold token ids, got {quote(token_id)}")


# Lower ones have no use in float32.
_GREEDY_TEMPERATURE = 1e-5
_GREEDY_TOP_P = 1e-7
_INF = float("inf")
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("temperature", 0, 1e4),
    ("top_p", 0, 1),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 1e-6, 1e6),
    ("seed", -(2**63), 2**63 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("num_speculative_tokens", 1, 2**31 - 1),
    ("max_tokens", 0, 2**31 - 1),
    ("logprobs", ALL_LOGPROBS, 2**31 - 1),
    ("prompt_logprobs", ALL_LOGPROBS, 2**31 - 1),
)
_INTEGERS = {
    *("n", "top_k", "seed", "min_tokens", "max_tokens"),
    *("logprobs", "prompt_logprobs", "num_speculative_tokens"),
}
# The low end itself is impossible.
_OPEN = {"top_p"}
_HINTS = {"num_speculative_tokens": "; no drafts are verified with speculation: false"}
