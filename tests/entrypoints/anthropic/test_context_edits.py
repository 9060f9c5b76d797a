"""`context_management`: what its edits clear, of the request's own messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.anthropic.context_edits import CLEARED_RESULT, manage_context
from atom.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from atom.entrypoints.server_options import ServerOptions

TEMPLATE = "{{ {'messages': messages} | tojson }}"
BETA = "context-management-2025-06-27"
THINKING = "clear_thinking_20251015"
TOOL_USES = "clear_tool_uses_20250919"


def use(number: int, name: str = "look") -> list[dict[str, Any]]:
    """A tool use with the thinking before it, and its result."""
    call = {"type": "tool_use", "id": f"call_{number}", "name": name, "input": {"n": number}}
    thinking = {"type": "thinking", "thinking": f"thought {number}", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": "r" * 100}
    return [
        {"role": "assistant", "content": [thinking, call]},
        {"role": "user", "content": [result]},
    ]


def turn(number: int) -> list[dict[str, Any]]:
    thinking = {"type": "thinking", "thinking": f"thought {number}", "signature": ""}
    text = {"type": "text", "text": f"answer {number}"}
    return [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": [thinking, text]},
    ]


def size(body: CountTokensRequest) -> int:
    """Stands for the prompt's tokens: the characters of thinking and results."""
    total = 0
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else []:
            total += len(getattr(block, "thinking", "")) + len(getattr(block, "content", "") or "")
    return total


def managed(messages: list[dict[str, Any]], *edits: dict[str, Any]) -> tuple[str, Any]:
    """The messages after the edits, as JSON, and what is said of the edits."""
    body = MessagesRequest.model_validate(
        {"messages": messages, "max_tokens": 5, "context_management": {"edits": list(edits)}}
    )
    context = manage_context(body, size)
    dumped = [
        message.model_dump(exclude_none=True, warnings=False) for message in context.body.messages
    ]
    return json.dumps(dumped), context.applied


HISTORY = [*turn(1), *turn(2), {"role": "user", "content": "go"}, *use(3), *use(4)]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, {3, 4}),
        ("all", {1, 2, 3, 4}),
        ({"type": "all"}, {1, 2, 3, 4}),
        ({"type": "thinking_turns", "value": 1}, {3, 4}),
        ({"type": "thinking_turns", "value": 2}, {2, 3, 4}),
        ({"type": "thinking_turns", "value": 9}, {1, 2, 3, 4}),
    ],
)
def test_thinking_of_the_last_turns_is_kept(keep: Any, kept: set[int]) -> None:
    edit = {"type": THINKING} if keep is None else {"type": THINKING, "keep": keep}
    text, applied = managed(HISTORY, edit)
    assert {number for number in (1, 2, 3, 4) if f"thought {number}" in text} == kept
    assert "answer 1" in text
    cleared = len({1, 2} - kept)
    said = [
        {"type": THINKING, "cleared_thinking_turns": cleared, "cleared_input_tokens": 9 * cleared}
    ]
    assert applied == (said if cleared else [])


USES = [
    {"role": "user", "content": "go"},
    *use(1),
    *use(2, "memory"),
    *use(3),
    *use(4),
]
ALWAYS = {"type": "tool_uses", "value": 0}


def cleared_results(text: str) -> set[int]:
    blocks = [
        block
        for message in json.loads(text)
        if isinstance(message["content"], list)
        for block in message["content"]
    ]
    return {
        int(block["tool_use_id"][5:])
        for block in blocks
        if block["type"] == "tool_result" and block["content"] == CLEARED_RESULT
    }


@pytest.mark.parametrize(
    ("fields", "cleared"),
    [
        ({"trigger": ALWAYS}, {1}),  # three are kept
        ({"trigger": ALWAYS, "keep": {"type": "tool_uses", "value": 1}}, {1, 2, 3}),
        ({"trigger": ALWAYS, "keep": {"type": "tool_uses", "value": 0}}, {1, 2, 3, 4}),
        (
            {
                "trigger": ALWAYS,
                "keep": {"type": "tool_uses", "value": 1},
                "exclude_tools": ["memory"],
            },
            {1, 3},
        ),
        ({"trigger": {"type": "tool_uses", "value": 4}}, set()),
        ({"trigger": {"type": "tool_uses", "value": 3}}, {1}),
        ({"trigger": {"type": "input_tokens", "value": 400}}, {1}),
        ({"trigger": {"type": "input_tokens", "value": 500}}, set()),
        ({}, set()),  # a hundred thousand tokens are needed
        ({"trigger": ALWAYS, "clear_at_least": {"type": "input_tokens", "value": 99}}, set()),
        ({"trigger": ALWAYS, "clear_at_least": {"type": "input_tokens", "value": 50}}, {1}),
        ({"trigger": ALWAYS, "clear_at_least": None, "exclude_tools": None}, {1}),
    ],
)
def test_results_of_earlier_tool_uses_are_cleared(
    fields: dict[str, Any], cleared: set[int]
) -> None:
    text, applied = managed(USES, {"type": TOOL_USES, **fields})
    assert cleared_results(text) == cleared
    assert all(f'"n": {number}' in text for number in (1, 2, 3, 4))
    assert len(applied) == bool(cleared)
    if cleared:
        assert applied[0]["cleared_tool_uses"] == len(cleared)
        assert applied[0]["cleared_input_tokens"] == len(cleared) * (100 - len(CLEARED_RESULT))


