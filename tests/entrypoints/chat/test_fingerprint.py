"""Answers that mean nothing say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

USER = {"role": "user", "content": "fox"}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER]},
    "completions": {"prompt": "fox"},
}


@pytest.fixture(scope="module", params=[None, 2.5])
def server(
    request: pytest.FixtureRequest, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[ScriptedServer, str | None]]:
    length = request.param
    server = ScriptedServer(
        byte_level_tokenizer, ServerOptions(), synthetic_acceptance_length=length
    )
    yield server, None if length is None else "synthetic-acceptance-length-2.5"
    server.stop()


@pytest.mark.parametrize("path", BODIES)
def test_whole_and_streamed_answers_have_it(
    server: tuple[ScriptedServer, str | None], path: str
) -> None:
    scripted, expected = server
    scripted.says("a b")
    whole = scripted.post(f"/v1/{path}", json=BODIES[path]).json()
    body = {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}}
    lines = scripted.post(f"/v1/{path}", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(chunks) > 2
    assert {answer.get("system_fingerprint") for answer in (whole, *chunks)} == {expected}


def test_responses_have_it(server: tuple[ScriptedServer, str | None]) -> None:
    """Also in the responses of a stream's events, as its client reads them."""
    scripted, expected = server
    scripted.says("a b")
    client = OpenAI(base_url=f"{scripted.url}/v1", api_key="none")
    whole = client.responses.create(model="scripted", input="fox", metadata={"own": "x"})
    assert whole.metadata == {"own": "x"}
    events = [*client.responses.create(model="scripted", input="fox", stream=True)]
    streamed = [event.response for event in events if hasattr(event, "response")]
    assert len(streamed) == 3
    said = {(response.model_extra or {}).get("system_fingerprint") for response in streamed}
    assert said == {(whole.model_extra or {}).get("system_fingerprint")} == {expected}


def test_messages_have_it(server: tuple[ScriptedServer, str | None]) -> None:
    """In a stream's first event, so that the client's accumulated message has it, too."""
    scripted, expected = server
    scripted.says("a b")
    import anthropic  # takes seconds, which workers without these tests save

    client = anthropic.Anthropic(base_url=scripted.url, api_key="none")
    body: Any = {"model": "scripted", "max_tokens": 9, "messages": [USER]}
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert (message.model_extra or {}).get("system_fingerprint") == expected


def test_generated_texts_have_it(server: tuple[ScriptedServer, str | None]) -> None:
    scripted, expected = server
    scripted.says("a b")
    whole = scripted.post("/generate", json={"text": "fox"}).json()
    lines = scripted.post("/generate", json={"text": "fox", "stream": True}).text.split("\n\n")
    streamed = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(streamed) > 1
    assert {a["meta_info"].get("system_fingerprint") for a in (whole, *streamed)} == {expected}
