"""Chat's stream as responses and messages: whatever is fed, events and answers agree."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from atom.entrypoints.anthropic.events import MessageTranslation, tool_input
from atom.entrypoints.chat.generation import Usage
from atom.entrypoints.chat.translation import Event, Translation
from atom.entrypoints.http.errors import ApiError
from atom.entrypoints.openai.responses.events import ResponseTranslation
from atom.outputs import RequestMetrics, RequestOutput

RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

HEAD = {"id": "msg_1", "model": "tiny"}

# What one answer says, in order: (field of a delta, text), or ("call", name, arguments).
Run = tuple[str, ...]

TEXTS = st.text(min_size=1, max_size=12) | st.sampled_from(["你好, 世界", "🙂 ok", "<think>", "\n"])
ARGUMENTS = st.dictionaries(TEXTS, TEXTS | st.integers(), max_size=2).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
RUNS = st.lists(
    st.tuples(st.sampled_from(["reasoning_content", "content"]), TEXTS)
    | st.tuples(st.just("call"), st.sampled_from(["get_weather", "a.b-c"]), ARGUMENTS),
    max_size=6,
)
REASONS = st.sampled_from(["stop", "length", "tool_calls"])


@functools.cache
def _anthropic() -> tuple[Any, TypeAdapter[Any]]:
    """How Anthropic's client adds up events, and their type; importing it takes seconds."""
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import RawMessageStreamEvent

    return accumulate_event, TypeAdapter(RawMessageStreamEvent)


def _usage() -> Usage:
    usage = Usage()
    request = RequestOutput("r", None, [1] * 12, [], True, RequestMetrics(0.0), num_cached_tokens=4)
    usage.add(0, request)
    return usage


