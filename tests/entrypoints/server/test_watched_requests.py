"""What a server says of its requests: in the log, in /metrics, and to a collector of traces."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from patience import wait_until
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom import logs
from atom.entrypoints import server_options
from atom.entrypoints.server_options import ApiKey, OptionError, ServerOptions

KEYS = (ApiKey("alice", "sk-alice-1"), ApiKey("alice", "sk-alice-2"), ApiKey("bob", "sk-bob"))
ASKED, SAID = "a private question", "a private answer"
BODY = {"prompt": ASKED, "max_tokens": 500}


@contextmanager
def serving(tokenizer: PreTrainedTokenizerFast, **options: Any) -> Iterator[ScriptedServer]:
    server = ScriptedServer(tokenizer, ServerOptions(file_api_keys=KEYS, **options))
    server.says(SAID)
    try:
        yield server
    finally:
        server.stop()


def ask(server: ScriptedServer, key: str, path: str = "/v1/completions", **headers: str) -> int:
    headers = {"Authorization": f"Bearer {key}", **headers}
    return server.post(path, json=BODY, headers=headers).status_code


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the log of a server holds at level `debug`, as JSON."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logs.JsonFormatter())
    logger = logging.getLogger("atom")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield text
    logger.removeHandler(handler)
    logger.setLevel(level)


def lines_of(log: io.StringIO, logger: str, level: str = "INFO") -> list[dict[str, Any]]:
    lines = map(json.loads, log.getvalue().splitlines())
    return [line for line in lines if (line["logger"], line["level"]) == (logger, level)]


def test_the_log_names_requests_and_no_secret(
    byte_level_tokenizer: PreTrainedTokenizerFast, log: io.StringIO
) -> None:
    with serving(byte_level_tokenizer, enable_log_requests=True) as server:
        assert ask(server, "sk-alice-2", **{"x-request-id": "mine"}) == 200
        assert ask(server, "sk-wrong") == 401
        assert ask(server, "sk-bob", "/v1/nowhere?api_key=sk-bob") == 404
        wait_until(lambda: len(lines_of(log, "atom.access")) == 3)
        metrics = httpx.get(f"{server.url}/metrics", headers={"x-api-key": "sk-bob"}).text
    (ended,) = lines_of(log, "atom.requests")
    assert ended["request_id"] == "mine"
    assert ended["api_key"] == "alice"
    assert ended["finish_reason"] == "stop"
    assert ended["prompt_tokens"] == len(byte_level_tokenizer.encode(ASKED))
    assert ended["completion_tokens"] == len(byte_level_tokenizer.encode(SAID)) + 1
    assert 0 <= ended["first_token_seconds"] <= ended["seconds"]
    access = lines_of(log, "atom.access")[:3]
    assert [(line["status"], line["api_key"]) for line in access] == [
        (200, "alice"),
        (401, ""),
        (404, "bob"),
    ]
    assert access[0]["request_id"] == "mine"
    assert access[2]["message"] == "POST '/v1/nowhere'"
    for secret in ("sk-", ASKED, SAID):
        assert secret not in log.getvalue()
        assert secret not in metrics


def test_without_the_option_the_log_is_quiet(
    byte_level_tokenizer: PreTrainedTokenizerFast, log: io.StringIO
) -> None:
    with serving(byte_level_tokenizer) as server:
        assert ask(server, "sk-bob") == 200
        wait_until(lambda: lines_of(log, "atom.access", "DEBUG"))
        metrics = httpx.get(f"{server.url}/metrics", headers={"x-api-key": "sk-bob"}).text
    assert not lines_of(log, "atom.access")
    assert not lines_of(log, "atom.requests")
    assert "alice" not in metrics
    assert "bob" not in metrics


def test_counters_of_each_key(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    with serving(byte_level_tokenizer, metrics_per_api_key=True) as server:
        for key in ("sk-alice-1", "sk-alice-2"):
            assert ask(server, key) == 200
        metrics = httpx.get(f"{server.url}/metrics", headers={"x-api-key": "sk-bob"}).text
    prompt, answer = (len(byte_level_tokenizer.encode(text)) for text in (ASKED, SAID))
    for line in (
        'atom:requests_finished_by_api_key_total{api_key="alice"} 2.0',
        'atom:requests_finished_by_api_key_total{api_key="bob"} 0.0',
        f'atom:prompt_tokens_by_api_key_total{{api_key="alice"}} {2.0 * prompt}',
        f'atom:generation_tokens_by_api_key_total{{api_key="alice"}} {2.0 * (answer + 1)}',
    ):
        assert line in metrics.splitlines(), metrics


def test_one_key_cannot_take_everything(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    with serving(byte_level_tokenizer, max_requests_per_key=2) as server:
        many = {"prompt": [ASKED] * 3}
        refused = server.post("/v1/completions", json=many, headers={"x-api-key": "sk-alice-1"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "key_full"
        assert int(refused.headers["retry-after"]) >= 1
        # Nothing of it is left behind.
        two = {"prompt": [ASKED] * 2}
        for key in ("sk-alice-2", "sk-bob"):
            answer = server.post("/v1/completions", json=two, headers={"x-api-key": key})
            assert answer.status_code == 200


def test_traces_need_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:4318/v1/traces"
    monkeypatch.setattr(server_options, "_can_import", lambda *_: False)
    with pytest.raises(OptionError, match=r"pip install 'atom-llm\[otel\]'"):
        ServerOptions(otlp_traces_endpoint=url)
    monkeypatch.setattr(server_options, "_can_import", lambda *_: True)
    for wrong in ("127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://"):
        with pytest.raises(OptionError, match="must be a URL"):
            ServerOptions(otlp_traces_endpoint=wrong)


def test_what_is_missing_is_found_out() -> None:
    assert server_options._can_import("json.decoder")
    assert not server_options._can_import("json.decoder", "nowhere.at.all")


class Collector:
    """Takes spans by HTTP, as a collector does."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                is_small = self.headers.get("content-encoding") == "gzip"
                outer.bodies.append(gzip.decompress(body) if is_small else body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                del args

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        resources = [spans for request in requests for spans in request.resource_spans]
        return [s for each in resources for scope in each.scope_spans for s in scope.spans]


def test_a_collector_is_sent_spans(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector = Collector()
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"x-request-id": "mine", "traceparent": f"00-{trace}-{parent}-01"}
    try:
        with serving(byte_level_tokenizer, otlp_traces_endpoint=collector.url) as server:
            assert ask(server, "sk-bob", **headers) == 200
            assert ask(server, "sk-bob", traceparent="nonsense") == 200
        first, second = collector.spans  # sent at the latest when the server ends
    finally:
        collector.stop()
    assert (first.name, first.trace_id.hex(), first.parent_span_id.hex()) == (
        "llm_request",
        trace,
        parent,
    )
    assert second.parent_span_id == b""
    said = {each.key: each.value for each in first.attributes}
    assert said["gen_ai.request.id"].string_value == "mine"
    assert said["atom.api_key"].string_value == "bob"
    assert said["gen_ai.request.max_tokens"].int_value == 500
    answer = len(byte_level_tokenizer.encode(SAID)) + 1
    assert said["gen_ai.usage.completion_tokens"].int_value == answer
    seconds = (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(said["gen_ai.latency.e2e"].double_value, abs=0.05)
    everything = b"".join(collector.bodies)
    assert not any(text.encode() in everything for text in ("sk-", ASKED, SAID))
