"""Reasoning and tool calls through `/v1/responses` and `/v1/messages`, by their own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

# What the template is given, for tests to read back.
TEMPLATE = (
    "{{ {'messages': messages, 'tools': tools, 'thinking': thinking | default(none)} | tojson }}"
)

ARGUMENTS = json.dumps(
    {"city": "北京", "days": [1, 2], "note": '风 🙂 "}' * 40}, ensure_ascii=False
)
REASONING = "He asks twice,\nso twice it is."
TEXT = "Let me look. 看看 🙂"
ANSWER = (
    f"<think>{REASONING}</think>{TEXT}"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
RESPONSES_TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
    for name in ("get_weather", "get_time")
]
MESSAGES_TOOLS: list[Any] = [
    {"name": name, "input_schema": SCHEMA} for name in ("get_weather", "get_time")
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("get_weather", "get_time")
]


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    options = ServerOptions(
        tool_call_parser="hermes",
        reasoning_parser="think_tags",
        enable_auto_tool_choice=True,
        chat_template=TEMPLATE,
    )
    server = ScriptedServer(byte_level_tokenizer, options)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def responses(scripted: ScriptedServer) -> Any:
    base = f"{scripted.url}/v1"
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=60).responses


@pytest.fixture
def messages(scripted: ScriptedServer) -> Any:
    import anthropic  # takes seconds, which workers without these tests save

    return anthropic.Anthropic(
        base_url=scripted.url, api_key="none", max_retries=0, timeout=60
    ).messages


def _given(scripted: ScriptedServer) -> dict[str, Any]:
    """What the template was given last."""
    return dict(json.loads(scripted.prompt))


@pytest.mark.parametrize("tokens_per_step", [1, 4, 8, 1000])
def test_responses(scripted: ScriptedServer, responses: Any, tokens_per_step: int) -> None:
    scripted.says(ANSWER, tokens_per_step)
    asked: dict[str, Any] = {"model": "scripted", "input": "Weather?", "tools": RESPONSES_TOOLS}
    whole = responses.create(**asked)
    assert whole.status == "completed"
    reasoning, text, first, second = whole.output
    assert [item.type for item in whole.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert reasoning.content[0].text == REASONING
    assert text.content[0].text == TEXT
    assert (first.name, first.arguments) == ("get_weather", ARGUMENTS)
    assert (second.name, second.arguments) == ("get_time", "{}")
    assert first.call_id != second.call_id
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    with responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    for one, other in zip(final.output, whole.output, strict=True):
        differs = {"id", "call_id", "parsed_arguments", "parsed"}
        assert one.to_dict().keys() - differs == other.to_dict().keys() - differs
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == whole.output_text
    assert final.output[2].arguments == ARGUMENTS
    assert final.usage == whole.usage
    kinds = [event.type for event in events]
    called = "response.function_call_arguments.delta"
    before = events[: kinds.index(called)]
    named = [event.item.type for event in before if event.type == "response.output_item.added"]
    assert named[-1] == "function_call", "a call is named before its arguments"


@pytest.mark.parametrize("tokens_per_step", [1, 4, 8, 1000])
def test_messages(scripted: ScriptedServer, messages: Any, tokens_per_step: int) -> None:
    scripted.says(ANSWER, tokens_per_step)
    asked: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 4000,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": MESSAGES_TOOLS,
    }
    whole = messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    thinking, text, first, second = whole.content
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert thinking.thinking == REASONING
    assert text.text == TEXT
    assert (first.name, first.input) == ("get_weather", json.loads(ARGUMENTS))
    assert (second.name, second.input) == ("get_time", {})
    with messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for one, other in zip(final.content, whole.content, strict=True):
        assert {**one.to_dict(), "id": ""} == {**other.to_dict(), "id": ""}
    assert final.stop_reason == whole.stop_reason
    assert final.usage == whole.usage


def test_calls_that_were_cut(scripted: ScriptedServer, responses: Any, messages: Any) -> None:
    scripted.says(ANSWER)
    cut = len(scripted.model._tokenizer.encode(ANSWER[: ANSWER.index("days") + 5]))
    response = responses.create(
        model="scripted", input="Weather?", tools=RESPONSES_TOOLS, max_output_tokens=cut
    )
    assert response.status == "incomplete"
    call = response.output[-1]
    assert call.status == "incomplete"
    assert call.arguments
    assert ARGUMENTS.startswith(call.arguments)
    message = messages.create(
        model="scripted",
        max_tokens=cut,
        messages=[{"role": "user", "content": "Weather?"}],
        tools=MESSAGES_TOOLS,
    )
    assert message.stop_reason == "max_tokens"
    assert message.content[-1].input == {"city": "北京"}


@pytest.mark.parametrize("streams", [False, True])
def test_calls_in_which_the_model_ended(
    streams: bool, scripted: ScriptedServer, responses: Any, messages: Any
) -> None:
    """Nothing says that such a call can be made."""
    scripted.says(ANSWER[: ANSWER.index("days") + 5])
    asked: dict[str, Any] = {"model": "scripted", "tools": RESPONSES_TOOLS, "input": "Weather?"}
    if streams:
        *_, last = responses.create(**asked, stream=True)
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = responses.create(**asked)
    assert (response.status, response.incomplete_details) == ("incomplete", None)
    assert response.output[-1].type == "function_call"
    assert response.output[-1].status == "incomplete"
    asked = {
        "model": "scripted",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": MESSAGES_TOOLS,
    }
    if streams:
        with messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = messages.create(**asked)
    assert message.stop_reason == "end_turn"
    assert message.content[-1].type == "tool_use"
    assert message.content[-1].input == {"city": "北京"}


def test_a_responses_conversation_goes_on(scripted: ScriptedServer, responses: Any) -> None:
    scripted.says(ANSWER)
    asked: dict[str, Any] = {"model": "scripted", "tools": RESPONSES_TOOLS}
    first = responses.create(**asked, input="Weather?")
    calls = [item for item in first.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"result {n}"}
        for n, call in enumerate(calls)
    ]
    history = [{"role": "user", "content": "Weather?"}, *first.output, *results]
    scripted.says("<think></think>Sunny.")
    second = responses.create(**asked, input=history, instructions="Be brief.")
    assert second.output_text == "Sunny."
    assert _turns_given(scripted) == [
        {"role": "system", "content": "Be brief."},
        *_turns(calls[0].call_id, calls[1].call_id),
    ]
    assert _given(scripted)["tools"] == [
        {**tool, "function": {**tool["function"], "strict": False}}  # type: ignore[dict-item]
        for tool in CHAT_TOOLS
    ]


def test_a_messages_conversation_goes_on(scripted: ScriptedServer, messages: Any) -> None:
    scripted.says(ANSWER)
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 4000, "tools": MESSAGES_TOOLS}
    user = {"role": "user", "content": "Weather?"}
    first = messages.create(**asked, messages=[user], thinking={"type": "adaptive"})
    assert _given(scripted)["thinking"] is True
    uses = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": f"result {n}"}
        for n, use in enumerate(uses)
    ]
    history = [
        user,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
    ]
    scripted.says("<think></think>Sunny.")
    second = messages.create(**asked, messages=history, thinking={"type": "disabled"})
    assert [block.type for block in second.content] == ["text"]
    assert _given(scripted)["thinking"] is False
    assert _given(scripted)["tools"] == CHAT_TOOLS
    assert _turns_given(scripted) == [
        *_turns(uses[0].id, uses[1].id),
        {"role": "user", "content": "And?"},
    ]


def _turns_given(scripted: ScriptedServer) -> list[dict[str, Any]]:
    """The messages as the template saw them, reasoning under one of its names."""
    messages: list[dict[str, Any]] = _given(scripted)["messages"]
    return [{k: v for k, v in message.items() if k != "thinking"} for message in messages]


def _turns(first_id: str, second_id: str) -> list[dict[str, Any]]:
    """The first exchange of the conversations above, as templates see it."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in (
            (first_id, "get_weather", json.loads(ARGUMENTS)),
            (second_id, "get_time", {}),
        )
    ]
    return [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": TEXT,
            "reasoning_content": REASONING,
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": first_id, "content": "result 0"},
        {"role": "tool", "tool_call_id": second_id, "content": "result 1"},
    ]


