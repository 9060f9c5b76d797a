"""Bytes that no client means, at a real socket: none gets a 5xx, a hang or a broken answer."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from patience import PATIENCE_SECONDS, wait_until
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.server_options import ServerOptions

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
QUIET_SECONDS = 0.5

# In place of a value: what JSON may not have, or what a reader may choke on.
VALUES = (
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 400, b"1e-999", b"18446744073709551616"),
    *(b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\\ud800"', b'"\\u0000"', b'"\x01"', b'"', b""),
    *(b"[" * 3000, b"[" * 600 + b"]" * 600, b'{"a":' * 300 + b"1" + b"}" * 300, b"null", b"{}"),
)


@pytest.fixture(scope="module")
def scripted(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    server = ScriptedServer(byte_level_tokenizer, ServerOptions())
    server.says("Fine.", 3)
    wait_until(lambda: accepts(server.url))
    try:
        yield server
    finally:
        server.stop()


def damaged_body(draw: random.Random, body: dict[str, object]) -> bytes:
    text = json.dumps({**body, "stream": draw.random() < 0.3}).encode()
    kind = draw.randrange(5)
    if kind == 0:
        name = json.dumps(draw.choice([*body, "temperature", "top_p", "seed"])).encode()
        return text[:-1] + b", " + name + b": " + draw.choice(VALUES) + b"}"  # a key twice
    if kind == 1:
        name = draw.choice([b"temperature", b"seed", b"stop", b"logit_bias", b"n", b"metadata"])
        return b'{"' + name + b'": ' + draw.choice(VALUES) + b", " + text[1:]
    if kind == 2:
        return text[: draw.randrange(len(text))]
    place = draw.randrange(len(text))
    if kind == 3:
        return text[:place] + bytes([draw.randrange(256)]) + text[place + 1 :]
    return draw.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"[")) + text


def damaged_request(draw: random.Random) -> bytes:
    """One request, wrong in its body, its framing or its headers; sometimes two in a row."""
    path = draw.choice(list(BODIES))
    body = damaged_body(draw, BODIES[path]) if draw.random() < 0.7 else json.dumps(CHAT).encode()
    length = b"Content-Length: %d\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n"
    framing, sent = draw.choice(
        [
            *[(length, body)] * 20,
            (length + chunked, body),
            (length + chunked, b"0\r\n\r\n" + body),
            (length + b"Content-Length: 3\r\n", body),
            (b"Content-Length: -1\r\n", body),
            (b"Content-Length: 1_0\r\n", body),
            (b"Content-Length : 5\r\n", body),
            (chunked, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)),
            (chunked, b"zz\r\n" + body),
            (b"Transfer-Encoding: xchunked\r\n", body),
            (chunked + chunked, b"0\r\n\r\n"),
        ]
    )
    extra, method, version = b"", b"POST", b"HTTP/1.1"
    damage = draw.randrange(8)
    if damage == 0:
        extra = draw.choice(
            (b"X: \xff\r\n", b"X\x00: 1\r\n", b" folded\r\n", b"X-Request-Id: \x0b\r\n")
        )
    elif damage == 1:
        method = draw.choice((b"GET", b"HEAD", b"P\xd6ST", b"OPTIONS"))
    elif damage == 2:
        version = draw.choice((b"HTTP/1.0", b"HTTP/9.9", b"HTTP"))
    head = b"%s %s %s\r\nHost: a\r\nContent-Type: application/json\r\n" % (
        *(method, path.encode(), version),
    )
    last = head + framing + extra + b"Connection: close\r\n\r\n" + sent
    return head + framing + b"\r\n" + sent + last if draw.random() < 0.1 else last


def answers(url: str, request: bytes) -> bytes:
    """All that comes until the server closes.

    A server that still waits for a body says nothing; it is told that no more comes, and has to
    close then.
    """
    host, port = url.removeprefix("http://").split(":")
    said = bytearray()
    sock = socket.create_connection((host, int(port)), timeout=QUIET_SECONDS)
    with sock, suppress(ConnectionError):
        sock.sendall(request)
        try:
            while piece := sock.recv(1 << 16):
                said += piece
        except TimeoutError:
            sock.settimeout(PATIENCE_SECONDS)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(1 << 16):
                said += piece
    return bytes(said)


def accepts(url: str) -> bool:
    with suppress(httpx.ConnectError):
        return httpx.get(f"{url}/version").is_success
    return False


def check(server: ScriptedServer, seed: int) -> int:
    """Returns the status of the first answer, 0 for none."""
    request = damaged_request(random.Random(seed))
    said = answers(server.url, request)
    if not said:
        return 0
    for line in said.split(b"\r\n"):
        assert not line.startswith(b"HTTP/1.1 5"), (seed, request, said)
    status = int(said.split(b" ", 2)[1])
    assert 200 <= status < 500, (seed, request, said)
    assert b"Traceback" not in said, (seed, request, said)
    return status


def still_serves(server: ScriptedServer) -> None:
    answer = server.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


def test_hundreds_of_damaged_requests(scripted: ScriptedServer) -> None:
    seen = Counter(check(scripted, seed) for seed in range(500))
    assert seen[200] > 30, seen
    assert seen[400] > 50, seen
    assert seen[0] < 50, seen
    still_serves(scripted)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_damaged_requests(scripted: ScriptedServer) -> None:
    for seed in range(500, 100_500):
        check(scripted, seed)
        if seed % 1000 == 0:
            still_serves(scripted)
    still_serves(scripted)
