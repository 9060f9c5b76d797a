"""What real clients send, recorded with `recorder.py`, is answered as they expect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

RECORDINGS = Path(__file__).parents[1] / "recordings"
TEXT = "Red, as ever."
CLIENTS = (
    "ai_sdk",
    "aiperf",
    "guidellm",
    "langchain_chat",
    "litellm_completion",
    "openai_node",
    "openai_python",
    "sglang_generate",
)


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    """Refuses what it does not know: nothing in these recordings is ignored."""
    options = ServerOptions(
        served_model_names=("model",),
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
        unknown_fields="refuse",
    )
    server = ScriptedServer(byte_level_tokenizer, options)
    server.says(TEXT, 2)
    try:
        yield server
    finally:
        server.stop()


def _recorded() -> list[Any]:
    return [
        pytest.param(request, id=f"{name}-{number}")
        for name in CLIENTS
        for number, request in enumerate(json.loads((RECORDINGS / f"{name}.json").read_text()))
    ]


@pytest.mark.parametrize("request_", _recorded())
def test_replayed(scripted: ScriptedServer, request_: dict[str, Any]) -> None:
    answer = httpx.request(
        request_["method"], scripted.url + request_["path"], json=request_.get("body"), timeout=60
    )
    assert answer.status_code == 200, answer.text
    body = request_.get("body")
    if body is None:
        _check_told(request_["path"], answer)
        return
    limit = _limit(body)
    if not body.get("stream"):
        usage = answer.json().get("usage") or answer.json()["meta_info"]
        assert 0 < usage["completion_tokens"] <= limit
        _check_text(body, [_text(choice) for choice in answer.json()["choices"]])
        return
    *events, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    if "sampling_params" in body:
        assert 0 < chunks[-1]["meta_info"]["completion_tokens"] <= limit
        _check_text(body, [chunks[-1]["text"]])
    else:
        pieces = [_text(choice) for chunk in chunks for choice in chunk["choices"]]
        _check_text(body, ["".join(pieces)])
        _check_usage(chunks, body.get("stream_options") or {}, limit)


def _check_told(path: str, answer: httpx.Response) -> None:
    """What clients ask for before and beside generating."""
    match path:
        case "/v1/models":
            assert [model["id"] for model in answer.json()["data"]] == ["model"]
        case "/health":
            assert answer.json() == {"status": "ok"}
        case "/metrics":  # asked for by HEAD alone
            assert answer.headers["content-type"].startswith("text/plain; version=1.0.0")
            assert int(answer.headers["content-length"]) > 1000
        case _:
            raise AssertionError(f"nobody said what {path} answers")


def _text(choice: dict[str, Any]) -> str:
    """Of an answer or a part of one."""
    message = choice.get("message") or choice.get("delta")
    return str((choice["text"] if message is None else message.get("content")) or "")


def _check_text(body: dict[str, Any], texts: list[str]) -> None:
    """It is what the server says, as far as the limit lets it."""
    [text] = texts
    said = text.removeprefix(body["prompt"]) if body.get("echo") else text
    assert said
    assert TEXT.startswith(said)


def _limit(body: dict[str, Any]) -> int:
    names = ("max_completion_tokens", "max_tokens")
    given = [body[name] for name in names if name in body]
    return int((given or [body["sampling_params"]["max_new_tokens"]])[0])


def _check_usage(chunks: list[dict[str, Any]], options: dict[str, Any], limit: int) -> None:
    texts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert texts[-1]["finish_reason"] in ("stop", "length")
    if options.get("include_usage"):
        assert chunks[-1]["choices"] == []
        assert 0 < chunks[-1]["usage"]["completion_tokens"] <= limit
    if options.get("continuous_usage_stats"):
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
