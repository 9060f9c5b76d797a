"""What becomes of fields that no API of the server knows, of HEAD, slashes and request ids."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.http import unknown_fields
from atom.entrypoints.http.errors import ApiError
from atom.entrypoints.http.unknown_fields import (
    HARMLESS,
    IGNORED_FIELDS_HEADER,
    MAX_IGNORED_FIELDS,
    REFUSED,
    UnknownFields,
    asks_for_nothing,
)
from atom.entrypoints.server_options import OptionError, ServerOptions

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
HARMLESS_FIELDS: dict[str, Any] = {
    "vllm_xargs": {},
    "documents": [],
    "use_beam_search": False,
    "detokenize": True,
    "length_penalty": 1.0,
    "separate_reasoning": True,
    "spaces_between_special_tokens": True,
    "mood": None,
    "moods": [{"of": "", "more": [None, False]}],
}
# What other servers and APIs do without being asked: as if these were left out.
DEFAULTS: dict[str, Any] = {
    "cache_prompt": True,
    "id_slot": -1,
    "echo": False,
    "include_stop_str_in_output": False,
    "logprobs": False,
    "n": 1,
    "parallel_tool_calls": True,
    "top_logprobs": 0,
    "best_of": 1,
    "do_sample": True,
    "early_stopping": False,
    "min_new_tokens": 0,
    "mirostat": 0,
    "mirostat_mode": 0,
    "n_predict": -1,
    "num_beam_groups": 1,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "use_beam_search": False,
    "no_stop_trim": False,
    "thinking_budget": -1,
    "thinking_token_budget": -1,
    "add_vision_id": False,
    "safe_prompt": False,
    "truncate_prompt_tokens": -1,
    "include_reasoning": True,
    "n_probs": 0,
    "logprob_start_len": -1,
    "return_cached_tokens_details": False,
    "return_hidden_states": False,
    "return_logprob": False,
    "return_meta_info": False,
    "return_routed_experts": False,
    "return_token_ids": False,
    "stream_reasoning": True,
    "return_tokens_as_token_ids": False,
    "top_logprobs_num": 0,
    "top_n_sigma": -1,
    "adaptive_target": -1,
    "length_penalty": 1,
    "guidance_scale": 1,
    "typical_p": 1,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    options = ServerOptions(tool_call_parser="hermes", enable_auto_tool_choice=True)
    server = ScriptedServer(byte_level_tokenizer, options)
    server.says("Fine.")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def strict(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    options = ServerOptions(
        tool_call_parser="hermes", enable_auto_tool_choice=True, unknown_fields="refuse"
    )
    server = ScriptedServer(byte_level_tokenizer, options)
    server.says("Fine.")
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("path", BODIES)
def test_what_asks_for_nothing_passes_everywhere(strict: ScriptedServer, path: str) -> None:
    answer = strict.post(path, json={**BODIES[path], **HARMLESS_FIELDS})
    assert answer.status_code == 200, answer.text
    assert IGNORED_FIELDS_HEADER not in answer.headers


@pytest.mark.parametrize("field", DEFAULTS)
def test_what_others_do_by_default_passes(strict: ScriptedServer, field: str) -> None:
    answer = strict.post("/detokenize", json={"tokens": [5], field: DEFAULTS[field]})
    assert answer.status_code == 200, answer.text
    assert strict.post("/detokenize", json={"tokens": [5], field: 7}).status_code == 400


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_ignored_and_named_or_refused(
    scripted: ScriptedServer, strict: ScriptedServer, path: str
) -> None:
    body = {**BODIES[path], "mood": 3}
    answer = scripted.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_FIELDS_HEADER] == "mood"
    refused = strict.post(path, json=body)
    assert refused.status_code == 400
    assert "mood is not a field that this server knows" in refused.text


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_streams_name_what_was_ignored(scripted: ScriptedServer, path: str) -> None:
    answer = scripted.post(path, json={**BODIES[path], "stream": True, "mood": 3})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers[IGNORED_FIELDS_HEADER] == "mood"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("detokenize", False),
        ("separate_reasoning", False),
        ("documents", [{"text": "x"}]),
        ("enable_thinking", False),
        ("echo", True),
        ("max_new_tokens", 5),
    ],
)
def test_what_changes_answers_stays_refused(
    scripted: ScriptedServer, field: str, value: Any
) -> None:
    answer = scripted.post(CHAT, json={"messages": USER, field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_field")


def test_nested_fields_are_named_by_path(scripted: ScriptedServer) -> None:
    tools = [TOOL, {"type": "function", "function": {**TOOL["function"], "mood": 1}}]
    body = {"messages": [{**USER[0], "id": "msg_1", "mood": 1}], "tools": [*tools, tools[1]]}
    answer = scripted.post(CHAT, json=body)
    assert answer.headers[IGNORED_FIELDS_HEADER] == "messages[0].mood, tools[1].function.mood"
    assert "mood" not in scripted.prompt


def test_formats_of_responses_are_judged_by_their_own_names(
    scripted: ScriptedServer, strict: ScriptedServer
) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "mood": 1}
    body = {"input": "hi", "text": {"format": schema}}
    assert "mood" in scripted.post("/v1/responses", json=body).headers[IGNORED_FIELDS_HEADER]
    assert strict.post("/v1/responses", json=body).json()["error"]["param"] == "text.format"


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "x", "tools": [TOOL]},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar"}}},
        {"type": "builtin_function", "function": {"name": "$web_search"}},
    ],
)
def test_tools_of_providers_are_left_out(
    scripted: ScriptedServer, strict: ScriptedServer, tool: dict[str, Any]
) -> None:
    answer = scripted.post(CHAT, json={"messages": USER, "tools": [TOOL, tool]})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_FIELDS_HEADER] == "tools[1]"
    refused = strict.post(CHAT, json={"messages": USER, "tools": [TOOL, tool]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[1]")
    alone = scripted.post(CHAT, json={"messages": USER, "tools": [tool]})
    assert alone.json()["choices"][0]["message"]["content"] == "Fine."


def test_tools_of_unknown_types_are_refused(scripted: ScriptedServer) -> None:
    answer = scripted.post(CHAT, json={"messages": USER, "tools": [{**TOOL, "type": "functoin"}]})
    assert answer.status_code == 400


def test_each_field_is_logged_once(
    scripted: ScriptedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_fields, "_logged", set())
    with caplog.at_level(logging.WARNING, logger=unknown_fields.__name__):
        for role in ("user", "system"):
            messages = [*USER, {"role": role, "content": "x", "mood": "line\nbreak"}]
            scripted.post(CHAT, json={"messages": messages})
    logged = [record.message for record in caplog.records if record.name == unknown_fields.__name__]
    assert logged == [
        "ignored in a request: 'messages[].mood is not a field that this server knows'"
    ]


def test_the_log_takes_so_many_kinds_of_fields(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_fields, "_logged", set())
    monkeypatch.setattr(unknown_fields, "MAX_LOGGED_KINDS", 2)
    fields = UnknownFields(refuses=False)
    for name in "abc":
        fields.ignore(name)
    assert [r.message.partition("'")[2][:2] for r in caplog.records] == ["a ", "b "]
    assert fields.ignored == ["a", "b", "c"]


def test_names_in_headers_are_plain_and_few(scripted: ScriptedServer) -> None:
    answer = scripted.post(CHAT, json={"messages": USER, "a\r\nb: 的": 1, "x" * 500: 1})
    names = answer.headers[IGNORED_FIELDS_HEADER].split(", ")
    assert names[0] == "a??b???"
    assert len(names[1]) <= 100
    many = {f"f{i}": 1 for i in range(MAX_IGNORED_FIELDS + 1)}
    refused = scripted.post(CHAT, json={"messages": USER, **many})
    assert refused.json()["error"]["code"] == "unknown_field"


def test_options() -> None:
    with pytest.raises(OptionError, match="--unknown-fields must be one of warn, refuse"):
        ServerOptions(unknown_fields="maybe")


def test_nothing_is_not_zero_or_one() -> None:
    assert all(map(asks_for_nothing, (None, False, "", [], {}, {"a": [{}, [None]]})))
    assert not any(map(asks_for_nothing, (0, 0.0, True, " ", [0], {"a": {"b": True}})))
    assert not HARMLESS.keys() & REFUSED.keys()
    fields = UnknownFields(refuses=True)
    with pytest.raises(ApiError):
        fields.ignore("x")


def test_head_is_get_without_the_body(scripted: ScriptedServer) -> None:
    for path in ("/", "/health", "/v1/models", "/version", "/metrics", "/openapi.json"):
        got, asked = httpx.get(scripted.url + path), httpx.head(scripted.url + path)
        assert (asked.status_code, asked.content) == (200, b""), path
        assert asked.headers["content-type"] == got.headers["content-type"]
    assert httpx.head(scripted.url + CHAT).status_code == 405
    assert httpx.head(scripted.url + "/nothing").status_code == 404


def test_slashes_at_the_end(scripted: ScriptedServer) -> None:
    assert scripted.post(CHAT + "/", json={"messages": USER}).status_code == 200
    assert httpx.get(scripted.url + "/v1/models/").json()["data"][0]["id"] == "scripted"
    assert httpx.get(scripted.url + "//").status_code == 200


def test_request_ids(scripted: ScriptedServer) -> None:
    given = {"X-Request-Id": "trace:1/a-b_c.d@e=f+"}
    for body in ({"messages": USER}, {"messages": USER, "stream": True}, {"messages": 5}):
        answer = scripted.post(CHAT, json=body, headers=given)
        assert answer.headers["x-request-id"] == given["X-Request-Id"], answer.text
    assert httpx.get(scripted.url + "/nothing", headers=given).headers["x-request-id"]
    made = set()
    for wrong in ("", "a b", "x" * 129, 'a"b', "<script>"):
        answer = httpx.get(scripted.url + "/health", headers={"X-Request-Id": wrong})
        made.add(answer.headers["x-request-id"])
        assert answer.headers["x-request-id"] != wrong
    assert len(made) == 5


def test_defects_have_request_ids(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("atom.entrypoints.server.api.prepare_chat", fail)
    answer = scripted.post(CHAT, json={"messages": USER}, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
