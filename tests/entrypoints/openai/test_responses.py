"""`/v1/responses` of a real server through the `openai` client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from server_process import ServerProcess

USER: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
ASKED: dict[str, Any] = {"model": "tiny", "input": USER, "max_output_tokens": 12, "temperature": 0}
GO_ON = {"ignore_eos": True}


def _plain(response: Response) -> dict[str, Any]:
    """Without what differs between two answers to one request."""
    plain = response.to_dict()
    for name in ("id", "created_at", "usage"):
        plain.pop(name)
    for item in plain["output"]:  # type: ignore[attr-defined]
        item.pop("id")
    return plain


def test_the_text_is_that_of_a_chat(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, instructions="Be brief.")
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *USER]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.object == "response"
    assert response.model == "tiny"
    assert response.instructions == "Be brief."
    assert response.to_dict()["store"] is False
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.total_tokens == chat.usage.total_tokens


def test_a_string_is_a_users_message(client: openai.OpenAI) -> None:
    text = client.responses.create(**{**ASKED, "input": "Why is the sky blue?"})
    parts = [{"type": "input_text", "text": "Why is "}, {"type": "input_text", "text": "the sky "}]
    parts.append({"type": "input_text", "text": "blue?"})
    message = {"type": "message", "role": "user", "content": parts}
    listed = client.responses.create(**{**ASKED, "input": [message]})
    items = client.responses.create(**ASKED)
    assert text.output_text == items.output_text == listed.output_text


@pytest.mark.parametrize("ends", [True, False])
def test_a_stream_equals_the_whole_answer(client: openai.OpenAI, ends: bool) -> None:
    asked = {**ASKED, "max_output_tokens": 10, "extra_body": {} if ends else GO_ON}
    if ends:
        asked["extra_body"] = {"stop_token_ids": list(range(3, 330)), "min_tokens": 3}
    whole = client.responses.create(**asked)
    assert whole.status == ("completed" if ends else "incomplete")
    if not ends:
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
    text = ""
    numbers = []
    final = None
    for event in client.responses.create(**asked, stream=True):
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert numbers == list(range(len(numbers)))
    assert final is not None
    assert _plain(final) == _plain(whole)
    assert text == whole.output_text


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    asked = {**ASKED, "extra_body": {"stop_token_ids": list(range(3, 330)), "min_tokens": 5}}
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    assert final.output_text == client.responses.create(**asked).output_text


def test_logprobs(client: openai.OpenAI) -> None:
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = client.responses.create(**asked)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert response.usage is not None
    assert len(part.logprobs) == response.usage.output_tokens
    assert all(len(row.top_logprobs) == 2 for row in part.logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_text_of_a_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {"enum": ["red", "green"]}
    text: Any = {"format": {"type": "json_schema", "name": "c", "schema": schema, "strict": True}}
    asked = {**ASKED, "max_output_tokens": 40, "text": text}
    if stream:
        response = list(client.responses.create(**asked, stream=True))[-1].response
    else:
        response = client.responses.create(**asked)
    assert response.status == "completed"
    assert json.loads(response.output_text) in ("red", "green")
    assert response.to_dict()["text"]["format"] == text["format"]


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED)
    history = [*USER, *first.output, {"role": "user", "content": "And the sea?"}]
    second = client.responses.create(**{**ASKED, "input": history})
    messages: list[Any] = [*USER, {"role": "assistant", "content": first.output_text}]
    messages.append({"role": "user", "content": "And the sea?"})
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    assert second.output_text == chat.choices[0].message.content


def test_harmless_fields_are_accepted(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **ASKED,
        store=False,
        background=False,
        truncation="disabled",
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
    )
    assert response.metadata == {"a": "b"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_field"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_field"),
        ({"store": True}, "store", "unsupported_field"),
        ({"background": True}, "background", "unsupported_field"),
        ({"truncation": "auto"}, "truncation", "unsupported_field"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_field"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported_field"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}},
            "text.format",
            None,
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_field"),
        ({"include": ["everything"]}, "include", "invalid_type"),
        ({"top_logprobs": 3}, "top_logprobs", None),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": []}, "input", None),
        ({"input": [5]}, "input", "invalid_type"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_field"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "unsupported_content",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0]",
            "unsupported_content",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"max_output_tokens": 600}, "max_output_tokens", "context_length_exceeded"),
        ({"temperature": -1}, "temperature", None),
        ({"max_tokens": 5}, "max_tokens", "unsupported_field"),
    ],
)
def test_refused(
    server: ServerProcess, fields: dict[str, Any], param: str, code: str | None
) -> None:
    answer = server.post("/v1/responses", json={**ASKED, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has tiny"):
        client.responses.create(model="other", input="hi")
