"""Every field of a request says what the sampler needs of it, and whether steps must wait."""

from __future__ import annotations

from typing import Any

import pytest

from atom.messages import EngineRequest
from atom.model_engine.sequence import Sequence
from atom.sampling_params import COUNTS_OUTPUTS, READS_OUTPUTS, Needs, SamplingParams
from atom.structured_output.outputs_params import StructuredOutputsParams
from atom.structured_output.params import StructuredOutput

# A value of each field, what it needs beyond a plain sample, and whether the host must know the
# last token before the next one is chosen: always, where steps verify drafts, or never.
ALWAYS, WITH_DRAFTS, NEVER = (True, True), (False, True), (False, False)
FIELDS: dict[str, tuple[Any, Needs, tuple[bool, bool]]] = {
    "temperature": (0.5, Needs.TEMPERATURE, NEVER),
    "top_p": (0.5, Needs.TOP_P, NEVER),
    "top_k": (5, Needs.TOP_K, NEVER),
    "min_p": (0.1, Needs.MIN_P, NEVER),
    "logprobs": (1, Needs.LOGPROBS, NEVER),
    "prompt_logprobs": (1, Needs.PROMPT_LOGPROBS, NEVER),
    "logit_bias": ({3: 1.0}, Needs.BIAS, NEVER),
    "allowed_token_ids": ([1, 2], Needs.ALLOWED, NEVER),
    "presence_penalty": (0.5, Needs.PENALTIES, WITH_DRAFTS),
    "frequency_penalty": (0.5, Needs.PENALTIES, WITH_DRAFTS),
    "repetition_penalty": (1.5, Needs.PENALTIES, WITH_DRAFTS),
    "min_tokens": (2, Needs.MIN_TOKENS, ALWAYS),
    "bad_word_ids": ([[1]], Needs.BAD_WORDS, ALWAYS),
    "logits_processors": ([print], Needs.PROCESSORS, ALWAYS),
    "structured_output": (StructuredOutput.regex("a"), Needs.GRAMMAR, ALWAYS),
    "structured_outputs": (StructuredOutputsParams(regex="a"), Needs.GRAMMAR, ALWAYS),
}
# Those that neither change how a token is drawn nor read the tokens so far. `bad_words` become
# `bad_word_ids` where the tokenizer is.
OTHERS = {
    *("n", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "bad_words"),
    *("include_stop_str_in_output", "skip_special_tokens", "kept_special_tokens"),
    *("speculation", "num_speculative_tokens"),
}
PLAIN = {"temperature": 1.0, "max_tokens": 8}


def test_every_field_is_known() -> None:
    """A new one has to be put in one of the tables, and then is tested."""
    assert set(SamplingParams.__struct_fields__) == FIELDS.keys() | OTHERS
    assert not FIELDS.keys() & OTHERS


def test_every_need_has_a_field() -> None:
    together = Needs(0)
    for _, needs, _ in FIELDS.values():
        together |= needs
    assert together == ~Needs(0)
    assert not READS_OUTPUTS & COUNTS_OUTPUTS


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_says_what_it_needs(name: str) -> None:
    value, needs, waits = FIELDS[name]
    params = SamplingParams(**{**PLAIN, name: value})
    assert params.needs == needs | Needs.TEMPERATURE
    greedy = SamplingParams(**{**PLAIN, name: value, "temperature": 0.0})
    sampling = Needs.TEMPERATURE | Needs.TOP_K | Needs.TOP_P | Needs.MIN_P
    assert greedy.needs == needs & ~sampling
    request = EngineRequest(id="a", prompt_token_ids=[1, 2, 3], params=params, seed=0)
    sequence = Sequence(request, (0, 0), 8, frozenset())
    assert (sequence.must_wait(drafts=False), sequence.must_wait(drafts=True)) == waits


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 2, float("nan")])
def test_an_impossible_top_p_is_refused_with_its_range(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^top_p must be in \(0, 1\], got {value}$"):
        SamplingParams(top_p=value)
    assert SamplingParams(top_p=1).top_p == 1


def test_no_allowed_token_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed_token_ids must hold at least one token id"):
        SamplingParams(allowed_token_ids=[])
