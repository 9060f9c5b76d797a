"""Chat completions, models and tokens of a real server through the `openai` client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
from server_process import ServerProcess
from transformers import PreTrainedTokenizerFast

from atom import __version__

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
]


def test_chat_renders_the_template(
    client: openai.OpenAI, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    rendered = byte_level_tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    ids = byte_level_tokenizer.encode(rendered, add_special_tokens=False)
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=10, temperature=0
    )
    plain = client.completions.create(model="tiny", prompt=ids, max_tokens=10, temperature=0)
    message = chat.choices[0].message
    assert message.role == "assistant"
    assert message.content == plain.choices[0].text
    assert chat.object == "chat.completion"
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(ids)


def test_text_parts_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Why is "}, {"type": "text", "text": "the sky blue?"}]
    joined: list[Any] = [MESSAGES[0], {"role": "user", "content": parts}]
    answers = [
        client.chat.completions.create(model="tiny", messages=m, max_tokens=8, temperature=0)
        for m in (MESSAGES, joined)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_chat_goes_on_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True}
    )
    assert chat.usage is not None
    assert chat.usage.total_tokens == 512
    assert chat.choices[0].finish_reason == "length"


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=3,
        extra_body={"ignore_eos": True},
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 3


def test_streams_equal_whole_answers(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "n": 3,
        "seed": 11,
        "max_tokens": 15,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**body)
    texts = [""] * 3
    tokens: list[list[str]] = [[], [], []]
    roles = []
    reasons: dict[int, str] = {}
    usage = None
    for chunk in client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    ):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles.append((choice.index, choice.delta.role))
            if choice.logprobs and choice.logprobs.content:
                tokens[choice.index] += [row.token for row in choice.logprobs.content]
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [c.message.content for c in whole.choices]
    assert len(set(texts)) == 3
    assert sorted(roles) == [(i, "assistant") for i in range(3)]
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert usage == whole.usage
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert tokens[choice.index] == [row.token for row in choice.logprobs.content]
        assert all(len(row.top_logprobs) == 2 for row in choice.logprobs.content)


def test_logprobs_carry_the_tokens_bytes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=20,
        temperature=0,
        logprobs=True,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    data = b"".join(bytes(row.bytes or []) for row in logprobs.content)
    assert data.decode(errors="replace") == chat.choices[0].message.content
    assert all(row.logprob <= 0 and row.top_logprobs == [] for row in logprobs.content)


def test_prompt_logprobs(server: ServerProcess) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0}
    answer = server.post("/v1/chat/completions", json=body).json()
    rows = answer["prompt_logprobs"]
    assert len(rows) == answer["usage"]["prompt_tokens"]
    assert rows[0] is None
    assert all(len(row) == 1 for row in rows[1:])


def test_continue_final_message(client: openai.OpenAI, server: ServerProcess) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Because of"}]
    body = {"messages": messages, "continue_final_message": True}
    tokens = server.post("/tokenize", json=body).json()["tokens"]
    text = server.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nBecause of")
    chat = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=2,
        extra_body={"continue_final_message": True},
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(tokens)


def test_harmless_fields_are_accepted(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=1,
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        tool_choice="none",
        tools=[],
        response_format={"type": "text"},
        modalities=["text"],
        stop=None,
        temperature=None,
    )


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
    history: list[Any] = [*MESSAGES, chat.choices[0].message, MESSAGES[1]]
    client.chat.completions.create(model="tiny", messages=history, max_tokens=1)
    dumped: list[Any] = [*MESSAGES, chat.choices[0].message.model_dump(), MESSAGES[1]]
    client.chat.completions.create(model="tiny", messages=dumped, max_tokens=1)


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "alias"]
    card = client.models.retrieve("alias")
    assert card.object == "model"
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == 512
    assert card.model_extra["speculation"] is None


def test_tokenize_and_back(
    server: ServerProcess, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "naïve 日本 😀 <|im_end|>"
    answer = server.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == byte_level_tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    back = server.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


def test_version_and_health(server: ServerProcess) -> None:
    assert httpx.get(server.url + "/version").json() == {"version": __version__}
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.head(server.url + "/health").status_code == 200