@pytest.mark.parametrize(
    ("inputs", "left"),
    [(False, {1, 2, 3, 4}), (True, {4}), (["memory"], {1, 3, 4}), (None, {1, 2, 3, 4})],
)
def test_inputs_of_tool_uses_are_cleared_on_demand(inputs: Any, left: set[int]) -> None:
    keep = {"type": "tool_uses", "value": 1}
    edit = {"type": TOOL_USES, "trigger": ALWAYS, "keep": keep, "clear_tool_inputs": inputs}
    text, _ = managed(USES, edit)
    assert {number for number in (1, 2, 3, 4) if f'"n": {number}' in text} == left


def test_edits_are_made_in_their_order() -> None:
    clear = {"type": TOOL_USES, "trigger": ALWAYS, "keep": {"type": "tool_uses", "value": 0}}
    text, applied = managed(HISTORY, {"type": THINKING}, clear)
    assert [edit["type"] for edit in applied] == [THINKING, TOOL_USES]
    assert cleared_results(text) == {3, 4}
    assert "thought 1" not in text


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    options = ServerOptions(chat_template=TEMPLATE)
    server = ScriptedServer(byte_level_tokenizer, options)
    server.says("Fine.")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def messages(scripted: ScriptedServer) -> Any:
    import anthropic  # takes seconds, which workers without these tests save

    client = anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=60)
    return client.beta.messages


ASKED: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 20,
    "messages": [*HISTORY, {"role": "user", "content": "and now?"}],
    "betas": [BETA],
    "context_management": {"edits": [{"type": THINKING}]},
}


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_and_the_answer_of_an_edited_request(
    scripted: ScriptedServer, messages: Any, stream: bool
) -> None:
    if stream:
        with messages.stream(**ASKED) as events:
            message = events.get_final_message()
    else:
        message = messages.create(**ASKED)
    assert "thought 2" not in scripted.prompt
    assert "thought 4" in scripted.prompt
    (edit,) = message.context_management.applied_edits
    assert (edit.type, edit.cleared_thinking_turns) == (THINKING, 2)
    import anthropic

    prompt = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    counted = messages.count_tokens(**prompt)
    before = messages.count_tokens(**{**prompt, "context_management": anthropic.omit})
    assert counted.context_management.original_input_tokens == before.input_tokens
    assert edit.cleared_input_tokens == before.input_tokens - counted.input_tokens > 0


def test_a_prompt_that_fits_once_it_is_cleared(messages: Any) -> None:
    import anthropic

    long = use(1)
    long[1]["content"][0]["content"] = "x" * 3_000_000
    history = [{"role": "user", "content": "go"}, *long, *use(2)]
    keep = {"type": "tool_uses", "value": 1}
    edits = [{"type": TOOL_USES, "keep": keep, "trigger": {"type": "input_tokens", "value": 5000}}]
    asked = {**ASKED, "messages": history}
    message = messages.create(**{**asked, "context_management": {"edits": edits}})
    (edit,) = message.context_management.applied_edits
    assert edit.cleared_input_tokens > 5000
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        messages.create(**asked)


@pytest.mark.parametrize("config", [{}, {"edits": []}, {"edits": None}])
def test_no_edits(messages: Any, config: dict[str, Any]) -> None:
    message = messages.create(**{**ASKED, "context_management": config})
    assert message.context_management.applied_edits == []


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"type": "compact_20260112"}, "only edits of type clear_thinking_20251015"),
        ({"type": "clear_tool_uses_20990101"}, "only edits of type"),
        ({}, "only edits of type"),
        ({"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}, "keep"),
        ({"type": THINKING, "keep": "some"}, "keep"),
        ({"type": TOOL_USES, "trigger": {"type": "moon", "value": 1}}, "trigger"),
        ({"type": TOOL_USES, "keep": {"type": "tool_uses", "value": -1}}, "keep"),
    ],
)
def test_edits_that_are_refused(scripted: ScriptedServer, edit: dict[str, Any], said: str) -> None:
    body = {**ASKED, "context_management": {"edits": [edit]}}
    del body["betas"]
    answer = scripted.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
