"""Texts that JSON can carry and UTF-8 cannot, names that are taken, and answers sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
from parser_texts import SPELLINGS, Call, Spelling
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HALVES = {r"\ud83d": "\ufffd", r"\uDE00\ud83d": "\ufffd\ufffd", r"\uDBff x": "\ufffd x"}
WHOLE = {
    r"\ud83d\ude00": "😀",
    r"\\ud83d": r"\ud83d",
    r"\\\ud83d": "\\\ufffd",
    r"é\ufffd": "é\ufffd",
}


@pytest.fixture(scope="module")
def server(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    scripted = ScriptedServer(byte_level_tokenizer, ServerOptions())
    scripted.says("Hi.")
    yield scripted
    scripted.stop()


def _bodies(text: Any) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return {
        CHAT: {"messages": messages},
        RESPONSES: {"input": text},
        MESSAGES: {"messages": messages, "max_tokens": 9},
        "/v1/completions": {"prompt": text},
        "/generate": {"text": text},
        "/tokenize": {"prompt": text},
        "/v1/messages/count_tokens": {"messages": messages},
    }


@pytest.mark.parametrize(("written", "read"), [*HALVES.items(), *WHOLE.items()])
def test_halves_of_surrogate_pairs_are_replaced_on_every_route(
    server: ScriptedServer, written: str, read: str
) -> None:
    for path, body in _bodies("{}").items():
        data = json.dumps({"model": "scripted", **body}).replace("{}", f"a{written}z")
        headers = {"Content-Type": "application/json"}
        answer = server.post(path, content=data.encode(), headers=headers)
        assert answer.status_code == 200, (path, answer.text)
        if path == "/tokenize":
            found = server.post("/detokenize", json={"tokens": answer.json()["tokens"]})
            assert found.json()["prompt"] == f"a{read}z"
        elif "count" not in path:
            assert f"a{read}z" in server.prompt, path


@pytest.mark.parametrize(
    "name", ["self", "messages", "tools", "conversation", "conversations", "documents", "tokenize"]
)
def test_names_that_are_no_variables_of_templates(server: ScriptedServer, name: str) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    answer = server.post(CHAT, json=body | {"chat_template_kwargs": {name: "x"}})
    assert answer.status_code == 400
    assert f"chat_template_kwargs cannot set {name}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["loads", "control_tokens", "variables", "sanitizes", "template"])
def test_names_of_our_own_are_variables_as_any(server: ScriptedServer, name: str) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    answer = server.post(CHAT, json=body | {"chat_template_kwargs": {name: "x"}})
    assert answer.status_code == 200, answer.text


TOOLS = [
    {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    for name in ("get_weather", "write-file")
]
ARGUMENTS = r'{"city": "Zürich 😀", "quote": "\"}\n"}'


def _ask(client: httpx.Client, path: str, history: Sequence[Any], limit: int) -> Any:
    body: dict[str, Any] = {"model": "scripted"}
    if path == CHAT:
        tools: list[Any] = [{"type": "function", "function": tool} for tool in TOOLS]
        body |= {"messages": history, "max_tokens": limit}
    elif path == RESPONSES:
        tools = [{"type": "function", **tool} for tool in TOOLS]
        body |= {"input": history, "max_output_tokens": limit, "store": False}
    else:
        tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in TOOLS]
        body |= {"messages": history, "max_tokens": limit}
    answer = client.post(path, json=body | {"tools": tools})
    assert answer.status_code == 200, (path, limit, history, answer.text)
    return answer.json()


def _with_answer(path: str, history: list[Any], answer: Any) -> list[Any]:
    """The history as clients of the API go on with it, results of calls included."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in calls]
        return [*history, message, *results]
    if path == RESPONSES:
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        kind = "function_call_output"
        results = [{"type": kind, "call_id": c["call_id"], "output": "ok"} for c in calls]
        return [*history, *answer["output"], *results]
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": c["id"], "content": "ok"} for c in calls]
    assistant = {"role": "assistant", "content": answer["content"]}
    return [*history, assistant, *([{"role": "user", "content": results}] if results else [])]


def _check_taken_back(
    tokenizer: PreTrainedTokenizerFast, spelling: Spelling, step: int, first: int
) -> None:
    """Every answer of every API, cut at every `step`-th token, is part of a history with 200."""
    calls = [Call("get_weather", ARGUMENTS), Call("write-file", "{}")][: spelling.num_calls]
    text = "Hm. 😀</think>" + spelling.spell(["Ja: é", calls] if spelling.is_sectioned else [calls])
    options = ServerOptions(tool_call_parser=spelling.name, reasoning_parser="think_tags")
    server = ScriptedServer(tokenizer, options)
    size = len(tokenizer.encode(text, add_special_tokens=False)) + 2
    client = httpx.Client(base_url=server.url, timeout=60)
    try:
        for path in (CHAT, RESPONSES, MESSAGES):
            ask = partial(_ask, client, path)
            for limit in range(first, size, step):
                server.says(f"<think>{text}", tokens_per_step=1 + limit % 4)
                history: list[Any] = [{"role": "user", "content": "hi"}]
                history = _with_answer(path, history, ask(history, limit))
                server.says("Done.")
                ask([*history, {"role": "user", "content": "Go on."}], 5)
    finally:
        client.close()
        server.stop()


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.name)
def test_answers_that_were_cut_are_taken_back(
    byte_level_tokenizer: PreTrainedTokenizerFast, spelling: Spelling
) -> None:
    _check_taken_back(byte_level_tokenizer, spelling, 47, 9)


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.name)
def test_answers_that_were_cut_anywhere_are_taken_back(
    byte_level_tokenizer: PreTrainedTokenizerFast, spelling: Spelling
) -> None:
    _check_taken_back(byte_level_tokenizer, spelling, 1, 1)