def test_failed_tools_say_so(scripted: ScriptedServer, messages: Any) -> None:
    scripted.says("Sorry.")
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no wind", "is_error": True}
    use = {"type": "tool_use", "id": "t", "name": "get_time", "input": {}}
    messages.create(
        model="scripted",
        max_tokens=10,
        tools=MESSAGES_TOOLS,
        messages=[
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    )
    assert _given(scripted)["messages"][-1]["content"] == "Error: no wind"


def test_tools_of_which_none_may_be_called(
    scripted: ScriptedServer, responses: Any, messages: Any
) -> None:
    scripted.says("Fine.")
    responses.create(model="scripted", input="hi", tools=RESPONSES_TOOLS, tool_choice="none")
    assert _given(scripted)["tools"] is None
    user: Any = [{"role": "user", "content": "hi"}]
    choice: Any = {"type": "none"}
    asked: dict[str, Any] = {"model": "scripted", "messages": user, "tools": MESSAGES_TOOLS}
    messages.create(**asked, tool_choice=choice, max_tokens=10)
    prompt = scripted.model.prompt
    assert _given(scripted)["tools"] is None
    assert messages.count_tokens(**asked, tool_choice=choice).input_tokens == len(prompt)


def test_the_model_sees_only_allowed_tools(scripted: ScriptedServer, responses: Any) -> None:
    scripted.says("Fine.")
    allowed = [{"type": "function", "name": "get_time"}]
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    response = responses.create(
        model="scripted", input="hi", tools=RESPONSES_TOOLS, tool_choice=choice
    )
    (tool,) = _given(scripted)["tools"]
    assert tool["function"]["name"] == "get_time"
    assert response.to_dict()["tool_choice"] == choice
    unknown = {**choice, "tools": [{"type": "function", "name": "other"}]}
    with pytest.raises(openai.BadRequestError, match="unknown tools: other"):
        responses.create(model="scripted", input="hi", tools=RESPONSES_TOOLS, tool_choice=unknown)


def test_logprobs_are_for_plain_text(responses: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="not told apart"):
        responses.create(
            model="scripted",
            input="hi",
            tools=RESPONSES_TOOLS,
            include=["message.output_text.logprobs"],
        )


def test_cut_calls_of_the_history_are_taken_back(responses: Any) -> None:
    """As are thoughts of other servers, which say nothing here."""
    call = {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": '{"a'}
    thought = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "s"}],
        "encrypted_content": "x",
    }
    answer = responses.create(model="scripted", input=[thought, call], tools=RESPONSES_TOOLS)
    assert answer.status == "completed"
