"""What one request may hold, and that large ones do not hold the event loop."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.generation import whole_response
from atom.entrypoints.chat.tokenization import PromptEncoder
from atom.entrypoints.http import json_budget
from atom.entrypoints.http.errors import ApiError
from atom.entrypoints.http.json_budget import JsonBudget
from atom.entrypoints.http.unknown_fields import IGNORED_FIELDS_HEADER
from atom.entrypoints.http.workers import MAX_INLINE
from atom.entrypoints.server import api
from atom.entrypoints.server_options import ServerOptions

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    options = ServerOptions(chat_template=TEMPLATE)
    server = ScriptedServer(byte_level_tokenizer, options)
    yield server
    server.stop()


def error_of(server: ScriptedServer, path: str, body: Any) -> dict[str, Any]:
    answer = server.post(path, json=body)
    assert answer.status_code == 400, answer.text[:1000]
    found = answer.json()["error"]
    assert isinstance(found, dict)
    return found


def chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


LONG = "x" * (MAX_INLINE + 1)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": chat(LONG)},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": chat(LONG), "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": chat(LONG)},
    "/tokenize": {"prompt": LONG},
    "/detokenize": {"tokens": [1] * MAX_INLINE},
}


@pytest.mark.parametrize("path", BODIES)
def test_large_bodies_are_worked_on_in_a_thread(
    server: ScriptedServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread().name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(api, "parse_body")
    watch(PromptEncoder, "encode")
    watch(PromptEncoder, "encode_chat")
    watch(PromptEncoder, "decode")
    server.says("yes")
    assert server.post(path, json=BODIES[path]).status_code == 200
    # The reasoning that was not there is counted where it is.
    assert all(name.startswith("request") for name in threads[:2]), threads


def test_tools_are_rendered_in_a_thread(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages are short, what comes with them is not."""
    threads: list[str] = []
    original = PromptEncoder._render

    def watched(self: PromptEncoder, *args: Any) -> str:
        threads.append(threading.current_thread().name)
        return original(self, *args)

    monkeypatch.setattr(PromptEncoder, "_render", watched)
    function = {"name": "f", "description": LONG}
    body = {"messages": chat("hi"), "tools": [{"type": "function", "function": function}]}
    assert server.post("/tokenize", json=body).status_code == 200
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'["{LONG}"]'}}
    history = [*chat("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert server.post("/tokenize", json={"messages": history}).status_code == 200
    assert len(threads) == 2
    assert all(name.startswith("request") for name in threads)


@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_spelled_in_a_thread(
    server: ScriptedServer, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return whole_response(*args)

    monkeypatch.setattr("atom.entrypoints.chat.generation.whole_response", watched)
    original = PromptEncoder.decode

    def decode(self: PromptEncoder, *args: Any, **kwargs: Any) -> str:
        threads.append(threading.current_thread().name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PromptEncoder, "decode", decode)
    server.says("yes")
    body = {"prompt": [1] * (MAX_INLINE + 1), "echo": True, "stream": stream}
    assert server.post("/v1/completions", json=body).status_code == 200
    assert len(threads) == 2 - stream
    assert all(name.startswith("request") for name in threads)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"cache_salt": "a" * 1025}, "cache_salt"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 9, "n": 128}, "prompt"),
    ],
)
def test_what_a_request_may_ask(server: ScriptedServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(server, "/v1/completions", {"prompt": "a", **fields})["param"] == param


def test_the_most_that_a_request_may_ask(server: ScriptedServer) -> None:
    server.says("yes")
    most = {
        "prompt": ["x"] * 512,
        "n": 2,
        "stop": ["z" * 1024] * 64,
        "stop_token_ids": [2] * 1024,
        "logit_bias": {str(i): 1 for i in range(min(1024, server.vocab_size))},
    }
    answer = server.post("/v1/completions", json=most)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 1024


PART = {"type": "text", "text": "a"}
TOO_MANY = json_budget.MAX_JSON_PARTS // 3 + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * TOO_MANY}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": chat("a") * TOO_MANY}),
        ("/v1/completions", {"prompt": "a", "metadata": [[]] * json_budget.MAX_JSON_PARTS}),
        ("/v1/completions", {f"a{i}": 1 for i in range(json_budget.MAX_JSON_PARTS)}),
        ("/v1/completions", {"prompt": [0] * (json_budget.MAX_JSON_VALUES + 2)}),
    ],
)
def test_bodies_of_too_many_values(server: ScriptedServer, path: str, body: Any) -> None:
    answer = server.post(path, json=body)
    assert answer.status_code == 400
    assert str(json_budget.MAX_JSON_PARTS) in answer.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ["[" * 200_000, "[" + "[]," * 70_000 + "[]]"])
