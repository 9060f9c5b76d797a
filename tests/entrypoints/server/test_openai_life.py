"""Keys, limits, and the two ends of a server: a signal, or the engine's death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from endless import ENDLESS_TOKENS, SERVER_FLAGS
from patience import PATIENCE_SECONDS, wait_until
from server_process import ServerProcess

from atom.entrypoints.openai_server import main

KEY = {"Authorization": "Bearer second"}
ORIGIN = "https://app.example"
ENDLESS: dict[str, Any] = {"prompt": "The", "max_tokens": ENDLESS_TOKENS, "ignore_eos": True}
DRAIN_SECONDS = 4.0


def test_a_signal_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    command = [sys.executable, "-m", "atom.entrypoints.openai_server", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def guarded(
    endless_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content == 'z' %}{{ raise_exception('no z here') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood }}"
    )
    flags = [*SERVER_FLAGS, "--api-key", "first", "second", "--cors-allow-origin", ORIGIN]
    flags += ["--max-body-bytes", "2000", "--chat-template", str(template)]
    flags += ["--max-num-seqs", "4", "--max-waiting-requests", "40"]
    flags += ["--drain-seconds", str(DRAIN_SECONDS)]
    flags += ["--override-generation-config", '{"temperature": 0}']
    process = ServerProcess(endless_llama_dir, *flags, env={"ATOM_API_KEY": "unused"})
    try:
        yield process.wait_ready()
    finally:
        process.stop()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer unused"},
        {"Authorization": "second"},
        {"Authorization": "Basic second"},
        {"Authorization": "Bearer second second"},
        {"Authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "wrong"},
        {"x-api-key": "Bearer second"},
    ],
)
def test_without_a_valid_key(guarded: ServerProcess, headers: dict[str, Any]) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/nowhere"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("OPTIONS", "/v1/completions"),
    ):
        response = httpx.request(method, guarded.url + path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_with_a_key(guarded: ServerProcess) -> None:
    for key in ("first", "second"):
        assert len(guarded.client(key).models.list().data) == 1
    with pytest.raises(openai.AuthenticationError):
        guarded.client("third").models.list()
    for headers in ({"x-api-key": "first"}, {"x-api-key": "wrong", **KEY}):
        assert httpx.get(guarded.url + "/v1/models", headers=headers).status_code == 200
    assert httpx.get(guarded.url + "/health").status_code == 200


def test_messages_refuse_keys_in_their_own_shape(guarded: ServerProcess) -> None:
    answer = guarded.post("/v1/messages", json={}, headers={"x-api-key": "third"})
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"


def test_only_the_named_origin_may_call(guarded: ServerProcess) -> None:
    for origin, allowed in ((ORIGIN, ORIGIN), ("https://other.example", None)):
        preflight = httpx.options(
            guarded.url + "/v1/completions",
            headers={
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type",
            },
        )
        assert preflight.headers.get("access-control-allow-origin") == allowed
        answer = httpx.get(guarded.url + "/v1/models", headers={"Origin": origin, **KEY})
        assert answer.headers.get("access-control-allow-origin") == allowed
    refused = httpx.get(guarded.url + "/v1/models", headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN


def test_no_origin_may_call_unless_told(server: ServerProcess) -> None:
    answer = httpx.get(server.url + "/v1/models", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


def test_the_body_limit(guarded: ServerProcess) -> None:
    body = {"prompt": "a" * 2000}
    assert guarded.post("/tokenize", json=body, headers=KEY).status_code == 413
    body = {"prompt": "a" * 1900}
    assert guarded.post("/tokenize", json=body, headers=KEY).status_code == 200


def test_the_given_chat_template(guarded: ServerProcess) -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    body = {"messages": messages, "chat_template_kwargs": {"mood": "!"}}
    tokens = guarded.post("/tokenize", json=body, headers=KEY).json()["tokens"]
    text = guarded.post("/detokenize", json={"tokens": tokens}, headers=KEY).json()["prompt"]
    assert text == "[system]x[user]y!"
    body = {"messages": [{"role": "user", "content": "z"}]}
    response = guarded.post("/v1/chat/completions", json=body, headers=KEY)
    assert response.status_code == 400
    assert "no z here" in response.json()["error"]["message"]


def test_the_models_sampling_parameters_apply(guarded: ServerProcess) -> None:
    """At its temperature of 0 all answers are alike; at a temperature of the request's own not."""

    def answers(**fields: Any) -> set[str]:
        body = {"prompt": "fox", "max_tokens": 12, "n": 3, **fields}
        choices = guarded.post("/v1/completions", json=body, headers=KEY).json()["choices"]
        return {choice["text"] for choice in choices}

    assert len(answers()) == 1
    assert len(answers(temperature=1.0)) == 3


