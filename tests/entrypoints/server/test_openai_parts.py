"""The server's parts without an engine: bodies, fields, streams, errors, metrics, options."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from atom.entrypoints.chat.params import SHARED_FIELDS
from atom.entrypoints.chat.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from atom.entrypoints.http import body as body_module
from atom.entrypoints.http.body import BodyRoom, parse_body, read_body
from atom.entrypoints.http.errors import ApiError, as_api_error
from atom.entrypoints.http.metrics import ServerMetrics
from atom.entrypoints.http.sse import DONE, EventStream, encode_event
from atom.entrypoints.http.unknown_fields import UnknownFields
from atom.entrypoints.openai.completions import parse_prompts
from atom.entrypoints.server_options import ServerOptions
from atom.messages import (
    EngineDeadError,
    EngineStats,
    RefusedSequence,
    RequestRefusedError,
)
from atom.model_engine.admission import ClientFullError, QueueFullError
from atom.model_engine.async_engine import (
    EngineShuttingDownError,
    EngineStuckError,
)
from atom.model_engine.replicas.replica_set import ReplicaHealth
from atom.outputs import RequestMetrics
from atom.sampling_params import SamplingParams
from atom.stats import SpecDecodeStats
from atom.text.observer import NOBODY, FinishedRequest

LIMIT = 1000
ROOM = BodyRoom(3 * LIMIT)


def _body_app() -> FastAPI:
    async def echo(request: Request) -> Response:
        try:
            with ROOM.share() as take:
                data = await read_body(request, LIMIT, take)
                found = parse_body(data, DetokenizeRequest, UnknownFields(refuses=True))
        except ApiError as error:
            return error.response("/")
        return Response(json.dumps(found.tokens))

    app = FastAPI(openapi_url=None)
    app.add_api_route("/", echo, methods=["POST"])
    return app


async def _post(content: Any, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=_body_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/", content=content, headers=headers)


async def test_bodies_up_to_the_limit() -> None:
    def content(size: int) -> bytes:
        return b'{"tokens":[1]}'.ljust(size)

    kind = {"content-type": "application/json; charset=utf-8"}
    assert (await _post(content(LIMIT), **kind)).json() == [1]
    assert (await _post(content(LIMIT + 1), **kind)).status_code == 413
    assert (await _post(content(LIMIT))).status_code == 415


async def test_an_endless_upload_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "MAX_DISCARDED_BYTES", 50_000)
    sent = 0

    async def upload() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 100
            yield b" " * 100

    assert (await _post(upload())).status_code == 413
    # So far it is read, since a client that writes to the end first sees the answer then.
    assert 50_000 <= sent < 60_000


async def test_what_is_far_too_large_is_refused_unread() -> None:
    async def upload() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    refused = await _post(upload(), **{"content-length": str(10**18)})
    assert refused.status_code == 413
    assert refused.headers["connection"] == "close"


async def test_a_stalled_upload_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "DISCARD_SECONDS", 0.05)

    async def upload() -> AsyncIterator[bytes]:
        yield b" " * (LIMIT + 1)
        await asyncio.sleep(60)

    assert (await _post(upload())).status_code == 413


def test_fields_are_named_by_their_path() -> None:
    names = ("messages", 0, "content", "list[ContentPart]", 1, "<lambda>", "image_url", "str")
    assert body_module._path(names) == "messages[0].content[1].image_url"
    assert body_module._path(("tools",)) == "tools"


async def test_a_room_may_be_full() -> None:
    room = BodyRoom(10)
    with room.share() as take:
        take(4)
        take(6)
        assert room.num_bytes == 10
        with pytest.raises(ApiError, match="exceed 10 bytes"):
            take(1)
    assert room.num_bytes == 0


async def test_bodies_share_their_room() -> None:
    """Whoever finds none is told to come again, and what was held is free afterwards."""
    kind = {"content-type": "application/json"}
    more = asyncio.Event()

    async def upload() -> AsyncIterator[bytes]:
        yield b'{"tokens":[1]}'.ljust(LIMIT - 1)
        await more.wait()
        yield b" "

    waiting = [asyncio.create_task(_post(upload(), **kind)) for _ in range(3)]
    while ROOM.num_bytes < 3 * (LIMIT - 1):
        await asyncio.sleep(0.001)
    refused = await _post(b'{"tokens":[2]}', **kind)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    more.set()
    assert [(await task).json() for task in waiting] == [[1]] * 3
    assert ROOM.num_bytes == 0
    assert (await _post(b'{"tokens":[2]}', **kind)).json() == [2]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = sorted(
    {
        name
        for model in (CompletionRequest, ChatCompletionRequest)
        for name in (*model.model_fields, *model.UNSUPPORTED)
    }
)


@settings(max_examples=60)
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON_VALUES),
    raw=st.none() | st.binary(max_size=30),
)
def test_any_body_is_understood_or_described(fields: dict[str, Any], raw: bytes | None) -> None:
    data = json.dumps(fields).encode() if raw is None else raw
    for model in (CompletionRequest, ChatCompletionRequest):
        try:
            model.model_validate_json(data)
        except ValidationError as error:
            described = body_module.describe(error)
            assert described.status == 400
            assert described.message


def test_the_shared_fields_are_the_requests_and_the_engines() -> None:
    assert SHARED_FIELDS.issubset(CompletionRequest.model_fields)
    assert SHARED_FIELDS.issubset(ChatCompletionRequest.model_fields)
    converted_apart = {"max_tokens", "logprobs", "kept_special_tokens", "structured_output"}
    converted_apart |= {"structured_outputs"}
    offline_only = {"bad_word_ids", "logits_processors"}
    assert set(SamplingParams.__struct_fields__) == SHARED_FIELDS | converted_apart | offline_only


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_every_unsupported_field_is_refused(
    model: type[CompletionRequest] | type[ChatCompletionRequest],
) -> None:
    base: dict[str, Any] = {"prompt": "x"}
    if model is ChatCompletionRequest:
        base = {"messages": [{"role": "user", "content": "x"}]}
    assert not model.UNSUPPORTED.keys() & model.model_fields.keys()
    for name, harmless in model.UNSUPPORTED.items():
        for value in (*harmless, None):
            made = model.model_validate_json(json.dumps({**base, name: value}))
            assert not made.model_extra
        with pytest.raises(ValidationError, match=f"{name} is not supported"):
            model.model_validate_json(json.dumps({**base, name: {"some": "value"}}))


def test_the_documentation_names_every_field() -> None:
    text = (Path(__file__).parents[3] / "docs" / "server.md").read_text()
    for model in (CompletionRequest, ChatCompletionRequest):
        for name in (*model.model_fields, *model.UNSUPPORTED):
            assert f"`{name}" in text, name
    parser = argparse.ArgumentParser()
    ServerOptions.add_cli_args(parser)
    for action in parser._actions:
        if "--help" not in action.option_strings:
            assert action.option_strings[0] in text


def test_prompts_in_four_shapes() -> None:
    assert parse_prompts("a") == ["a"]
    assert parse_prompts(["a", "b"]) == ["a", "b"]
    assert parse_prompts([1, 2]) == [[1, 2]]
    assert parse_prompts([[1], [2, 3]]) == [[1], [2, 3]]


async def _stream(
    events: AsyncGenerator[bytes, None], disconnects: asyncio.Event
) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await disconnects.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await EventStream(encode_event({"n": 0}), events)({"type": "http"}, receive, send)
    return sent


async def test_a_stream_that_fails_says_so() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield encode_event({"n": 1})
        raise EngineDeadError("it died")

    sent = await _stream(events(), asyncio.Event())
    assert sent[0]["status"] == 200
    assert dict(sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
    text = b"".join(message["body"] for message in sent[1:]).decode()
    assert text.startswith('data: {"n":0}\n\ndata: {"n":1}\n\ndata: {"error":')
    assert "it died" in text
    assert DONE.decode() not in text
    assert sent[-1]["more_body"] is False


async def test_a_stream_is_closed_when_its_reader_leaves() -> None:
    disconnects = asyncio.Event()
    closed = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal closed
        try:
            yield b"data: 1\n\n"
            disconnects.set()
            await asyncio.sleep(60)
        finally:
            closed = True

    await asyncio.wait_for(_stream(events(), disconnects), 30)
    assert closed


def test_exceptions_become_answers() -> None:
    assert as_api_error(RequestRefusedError("no", "n")).status == 400
    failed = as_api_error(RefusedSequence("r/0", "ValueError: oops", is_fault=True).error())
    assert (failed.status, failed.code) == (500, "request_failed")
    assert "oops" in failed.message
    refused = as_api_error(RefusedSequence("r/0", "no token", "structured_output").error())
    assert (refused.status, refused.param) == (400, "structured_output")
    full = as_api_error(QueueFullError("full", 7))
    assert (full.status, full.code, full.headers) == (429, "queue_full", {"Retry-After": "7"})
    assert as_api_error(ClientFullError("full")).code == "key_full"
    assert as_api_error(EngineDeadError("dead")).code == "engine_dead"
    assert as_api_error(EngineShuttingDownError("bye")).code == "shutting_down"
    assert as_api_error(EngineStuckError("slow")).code == "unhealthy"
    unforeseen = as_api_error(KeyError("secret"))
    assert unforeseen.status == 500
    assert "secret" not in unforeseen.message


def test_metrics_are_counted_apart() -> None:
    metrics, other = ServerMetrics(), ServerMetrics()
    metrics.on_first_token(0.3, 5)
    metrics.on_tokens(1, None)
    metrics.on_tokens(2, 0.02)
    times = RequestMetrics(10.0, first_scheduled_time=10.5, finished_time=12.0)
    finished = FinishedRequest(NOBODY, SamplingParams(), times, "stop", 5, 0, 3)
    metrics.on_request_finished(finished)
    stats = EngineStats(num_running=2, num_blocks=8, num_used_blocks=2, prefix_cache_hits=48)
    stats.block_size, stats.kv_cache_dtype = 16, "float8_e4m3fn"
    text = metrics.expose(stats)[0].decode()
    for line in (
        "atom:num_requests_running 2.0",
        "atom:kv_cache_usage_ratio 0.25",
        'atom:kv_cache_info{block_size="16",dtype="float8_e4m3fn"} 1.0',
        "atom:prefix_cache_hits_total 48.0",
        "atom:prompt_tokens_total 5.0",
        'atom:requests_finished_total{reason="stop"} 1.0',
        'atom:requests_finished_total{reason="abort"} 0.0',
        "atom:time_to_first_token_seconds_sum 0.3",
        "atom:inter_token_latency_seconds_sum 0.02",
        "atom:inter_token_latency_seconds_count 2.0",
        "atom:e2e_request_latency_seconds_sum 2.0",
        "atom:request_queue_time_seconds_sum 0.5",
    ):
        assert line in text.splitlines(), text
    assert "atom:time_to_first_token_seconds_count 0.0" in other.expose(stats)[0].decode()


def test_metrics_of_replicas_are_told_apart() -> None:
    drafts = SpecDecodeStats(num_drafts=3, num_draft_tokens=3, accepted_counts=[1, 2])
    stats = [EngineStats(num_running=1), EngineStats(num_running=2, spec_decode=drafts)]
    health = [ReplicaHealth(None, 0), ReplicaHealth("it is silent", 4)]
    text = ServerMetrics().expose(*stats, health=health)[0].decode()
    for line in (
        'atom:num_requests_running{replica="0"} 1.0',
        'atom:num_requests_running{replica="1"} 2.0',
        'atom:spec_decode_num_accepted_tokens_per_pos_total{position="0",replica="1"} 2.0',
        'atom:replica_healthy{replica="0"} 1.0',
        'atom:replica_healthy{replica="1"} 0.0',
        'atom:replica_restarts_total{replica="1"} 4.0',
    ):
        assert text.splitlines().count(line) == 1, text
    assert text.count("# TYPE atom:num_requests_running gauge") == 1
    alone = ServerMetrics().expose(stats[1], health=health[:1])[0].decode().splitlines()
    assert "atom:num_requests_running 2.0" in alone
    assert 'atom:replica_healthy{replica="0"} 1.0' in alone


def _options(*flags: str) -> ServerOptions:
    parser = argparse.ArgumentParser()
    ServerOptions.add_cli_args(parser)
    return ServerOptions.from_cli_args(parser.parse_args(flags))


def test_the_key_comes_from_the_environment_when_no_flag_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATOM_API_KEY", raising=False)
    assert _options().api_keys == ()
    monkeypatch.setenv("ATOM_API_KEY", "env")
    assert _options().api_keys == ("env",)
    assert _options("--api-key", "a", "b", "--api-key", "c").api_keys == ("a", "b", "c")


def test_defaults_stay_at_home() -> None:
    options = _options()
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert options.cors_allow_origins == ()