def test_arguments_of_a_call_are_bounded_too(server: ScriptedServer, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [*chat("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    error_of(server, "/v1/chat/completions", {"messages": history})


def test_arguments_that_are_too_deep(server: ScriptedServer) -> None:
    call = {"function": {"name": "f", "arguments": "[" * 60_000}}
    history = [*chat("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    error_of(server, "/v1/chat/completions", {"messages": history})


VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a\\"{[:,é\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(alphabet='\\"{,', max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def count_parts(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count_parts, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count_parts, value.values()))
    return 0


@settings(max_examples=200)
@given(value=VALUES, slice_bytes=st.integers(1, 9), is_ascii=st.booleans())
def test_parts_are_counted_outside_of_strings(value: Any, slice_bytes: int, is_ascii: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_budget, "_SLICE_BYTES", slice_bytes)
        num_parts = count_parts(value)
        data = json.dumps(value, ensure_ascii=is_ascii).encode()
        patch.setattr(json_budget, "MAX_JSON_PARTS", num_parts)
        JsonBudget().spend(data)
        patch.setattr(json_budget, "MAX_JSON_PARTS", num_parts - 1)
        with pytest.raises(ApiError):
            JsonBudget().spend(data)


def test_a_body_may_have_65536_parts() -> None:
    JsonBudget().spend(b"[" * 65_536)
    with pytest.raises(ApiError, match="more than 65536 objects, arrays and keys"):
        JsonBudget().spend(b"[" * 65_537)


def test_text_within_a_body_spends_of_its_budget() -> None:
    budget = JsonBudget()
    assert budget.loads("[" + "[]," * 40_000 + "[]]")[-1] == []
    with pytest.raises(ApiError, match="more than 65536 objects, arrays and keys"):
        budget.loads("[" + "[]," * 40_000 + "[]]")


def test_values_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'[1,{"a":",,","b":2},3]'
    monkeypatch.setattr(json_budget, "MAX_JSON_VALUES", 3)
    JsonBudget().spend(data)
    monkeypatch.setattr(json_budget, "MAX_JSON_VALUES", 2)
    with pytest.raises(ApiError):
        JsonBudget().spend(data)


HUGE = "h" * 100_000
HUGE_PART = [{"role": "user", "content": [{"type": HUGE}]}]
DIGITS = 10**4000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "model": HUGE}),
        ("/v1/completions", {"prompt": "a", HUGE: 1}),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": HUGE}}),
        ("/v1/completions", {"prompt": "a", "stop": ["", "s" * 1000, *["t" * 1000] * 40]}),
        ("/v1/completions", {"prompt": "a", "n": DIGITS}),
        ("/v1/completions", {"prompt": "a", "best_of": DIGITS}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(DIGITS): 1}}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {HUGE: 1}}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [DIGITS]}),
        ("/v1/completions", {"prompt": [DIGITS]}),
        ("/v1/completions", {"prompt": "a", "guided_regex": "(" * 60_000}),
        ("/v1/completions", {"prompt": "a", "guided_json": {"type": HUGE[:60_000]}}),
        ("/v1/completions", {"prompt": "a", "guided_grammar": HUGE[:60_000]}),
        ("/v1/chat/completions", {"messages": [{"role": HUGE, "content": "a"}]}),
        ("/v1/chat/completions", {"messages": HUGE_PART}),
        ("/v1/chat/completions", {"messages": [{"role": "user", HUGE: "a"}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": HUGE_PART}),
        ("/v1/responses", {"input": [{"type": HUGE}]}),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": HUGE}}}),
        ("/v1/responses", {"input": "a", "tools": [{"type": HUGE}]}),
        ("/detokenize", {"tokens": [DIGITS]}),
        ("/v1/" + HUGE[:10_000], {}),
    ],
)  # fmt: skip
def test_errors_quote_little(server: ScriptedServer, path: str, body: Any) -> None:
    server.says("yes")
    answer = server.post(path, json=body)
    if answer.status_code == 200:  # what is wrong with a grammar shows in the engine
        named = answer.headers.get(IGNORED_FIELDS_HEADER, "")
        assert named or any(name.startswith("guided") for name in body)
        assert len(named) < 200
        return
    assert answer.status_code in (400, 404, 405)
    assert len(answer.content) < 1200, answer.text


def test_headers_are_quoted_little(server: ScriptedServer) -> None:
    headers = {"content-type": "t" * 10_000}
    answer = server.post("/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert len(answer.content) < 600


def test_a_prompt_counts_once_however_many_answers(server: ScriptedServer) -> None:
    def counted() -> float:
        text = httpx.get(server.url + "/metrics", timeout=60).text
        found = re.search(r"^atom:prompt_tokens_total (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    server.says("yes")
    before = counted()
    usage = server.post("/v1/completions", json={"prompt": ["abc", "de"], "n": 4}).json()["usage"]
    assert counted() - before == usage["prompt_tokens"]