def _cut(text: str, sizes: Iterable[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [piece for piece in [*pieces, text] if piece]


def _choices(runs: list[Run], sizes: Iterable[int], reason: str, stop: Any = None) -> list[Any]:
    """Chat's choices, each text cut into pieces."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    number = 0
    for kind, *texts in runs:
        if kind != "call":
            deltas += [{kind: piece} for piece in _cut(texts[0], sizes)]
            continue
        name, arguments = texts
        head = {"index": number, "id": f"functions.{name}:{number}", "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}
            for piece in _cut(arguments, sizes)
        ]
        number += 1
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    ending = {"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": stop}
    return [*choices, ending]


def _run(translation: Translation, choices: list[Any]) -> tuple[list[Event], dict[str, Any]]:
    events = translation.start(_usage())
    for choice in choices:
        events += translation.feed(choice)
    events += translation.finish(_usage(), 3)
    return events, translation.whole()


def _response() -> ResponseTranslation:
    fields = {
        "id": "resp_0123",
        "object": "response",
        "created_at": 1,
        "model": "tiny",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    return ResponseTranslation(fields)


def _merged(runs: list[Run]) -> list[Run]:
    """Neighbours of one kind are one block."""
    merged: list[Run] = []
    for run in runs:
        if merged and run[0] == merged[-1][0] != "call":
            merged[-1] = (run[0], merged[-1][1] + run[1])
        else:
            merged.append(run)
    return merged


@settings(max_examples=30)
@given(RUNS, st.lists(st.integers(1, 5), max_size=8), REASONS)
def test_responses_say_the_same_streamed_and_whole(
    runs: list[Run], sizes: list[int], reason: str
) -> None:
    events, whole = _run(_response(), _choices(runs, sizes, reason))
    _, uncut = _run(_response(), _choices(runs, [], reason))
    assert whole == uncut
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(RESPONSE_EVENT.validate_python(event))
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["response"] == whole
    assert whole["status"] == ("incomplete" if reason == "length" else "completed")
    said = []
    for item in whole["output"]:
        if item["type"] == "function_call":
            said.append(("call", item["name"], item["arguments"]))
        else:
            kind = "content" if item["type"] == "message" else "reasoning_content"
            said.append((kind, item["content"][0]["text"]))
    assert said == _merged(runs)
    Response.model_validate(whole)


@settings(max_examples=30)
@given(RUNS, st.lists(st.integers(1, 5), max_size=8), REASONS)
def test_response_events_nest(runs: list[Run], sizes: list[int], reason: str) -> None:
    """An item is added, grows and is done before the next; deltas add up to what is done."""
    events, whole = _run(_response(), _choices(runs, sizes, reason))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    texts: dict[int, str] = {}
    done: list[dict[str, Any]] = []
    for event in events[2:-1]:
        index = event["output_index"]
        assert index == len(done), "only one item is open"
        match event["type"].removeprefix("response.").split("."):
            case ["output_item", "added"]:
                assert index not in texts
                texts[index] = ""
                assert event["item"]["status"] == "in_progress"
            case [_, "delta"]:
                assert event["delta"]
                texts[index] += event["delta"]
            case ["output_item", "done"]:
                done.append(event["item"])
            case ["function_call_arguments", "done"]:
                assert event["arguments"] == texts[index]
            case ["output_text" | "reasoning_text", "done"]:
                assert event["text"] == texts[index]
            case ["content_part", "added"]:
                assert event["part"]["text"] == ""
            case ["content_part", "done"]:
                assert event["part"]["text"] == texts[index]
            case other:
                raise AssertionError(other)
        if "item_id" in event:
            assert event["item_id"] == whole["output"][index]["id"]
    assert done == whole["output"]
    statuses = [item["status"] for item in done]
    assert set(statuses[:-1]) <= {"completed"}
    if done:
        # These calls are whole, whatever ended the answer behind them.
        is_cut = reason == "length" and done[-1]["type"] != "function_call"
        assert statuses[-1] == ("incomplete" if is_cut else "completed")


@settings(max_examples=30)
@given(RUNS, st.lists(st.integers(1, 5), max_size=8), REASONS)
def test_messages_say_the_same_streamed_and_whole(
    runs: list[Run], sizes: list[int], reason: str
) -> None:
    accumulate_event, message_event = _anthropic()
    events, whole = _run(MessageTranslation(HEAD), _choices(runs, sizes, reason))
    _, uncut = _run(MessageTranslation(HEAD), _choices(runs, [], reason))
    assert whole == uncut
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(
            event=message_event.validate_python(event),
            current_snapshot=snapshot,
            json_bufs=buffers,
        )
    reassembled = snapshot.to_dict()
    assert {name: reassembled.get(name) for name in whole} == whole
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    said = []
    for block in whole["content"]:
        if block["type"] == "tool_use":
            said.append(("call", block["name"], json.dumps(block["input"], ensure_ascii=False)))
        elif block["type"] == "thinking":
            said.append(("reasoning_content", block["thinking"]))
        else:
            said.append(("content", block["text"]))
    assert said == _merged(runs)


@pytest.mark.parametrize(
    ("reason", "stop", "said"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
    ],
)
def test_stop_reasons(reason: str, stop: Any, said: tuple[Any, Any]) -> None:
    choices = _choices([("content", "x")], [], reason, stop)
    events, whole = _run(MessageTranslation(HEAD), choices)
    assert (whole["stop_reason"], whole["stop_sequence"]) == said
    delta = events[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == said


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", {}),
        ("{}", {}),
        ('{"a": [1, 2], "b": "cu', {"a": [1, 2]}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("{'a': 1}", {"INVALID_JSON": "{'a': 1}"}),
        ("nonsense", {"INVALID_JSON": "nonsense"}),
    ],
)
def test_tool_input(arguments: str, read: dict[str, Any]) -> None:
    assert tool_input(arguments, is_cut=True) == read


def test_tool_input_of_a_complete_call_is_never_a_part_of_it() -> None:
    text = '{"path": "/", "only": "x'
    assert tool_input(text, is_cut=False) == {"INVALID_JSON": text}
    assert tool_input('{"a": 1}', is_cut=False) == {"a": 1}
    choices = _choices([("call", "f", text)], [], "tool_calls")
    _, whole = _run(MessageTranslation(HEAD), choices)
    assert whole["content"][0]["input"] == {"INVALID_JSON": text}


def test_usage_of_a_message_leaves_cached_tokens_out() -> None:
    _, whole = _run(MessageTranslation(HEAD), _choices([], [], "stop"))
    assert whole["usage"]["input_tokens"] == 8
    assert whole["usage"]["cache_read_input_tokens"] == 4


def test_logprobs_go_with_the_text() -> None:
    row = {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}
    choices = _choices([("content", "xx")], [1], "stop")
    for choice in choices[1:3]:
        choice["logprobs"] = {"content": [row]}
    events, whole = _run(_response(), choices)
    assert whole["output"][0]["content"][0]["logprobs"] == [row, row]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["logprobs"] for event in deltas] == [[row], [row]]


def test_a_failure_ends_a_response_with_what_there_is() -> None:
    translation = _response()
    translation.start(_usage())
    for choice in _choices([("content", "half")], [], "stop")[:-1]:
        translation.feed(choice)
    (event,) = translation.fail(ApiError(503, "the engine is dead"))
    RESPONSE_EVENT.validate_python(event)
    assert event["type"] == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["message"] == "the engine is dead"
    assert event["response"]["output"][0]["status"] == "incomplete"


def test_a_failure_of_a_message_is_an_error_event() -> None:
    (event,) = MessageTranslation(HEAD).fail(ApiError(503, "the engine is dead"))
    assert event == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine is dead"},
    }
