"""Answers that mean nothing say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.openai.http.options import ServerOptions

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "fox"}]},
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
