"""What a real server answers to wrong requests, and to clients that leave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from endless import ENDLESS_TOKENS
from server_process import ServerProcess
from transformers import PreTrainedTokenizerFast

JSON = {"Content-Type": "application/json"}
IMAGE = {"type": "image_url", "image_url": "data:image/png;base64,aGk="}
LOW = {"type": "image_url", "image_url": {"url": IMAGE["image_url"], "detail": "low"}}
USER = [{"role": "user", "content": "hi"}]
LONG: dict[str, Any] = {"prompt": "The", "max_tokens": 480, "ignore_eos": True, "n": 4}
ENDLESS = {**LONG, "max_tokens": ENDLESS_TOKENS}


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"prompt": }',
        b"nonsense",
        b'{"prompt": "\xff\xfe"}',
        b"\xff" * 100,
        b"[" * 50_000,
        '{"prompt": "x"}'.encode("utf-16"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_what_is_not_json(server: ServerProcess, path: str, content: bytes) -> None:
    error = _error(server.post(path, content=content, headers=JSON), 400)
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a"] * 5000}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": 1e7}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": 7}, "stop_token_ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"priority": 2**31}, "priority"),
        ({"stream": 1}, "stream"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"num_speculative_tokens": 1.5}, "num_speculative_tokens"),
        ({"model": 3}, "model"),
    ],
)
def test_wrong_completion_fields(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    # Python's json writes NaN, and 10**400 in full.
    content = json.dumps({"prompt": "The", **fields}).encode()
    error = _error(server.post("/v1/completions", content=content, headers=JSON), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": USER * 600}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [LOW]}]},
            "messages[0].content[0].image_url.detail",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "messages"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"echo": True}, "echo"),
    ],
)
def test_wrong_chat_fields(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    body = {"messages": USER, **fields}
    error = _error(server.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == param


def test_over_long_prompts_are_refused_with_the_numbers(server: ServerProcess) -> None:
    error = _error(server.post("/v1/completions", json={"prompt": [5] * 600}), 400)
    assert "600" in error["message"]
    assert "512" in error["message"]
    chat = [{"role": "user", "content": "word " * 600}]
    error = _error(server.post("/v1/chat/completions", json={"messages": chat}), 400)
    assert "512" in error["message"]
    assert error["param"] == "messages"


def test_what_no_token_obeys_ends_its_request_alone(
    server: ServerProcess, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    body = {**LONG, "n": 1, "max_tokens": 64, "temperature": 0}
    expected = server.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.post, "/v1/completions", json=body)
        every = {"min_tokens": 3, "stop_token_ids": list(range(len(byte_level_tokenizer)))}
        response = server.post("/v1/completions", json={"prompt": "Hi", **every})
        assert other.result().json()["choices"][0]["text"] == expected
    assert "no token can be chosen after 0 tokens" in _error(response, 400)["message"]
    tiny = server.post("/v1/completions", json={"prompt": "Hi", "top_p": 1e-46, "max_tokens": 3})
    assert tiny.status_code == 200


def test_megabytes_are_refused_before_they_are_tokenised(server: ServerProcess) -> None:
    error = _error(server.post("/v1/completions", json={"prompt": "a" * 10_000_000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "the prompt has at least" in error["message"]
    wrong = {"prompt": "a", "stop_token_ids": ["x"] * 1_000_000}
    assert _error(server.post("/v1/completions", json=wrong), 400)["param"] == "stop_token_ids"
    unknown = {"prompt": "a", **{f"field_{i}": 1 for i in range(60_000)}}
    assert _error(server.post("/v1/completions", json=unknown), 400)["code"] == "unknown_field"


@pytest.mark.parametrize("is_declared", [True, False])
def test_too_large_bodies(server: ServerProcess, is_declared: bool) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 2**20

    content: Any = b" " * (20 * 2**20) if is_declared else chunks()
    error = _error(server.post("/v1/completions", content=content, headers=JSON), 413)
    assert error["code"] == "request_too_large"


def test_other_content_types(server: ServerProcess) -> None:
    compressed = {**JSON, "Content-Encoding": "gzip"}
    for headers in ({}, {"Content-Type": "text/plain"}, compressed):
        _error(server.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers), 415)


def test_unknown_models_routes_and_methods(server: ServerProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")
    assert _error(server.post("/v1/images/edits", json={}), 404)["code"] == "not_found"
    embeddings = _error(server.post("/v1/embeddings", json={"input": "x"}), 400)
    assert embeddings["code"] == "wrong_task"
    assert "tiny generates text, and neither embeds nor scores" in embeddings["message"]
    response = httpx.get(server.url + "/v1/completions")
    assert _error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_wrong_tokenize_requests(server: ServerProcess) -> None:
    for body in ({}, {"prompt": "x", "messages": USER}, {"prompt": 5}):
        _error(server.post("/tokenize", json=body), 400)
    for body in ({}, {"tokens": [10**9]}, {"tokens": [-1]}, {"tokens": ["x"]}):
        _error(server.post("/detokenize", json=body), 400)


def test_a_refused_prompt_of_a_list_ends_the_others(server: ServerProcess) -> None:
    for stream in (False, True):
        body = {**LONG, "prompt": [[5], [6], [10**6]], "stream": stream}
        _error(server.post("/v1/completions", json=body), 400)
    server.wait_idle()


def test_clients_that_leave_a_stream(endless_server: ServerProcess) -> None:
    url = endless_server.url + "/v1/completions"
    with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, timeout=60) as response:
        next(response.iter_raw())
    endless_server.wait_idle()


def test_clients_that_leave_before_the_answer(endless_server: ServerProcess) -> None:
    url, body = endless_server.url + "/v1/completions", {**ENDLESS, "n": 128}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=httpx.Timeout(60, read=0.5))
    endless_server.wait_idle()


def test_connections_that_hang_up_at_once(endless_server: ServerProcess) -> None:
    host, port = endless_server.url.removeprefix("http://").split(":")
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    whole = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    beginnings = [b"", b"POST /v1", whole[:80], whole[:-5], whole, b"\x00\xff\r\n\r\n"]

    def hang_up(number: int) -> None:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            if number % 3 == 0:  # a reset instead of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.sendall(beginnings[number % len(beginnings)])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(hang_up, range(500)))
    endless_server.wait_idle()
    assert httpx.get(endless_server.url + "/health", timeout=60).status_code == 200


def test_a_slow_reader_does_not_hold_up_others(server: ServerProcess) -> None:
    url = server.url + "/v1/completions"
    with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=60) as slow:
        quick = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert quick.status_code == 200
        time.sleep(0.5)
        last = [line for line in slow.iter_lines() if line][-1]
    assert last == "data: [DONE]"


def test_many_clients_at_once(server: ServerProcess, client: openai.OpenAI) -> None:
    alone = client.completions.create(model="tiny", prompt="The", max_tokens=30, seed=5)
    texts: list[str] = []

    def ask() -> None:
        stream = client.completions.create(
            model="tiny", prompt="The", max_tokens=30, seed=5, stream=True
        )
        texts.append("".join(chunk.choices[0].text for chunk in stream))

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [alone.choices[0].text] * 24
    server.wait_idle()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages hold images, and this model reads none; send text alone",
        ),
        (
            {"messages": USER, "num_speculative_tokens": 0},
            "num_speculative_tokens must be in [1, 2147483647], got 0; "
            "no drafts are verified with speculation: false",
        ),
        ({"messages": USER, "temperature": -0.5}, "temperature must be in [0, 10000], got -0.5"),
        (
            {"messages": USER, "repetition_penalty": 1e7},
            "repetition_penalty must be in [1e-06, 1000000], got 10000000.0",
        ),
    ],
)
def test_what_errors_name(server: ServerProcess, fields: dict[str, Any], said: str) -> None:
    error = _error(server.post("/v1/chat/completions", json=fields), 400)
    assert said in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_timeout_ends_an_answer(endless_server: ServerProcess, path: str) -> None:
    body = {"max_tokens": ENDLESS_TOKENS, "timeout": 0.3, "ignore_eos": True}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": USER}
    with httpx.Client(base_url=endless_server.url, timeout=60) as client:
        whole = client.post(path, json=body)
        address = whole.extensions["network_stream"].get_extra_info("client_addr")
        wrong = client.post(path, json={**body, "timeout": 0})
        assert wrong.status_code == 400
        # The connection lives on.
        assert wrong.extensions["network_stream"].get_extra_info("client_addr") == address
    assert whole.status_code == 504
    kind = "timeout_error" if path == "/v1/messages" else "server_error"
    assert whole.json()["error"]["type"] == kind
    stream = endless_server.post(path, json={**body, "stream": True}).text
    assert "within its timeout" in stream.strip().rpartition("data:")[2]
    endless_server.wait_idle()