def test_a_full_queue_is_429(guarded: ServerProcess) -> None:
    """4 sequences run, 40 may wait: 60 are too many, and 44 are not."""
    body = {**ENDLESS, "n": 60}
    for stream in (False, True):
        response = guarded.post("/v1/completions", json={**body, "stream": stream}, headers=KEY)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
    with pytest.raises(openai.RateLimitError):
        guarded.client("first").completions.create(
            model=guarded.client("first").models.list().data[0].id, prompt="x", n=60
        )
    fits = guarded.post(
        "/v1/completions", json={"prompt": "a", "n": 44, "max_tokens": 2}, headers=KEY
    )
    assert fits.status_code == 200


class _Reader:
    """Streams one completion in a thread, keeping every event."""

    def __init__(self, server: ServerProcess, headers: dict[str, str], **fields: Any) -> None:
        self.events: list[str] = []
        self._begun = threading.Event()
        self._request = (server.url + "/v1/completions", {**ENDLESS, **fields, "stream": True})
        self._headers = headers
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(PATIENCE_SECONDS)

    def join(self) -> list[str]:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        return self.events

    def _read(self) -> None:
        url, body = self._request
        with httpx.stream("POST", url, json=body, headers=self._headers, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self._begun.set()


def test_a_signal_lets_requests_end_until_the_deadline(guarded: ServerProcess) -> None:
    """Last of this server's tests."""
    short = _Reader(guarded, KEY, max_tokens=200)
    # Forty sequences, three or four at a time.
    endless = _Reader(guarded, KEY, n=40)
    start = time.monotonic()
    guarded.signal(signal.SIGTERM)
    assert short.join()[-1] == "[DONE]"
    last = json.loads(endless.join()[-1])
    assert last["error"]["code"] == "shutting_down"
    assert guarded.wait_exit() == 0
    assert time.monotonic() - start >= DRAIN_SECONDS
    with pytest.raises(httpx.ConnectError):
        httpx.get(guarded.url + "/health")


def test_a_dead_engine_ends_the_server(endless_llama_dir: Path) -> None:
    server = ServerProcess(endless_llama_dir, *SERVER_FLAGS)
    try:
        server.wait_ready()
        reader = _Reader(server, {}, n=64)
        answers: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", json={**ENDLESS, "n": 64}))
        )
        waiting.start()
        wait_until(lambda: server.metric("num_requests_waiting") > 0)
        server.engine.kill()
        # Until it ends soon afterwards.
        wait_until(lambda: httpx.get(server.url + "/health", timeout=60).status_code == 503)
        assert server.post("/v1/completions", json=ENDLESS).status_code == 503
        assert json.loads(reader.join()[-1])["error"]["code"] == "engine_dead"
        waiting.join(PATIENCE_SECONDS)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "engine_dead"
        assert server.wait_exit() == 1
        assert any("engine died" in line for line in server.log)
    finally:
        server.stop()


def test_the_end_waits_for_nobody(endless_llama_dir: Path, tmp_path: Path) -> None:
    """Not for a stopped engine, a reader that does not read, or a thread that is at work."""
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for i in range(99999) if messages[0].content | length > 4500 %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    )
    flags = [*SERVER_FLAGS, "--drain-seconds", "0.5", "--chat-template", str(template)]
    server = ServerProcess(endless_llama_dir, *flags)
    try:
        server.wait_ready()
        reader = _Reader(server, {}, n=64)
        slow = {"messages": [{"role": "user", "content": "x" * 5000}]}
        answered = threading.Event()

        def work() -> None:
            with contextlib.suppress(httpx.HTTPError):
                server.post("/v1/chat/completions", json=slow)
            answered.set()

        working = threading.Thread(target=work)
        working.start()
        assert not answered.wait(0.5)
        engine = server.engine
        engine.suspend()
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        wait_until(lambda: not engine.is_running())
        assert json.loads(reader.join()[-1])["error"]["code"] == "shutting_down"
        working.join(PATIENCE_SECONDS)
    finally:
        server.stop()


def test_a_port_in_use_is_said_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", "/no/such/model", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert error.endswith("; --port chooses another\n")


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--model", str(tmp_path / "absent"), "--port", "0"]) == 1
    assert "absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"],
        ["--max-body-bytes", "0"],
        ["--max-tool-grammar", "0"],
        ["--max-waiting-requests", "-1"],
        ["--drain-seconds", "nan"],
        ["--api-key", " "],
        ["--chat-template", "/no/such/file"],
        ["--log-level", "loud"],
        ["--dtype", "int3"],
        ["--block-size", "0"],
        ["--unknown"],
        ["--max-body", "5"],
    ],
)
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert flags[0].strip("-").split("-")[0] in capsys.readouterr().err.replace("_", "-")
