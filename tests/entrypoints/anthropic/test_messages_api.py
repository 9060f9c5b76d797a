"""`/v1/messages` of a real server through the `anthropic` client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from server_process import ServerProcess

if TYPE_CHECKING:
    import anthropic

USER: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 12}
# Clients have dropped the argument, servers have not.
ASKED = {**BODY, "extra_body": {"temperature": 0}}
END_SOON = {"temperature": 0, "stop_token_ids": list(range(3, 330)), "min_tokens": 5}
GO_ON = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def messages_client(server: ServerProcess) -> anthropic.Anthropic:
    import anthropic  # takes seconds, which workers without these tests save

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_the_text_is_that_of_a_chat(
    messages_client: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    message = messages_client.messages.create(**ASKED, system="Be brief.")
    history: list[Any] = [{"role": "system", "content": "Be brief."}, *USER]
    chat = client.chat.completions.create(
        model="tiny", messages=history, max_tokens=12, temperature=0
    )
    assert _text(message) == chat.choices[0].message.content
    assert message.type == "message"
    assert message.role == "assistant"
    assert message.model == "tiny"
    assert chat.usage is not None
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == chat.usage.prompt_tokens
    assert message.usage.output_tokens == chat.usage.completion_tokens


def test_blocks_of_text_are_joined(messages_client: anthropic.Anthropic) -> None:
    blocks: list[Any] = [
        {"type": "text", "text": "Why is ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "the sky blue?"},
    ]
    listed = {**ASKED, "messages": [{"role": "user", "content": blocks}]}
    system: Any = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    one = messages_client.messages.create(**ASKED, system="Be brief.")
    other = messages_client.messages.create(**listed, system=system)
    assert _text(one) == _text(other)


SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}


@pytest.mark.parametrize("ends", [True, False])
def test_a_stream_equals_the_whole_answer(messages_client: anthropic.Anthropic, ends: bool) -> None:
    asked = {**ASKED, "extra_body": END_SOON if ends else GO_ON}
    whole = messages_client.messages.create(**asked)
    assert whole.stop_reason == ("end_turn" if ends else "max_tokens")
    with messages_client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == _text(whole) == _text(final)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_stop_sequences(messages_client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 40, "extra_body": GO_ON}
    text = _text(messages_client.messages.create(**asked))
    stop = text[5:8]
    message = messages_client.messages.create(**asked, stop_sequences=["\0", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert _text(message) == text[: text.index(stop)]


def test_an_answer_goes_on_where_the_assistant_stopped(
    messages_client: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    history: list[Any] = [*USER, {"role": "assistant", "content": "Because of"}]
    message = messages_client.messages.create(**{**ASKED, "messages": history})
    chat = client.chat.completions.create(
        model="tiny",
        messages=history,
        max_tokens=12,
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    assert _text(message) == chat.choices[0].message.content


def test_count_tokens(messages_client: anthropic.Anthropic) -> None:
    counted = messages_client.messages.count_tokens(model="tiny", messages=USER, system="Be brief.")
    message = messages_client.messages.create(**ASKED, system="Be brief.")
    cached = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + cached


def test_harmless_fields_are_accepted(messages_client: anthropic.Anthropic) -> None:
    messages_client.messages.create(
        **ASKED,
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        tools=[],
        tool_choice={"type": "auto"},
    )


@pytest.mark.parametrize("stream", [False, True])
def test_output_of_a_schema(messages_client: anthropic.Anthropic, stream: bool) -> None:
    config = {"format": {"type": "json_schema", "schema": {"enum": ["red", "green"]}}}
    asked = {**ASKED, "max_tokens": 40, "extra_body": {"output_config": config}}
    if stream:
        with messages_client.messages.stream(**asked) as events:
            message: Any = events.get_final_message()
    else:
        message = messages_client.messages.create(**asked)
    assert json.loads(_text(message)) in ("red", "green")


def _refusal(answer: httpx.Response, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    return str(body["error"]["message"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 600}, "+ 600 > 512"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
            "messages hold images, and this model reads none",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type is missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0] is of type 'document': only blocks of type text, image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0]: a user message holds no thinking",
        ),
        ({"system": [{"type": "image"}]}, "system[0] is of type 'image': only blocks of type text"),
        ({"stop_sequences": [""]}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"n": 2}, "n is not supported"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "schema"),
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens is missing"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
    ],
)
def test_refused(server: ServerProcess, fields: dict[str, Any], said: str) -> None:
    answer = server.post("/v1/messages", json={**BODY, **fields})
    assert said in _refusal(answer, 400, "invalid_request_error")


def test_errors_have_anthropics_shape(server: ServerProcess) -> None:
    path = "/v1/messages"
    unknown = server.post(path, json={**BODY, "model": "other"})
    assert "this server has tiny" in _refusal(unknown, 404, "not_found_error")
    _refusal(httpx.get(server.url + path), 405, "invalid_request_error")
    headers = {"Content-Type": "application/json"}
    _refusal(server.post(path, content=b"{", headers=headers), 400, "invalid_request_error")
    _refusal(server.post(path, content=b"x" * (11 * 2**20)), 413, "request_too_large")
    _refusal(server.post(f"{path}/nothing", json={}), 404, "not_found_error")
