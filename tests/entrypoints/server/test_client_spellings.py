"""What clients write otherwise than OpenAI's reference, and what they look for in answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{{ {'messages': messages, 'thinking': thinking | default(none), "
    "'enable_thinking': enable_thinking | default(none)} | tojson }}"
)
CONTINUED = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}!"


def _serve(tokenizer: PreTrainedTokenizerFast, template: str) -> Iterator[ScriptedServer]:
    options = ServerOptions(
        reasoning_parser="think_tags", chat_template=template, unknown_fields="refuse"
    )
    server = ScriptedServer(tokenizer, options)
    server.says("<think>Well.</think>Fine, thank you.")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    yield from _serve(byte_level_tokenizer, TEMPLATE)


@pytest.fixture(scope="module")
def continuing(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    yield from _serve(byte_level_tokenizer, CONTINUED)


def _ask(server: ScriptedServer, **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, json={"messages": USER, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _chunks(server: ScriptedServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post(path, json={**fields, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_reasoning_has_two_names(scripted: ScriptedServer) -> None:
    message = _ask(scripted)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Well."
    deltas = [c["choices"][0]["delta"] for c in _chunks(scripted, CHAT, messages=USER)]
    thoughts = [d for d in deltas if "reasoning" in d]
    assert "".join(d["reasoning"] for d in thoughts) == "Well."
    assert all(d["reasoning"] == d["reasoning_content"] for d in thoughts)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_in_histories(scripted: ScriptedServer, name: str) -> None:
    _ask(scripted, messages=[*USER, {"role": "assistant", "content": "a", name: "why"}, *USER])
    assert json.loads(scripted.prompt)["messages"][1]["reasoning_content"] == "why"


@pytest.mark.parametrize("kind", ["enabled", "disabled"])
def test_kimis_switch(scripted: ScriptedServer, kind: str) -> None:
    _ask(scripted, thinking={"type": kind})
    given = json.loads(scripted.prompt)
    assert given["thinking"] is given["enable_thinking"] is (kind == "enabled")
    _ask(scripted, thinking={"type": kind}, chat_template_kwargs={"thinking": True})
    assert json.loads(scripted.prompt)["thinking"] is True
    assert scripted.post(CHAT, json={"messages": USER, "thinking": {"type": "x"}}).is_client_error


def test_partial_messages_are_continued(continuing: ScriptedServer) -> None:
    begun = {"role": "assistant", "content": "Fine, ", "partial": True}
    _ask(continuing, messages=[*USER, begun])
    assert continuing.prompt == "<user>hi<assistant>Fine, "
    _ask(continuing, messages=[*USER, {**begun, "partial": False}])
    assert continuing.prompt == "<user>hi<assistant>Fine, !"
    for messages in ([begun, *USER], [{**USER[0], "partial": True}]):
        answer = continuing.post(CHAT, json={"messages": messages})
        assert answer.json()["error"]["param"] == "messages[0].partial"


def test_refusals_are_text(scripted: ScriptedServer) -> None:
    part = {"type": "refusal", "refusal": "No."}
    _ask(scripted, messages=[*USER, {"role": "assistant", "content": [part]}, *USER])
    assert json.loads(scripted.prompt)["messages"][1]["content"] == "No."
    _ask(scripted, messages=[*USER, {"role": "assistant", "refusal": "No."}, *USER])
    assert json.loads(scripted.prompt)["messages"][1]["content"] == "No."


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 2.0}, 2),
        ({"max_tokens": 3, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 2, "max_completion_tokens": 3}, 2),
        ({"max_tokens": -1, "max_completion_tokens": 2}, 2),
        ({"max_tokens": -1}, None),
        ({"stop": ""}, None),
        ({"model": ""}, None),
        ({"stream_options": {"include_usage": True}}, None),
    ],
)
def test_small_spellings(
    scripted: ScriptedServer, fields: dict[str, Any], limit: int | None
) -> None:
    found = _ask(scripted, **fields)
    if limit is None:
        assert found["choices"][0]["finish_reason"] == "stop"
    else:
        assert found["usage"]["completion_tokens"] == limit
    answer = scripted.post(
        "/v1/completions",
        json={"prompt": "hi", **{k: v for k, v in fields.items() if k != "max_completion_tokens"}},
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_usage_in_every_chunk(scripted: ScriptedServer, path: str, last: bool) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    options = {"include_usage": last, "continuous_usage_stats": True}
    chunks = _chunks(scripted, path, **body, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert len(set(counts)) > 5
    whole = scripted.post(path, json=body).json()["usage"]
    assert chunks[-1]["usage"]["total_tokens"] == whole["total_tokens"]
    assert (chunks[-1]["choices"] == []) is last
