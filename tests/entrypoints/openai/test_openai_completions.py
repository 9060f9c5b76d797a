"""Completions of a real server, against transformers and through the `openai` client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from server_process import ServerProcess
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

PROMPT = "The quick brown fox"
MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()


def _logprobs(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]: row i holds the log-probabilities of token i + 1."""
    with torch.inference_mode():
        logits = reference(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits, dim=-1)


def test_greedy_text_equals_transformers(
    client: openai.OpenAI, reference: Any, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt_ids = byte_level_tokenizer.encode(PROMPT)
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([prompt_ids]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )[0, len(prompt_ids) :]
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    assert answer.choices[0].text == byte_level_tokenizer.decode(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_ids)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == len(prompt_ids) + 12


@pytest.mark.parametrize("as_token_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_gives_the_prompts_logprobs(
    client: openai.OpenAI,
    reference: Any,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    as_token_ids: bool,
    max_tokens: int,
) -> None:
    """What lm_eval asks for its loglikelihood tasks."""
    text = "naïve café 日本 😀 fox"
    ids = byte_level_tokenizer.encode(text)
    answer = client.completions.create(
        model="tiny",
        prompt=ids if as_token_ids else text,
        max_tokens=max_tokens,
        temperature=0,
        logprobs=1,
        echo=True,
        seed=1,
    )
    choice = answer.choices[0]
    columns = choice.logprobs
    assert columns is not None
    assert columns.tokens is not None
    assert columns.token_logprobs is not None
    assert columns.top_logprobs is not None
    assert columns.text_offset is not None
    assert len(columns.tokens) == len(ids) + max_tokens
    assert choice.text.startswith(text)
    if max_tokens == 0:
        assert choice.text == text
        assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens

    rows = _logprobs(reference, ids)
    expected = [float(rows[i, token]) for i, token in enumerate(ids[1:])]
    assert columns.token_logprobs[0] is None
    assert columns.top_logprobs[0] is None
    assert columns.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    for i in range(1, len(ids)):
        best = max(columns.top_logprobs[i], key=columns.top_logprobs[i].__getitem__)
        is_greedy = int(rows[i - 1].argmax()) == ids[i]
        assert (best == columns.tokens[i]) == is_greedy
    # Tokens of whole characters lie where their offset says.
    for token, offset in zip(columns.tokens[: len(ids)], columns.text_offset, strict=False):
        if not token.startswith("bytes:"):
            assert text.startswith(token, offset)


def test_an_echoed_prompt_may_fill_the_context(client: openai.OpenAI, reference: Any) -> None:
    """Nothing is generated behind it."""
    ids = [5 + i % 40 for i in range(MAX_MODEL_LEN)]
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=0, logprobs=0, echo=True
    )
    columns = answer.choices[0].logprobs
    assert columns is not None
    assert columns.token_logprobs is not None
    rows = _logprobs(reference, ids)
    expected = [float(rows[i, token]) for i, token in enumerate(ids[1:])]
    assert columns.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="leaves no room to generate"):
        client.completions.create(model="tiny", prompt=ids, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="tiny", prompt=[*ids, 5], max_tokens=0, echo=True)


def test_lists_of_prompts_keep_their_order(client: openai.OpenAI) -> None:
    prompts = ["The quick", "A language model", "def add"]
    alone = [
        client.completions.create(model="tiny", prompt=p, max_tokens=6, temperature=0)
        for p in prompts
    ]
    together = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=6, temperature=0, n=2
    )
    assert [c.index for c in together.choices] == list(range(6))
    expected = [answer.choices[0].text for answer in alone for _ in range(2)]
    assert [c.text for c in together.choices] == expected
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)


def test_token_id_prompts(
    client: openai.OpenAI, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = byte_level_tokenizer.encode(PROMPT)
    text = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0)
    one = client.completions.create(model="tiny", prompt=ids, max_tokens=5, temperature=0)
    many = client.completions.create(model="tiny", prompt=[ids, ids], max_tokens=5, temperature=0)
    assert one.choices[0].text == text.choices[0].text
    assert [c.text for c in many.choices] == [text.choices[0].text] * 2


def test_seeded_streams_equal_whole_answers(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "alias",
        "prompt": ["The quick", "A language"],
        "n": 2,
        "seed": 7,
        "max_tokens": 20,
        "logprobs": 2,
        "echo": True,
    }
    whole = client.completions.create(**body)
    texts = [""] * 4
    tokens: list[list[str]] = [[] for _ in range(4)]
    reasons: dict[int, str | None] = {}
    usages = []
    stream = client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        assert chunk.model == "alias"
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            tokens[choice.index] += choice.logprobs.tokens or []
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [c.logprobs.tokens for c in whole.choices if c.logprobs]
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] is not None
    assert whole.usage is not None
    assert usages[-1].total_tokens == whole.usage.total_tokens
    assert chunk.choices == []
    # Different seeds for the n choices of one prompt.
    assert texts[0] != texts[1]


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 30}
    full = client.completions.create(**body).choices[0].text
    stop = next(full[i : i + 2] for i in range(4, 20) if full.find(full[i : i + 2]) == i)
    for given in (stop, [stop, "never to be seen"]):
        choice = client.completions.create(**body, stop=given).choices[0]
        assert choice.text == full[: full.index(stop)]
        assert choice.finish_reason == "stop"
        assert choice.model_extra is not None
        assert choice.model_extra["stop_reason"] == stop
    kept = client.completions.create(
        **body, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == full[: full.index(stop)] + stop


def test_default_is_the_end_of_the_context(server: ServerProcess) -> None:
    near_the_end = {"prompt": [5] * 509, "ignore_eos": True}
    usage = server.post("/v1/completions", json=near_the_end).json()["usage"]
    assert usage["completion_tokens"] == 3


def test_vllm_fields_take_effect(server: ServerProcess) -> None:
    def text(**fields: Any) -> str:
        body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, **fields}
        response = server.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    greedy = text(temperature=0)
    assert text(top_k=1) == greedy
    assert text(min_p=1.0) == greedy
    assert text(temperature=0, repetition_penalty=1e4) != greedy
    assert text(temperature=0, priority=3, cache_salt="x") == greedy
    assert len(set(text(temperature=0, logit_bias={"70": 100}))) == 1
    stopped = server.post(
        "/v1/completions",
        json={
            "prompt": PROMPT,
            "logit_bias": {"70": 100},
            "stop_token_ids": [70],
            "min_tokens": 3,
            "max_tokens": 9,
            "temperature": 0,
        },
    ).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] == 70
    assert stopped["usage"]["completion_tokens"] == 4


def test_prompt_logprobs(server: ServerProcess) -> None:
    body = {"prompt": "The quick", "max_tokens": 1, "prompt_logprobs": 1}
    answer = server.post("/v1/completions", json=body).json()
    rows = answer["choices"][0]["prompt_logprobs"]
    assert len(rows) == answer["usage"]["prompt_tokens"]
    assert rows[0] is None
    for row in rows[1:]:
        assert 1 in {candidate["rank"] for candidate in row.values()}


def test_cached_tokens_are_counted(server: ServerProcess) -> None:
    body = {"prompt": "cache me " * 20, "max_tokens": 1, "cache_salt": "cached-tokens"}
    first = server.post("/v1/completions", json=body).json()["usage"]
    second = server.post("/v1/completions", json=body).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 16
