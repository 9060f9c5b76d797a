"""Images over every API, good and bad: a real server, whose engine's answers are scripted."""

from __future__ import annotations

import base64
import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pictures
import psutil
import pytest
import seeing
from PIL import Image as pillow
from scripted_server import ScriptedServer
from seeing import PLACEHOLDER, SCRIPTED_TEMPLATE, Columns
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.images import READ_AHEAD, ImageReader
from atom.entrypoints.chat.prompt import Prompt
from atom.entrypoints.http.errors import ApiError
from atom.entrypoints.server_options import OptionError, ServerOptions
from atom.multimodal import fetch
from atom.multimodal.addresses import Address
from atom.multimodal.media import MediaFile, MediaLoader
from atom.multimodal.policy import MediaPolicy

MOST_IMAGES = 20
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
PNG = pictures.encoded(pictures.gradient())
WIDE = pictures.encoded(pictures.gradient(40, 5), "JPEG")


def url_of(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


class Trap:
    """Counts who connects."""

    def __init__(self) -> None:
        self.num_connections = 0
        self._socket = socket.create_server(("0.0.0.0", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return
            self.num_connections += 1

    def stop(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "a.png").write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def trap() -> Iterator[Trap]:
    trap = Trap()
    yield trap
    trap.stop()


@pytest.fixture(scope="module")
def server(
    folder: Path, trap: Trap, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Iterator[ScriptedServer]:
    tokenizer = seeing.scripted_tokenizer(byte_level_tokenizer)
    options = ServerOptions(
        chat_template=SCRIPTED_TEMPLATE,
        served_model_names=("sees",),
        allowed_media_hosts=("inside.example", f"inside.example:{trap.port}"),
        allowed_local_media_path=str(folder),
        max_image_pixels=1_000_000,
    )
    server = ScriptedServer(
        tokenizer,
        options,
        max_model_len=2000,
        engine_options={"limit_mm_per_prompt": f"image={MOST_IMAGES}"},
        image_processor=Columns(tokenizer.convert_tokens_to_ids(PLACEHOLDER)),
    )
    server.says("It is a gradient.")
    yield server
    server.stop()


def chat(*parts: Any) -> dict[str, Any]:
    told = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part[0]}}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": told}], "max_tokens": 8}


def ask(server: ScriptedServer, *parts: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", json=chat(*parts))


def refused(response: httpx.Response, code: str = "invalid_image", status: int = 400) -> str:
    error = response.json()["error"]
    assert response.status_code == status, error
    assert error["code"] == code
    assert len(error["message"]) < 700
    return str(error["message"])


def test_the_openai_client_sends_images(server: ScriptedServer) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    completion = client.chat.completions.create(
        model="sees",
        messages=[
            {"role": "system", "content": "Look."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "one "},
                    {"type": "image_url", "image_url": {"url": url_of(PNG), "detail": "auto"}},
                    {"type": "text", "text": " two "},
                    {"type": "image_url", "image_url": {"url": url_of(WIDE, "image/jpeg")}},
                ],
            },
        ],
    )
    assert completion.choices[0].message.content == "It is a gradient."
    seen = f"system:Look.\nuser:one {7 * PLACEHOLDER} two {40 * PLACEHOLDER}\n"
    assert server.prompt == seen
    first, second = server.model.images
    assert (first.grid, second.grid) == ((7, 5), (40, 5))
    assert first.ranges == ((server.model.prompt.index(_processor(server).placeholder_id), 7),)
    assert completion.usage is not None
    details = completion.usage.prompt_tokens_details
    assert details is not None
    assert details.model_dump()["image_tokens"] == 47


def test_responses(server: ScriptedServer) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    image = {"type": "input_image", "image_url": url_of(PNG), "detail": "auto"}
    response = client.responses.create(
        model="sees",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "what? "}, image]},  # type: ignore[list-item, misc]
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [image]},  # type: ignore[typeddict-item]
        ],
    )
    assert response.output_text == "It is a gradient."
    assert f"user:what? {7 * PLACEHOLDER}\n" in server.prompt
    assert server.prompt.count(PLACEHOLDER) == 14
    assert response.usage is not None
    assert response.usage.input_tokens_details.model_dump()["image_tokens"] == 14


def test_the_anthropic_client_sends_images(server: ScriptedServer) -> None:
    import anthropic  # takes seconds, which workers without these tests save

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    image: Any = {"type": "image", "source": source}
    messages: Any = [
        {"role": "user", "content": [image, {"type": "text", "text": " look"}]},
        {"role": "assistant", "content": [USE]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "shot: "}, image],
                }
            ],
        },
    ]
    message = client.messages.create(model="sees", max_tokens=20, messages=messages)
    assert message.content[0].text == "It is a gradient."  # type: ignore[union-attr]
    assert f"user:{7 * PLACEHOLDER} look\n" in server.prompt
    assert f"Error: shot: {7 * PLACEHOLDER}" in server.prompt
    counted = client.messages.count_tokens(model="sees", messages=messages)
    assert counted.input_tokens == message.usage.input_tokens == len(server.model.prompt)


def test_anthropic_edits_count_images(server: ScriptedServer) -> None:
    """A result is cleared where the prompt is long by its images alone."""
    image = {"type": "image", "source": {"type": "url", "url": url_of(WIDE, "image/jpeg")}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image, image]}
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 100},
        "keep": {"type": "tool_uses", "value": 0},
    }
    body = {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [result]},
        ],
        "context_management": {"edits": [edit]},
    }
    headers = {"anthropic-beta": "context-management-2025-06-27"}
    counted = server.post("/v1/messages/count_tokens", json=body, headers=headers).json()
    assert counted["context_management"]["original_input_tokens"] - counted["input_tokens"] > 30


def test_sglang(server: ScriptedServer) -> None:
    text = f"<s>{PLACEHOLDER}{PLACEHOLDER}?"
    data = [base64.b64encode(PNG).decode(), url_of(WIDE, "image/jpeg")]
    answer = server.post("/generate", json={"text": text, "image_data": data})
    assert answer.json()["text"] == "It is a gradient."
    assert [image.num_tokens for image in server.model.images] == [7, 40]
    one = server.post("/generate", json={"text": PLACEHOLDER, "image_data": data[0]})
    assert one.json()["meta_info"]["prompt_tokens"] == 7
    several = server.post("/generate", json={"text": [text, text], "image_data": data})
    assert several.json()["error"]["param"] == "image_data"
    fewer = server.post("/generate", json={"text": "no place", "image_data": data})
    assert "0 placeholders" in refused(fewer, "unsupported_content")
    bad = server.post("/generate", json={"text": PLACEHOLDER, "image_data": "aGVsbG8="})
    assert "image_data: image 1: the file is not an image" in refused(bad)


def test_tokens_of_images_are_told(server: ScriptedServer) -> None:
    body = chat("ab", [url_of(PNG)], [url_of(WIDE, "image/jpeg")])
    told = server.post("/tokenize", json={"messages": body["messages"]}).json()
    [[first, seven]], [[second, forty]] = told["image_ranges"]
    assert (seven, second - first, forty) == (7, 7, 40)
    assert set(told["tokens"][first : second + 40]) == {_processor(server).placeholder_id}
    cards = httpx.get(server.url + "/v1/models").json()["data"]
    assert cards[0]["input_modalities"] == ["text", "image"]


def test_a_texts_own_placeholders_are_text(server: ScriptedServer) -> None:
    """Neither the token, nor what marks images on their way, makes a place."""
    assert ask(server, PLACEHOLDER + "\ufdd10\ufdd1", [url_of(PNG)]).status_code == 200
    assert server.model.prompt.count(_processor(server).placeholder_id) == 7
    assert ask(server, PLACEHOLDER).status_code == 200
    assert server.model.images == ()


def test_streams_and_files(server: ScriptedServer, folder: Path) -> None:
    body = {**chat([f"file://{folder}/a.png"]), "stream": True}
    answer = server.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert server.model.images[0].num_tokens == 7
    assert "not below" in refused(ask(server, ["file:///etc/passwd"]))


def test_an_image_is_the_same_by_every_way(server: ScriptedServer, folder: Path) -> None:
    """Blocks are found by digests, and so are rows: of pixels, not of addresses or files."""
    (folder / "other.png").write_bytes(pictures.encoded(pictures.gradient().rotate(180)))
    again = pictures.encoded(pictures.gradient(), "WEBP", lossless=True)
    urls = [url_of(PNG), f"file://{folder}/a.png", url_of(again, "image/webp")]
    digests = []
    for url in [*urls, f"file://{folder}/other.png"]:
        assert ask(server, [url]).status_code == 200
        digests += [image.digest for image in server.model.images]
    assert len(digests) == 4
    assert len(set(digests[:3])) == 1
    assert digests[3] not in digests[:3]


BAD = {
    "text": (url_of(b"hello"), "is not an image"),
    "cut": (url_of(PNG[:-30]), "damaged or cut"),
    "wrong type": (url_of(WIDE, "image/png"), "is JPEG, but was sent as PNG"),
    "svg": (url_of(pictures.SVG, "image/svg+xml"), "not a type of images"),
    "large": (url_of(pictures.png_bomb(1001, 1000)), "1001 x 1000 pixels, and at most 1000000"),
    "png bomb": (url_of(pictures.png_bomb(100_000, 100_000)), "more than 1000000 pixels"),
    "gif bomb": (url_of(pictures.gif_bomb((1, 1), (60_000, 60_000)), "image/gif"), "more than"),
    "no url": ("cat.png", "expected a data:, https:"),
    "unknown host": ("https://other.example/a.png", "not fetched from 'other.example'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_in_every_api(server: ScriptedServer, name: str) -> None:
    url, said = BAD[name]
    assert said in refused(ask(server, "x", [url_of(PNG)], [url]))
    assert "messages: image 2: " in refused(ask(server, "x", [url_of(PNG)], [url]))
    response = server.post(
        "/v1/responses",
        json={"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
    )
    assert "input: image 1: " in refused(response)
    block = {"type": "image", "source": {"type": "url", "url": url}}
    body = {"messages": [{"role": "user", "content": [block]}]}
    for path, fields in (("/v1/messages", {"max_tokens": 5}), ("/v1/messages/count_tokens", {})):
        answer = server.post(path, json={**body, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert said in answer.json()["error"]["message"]
    tokens = server.post("/tokenize", json={"messages": chat([url])["messages"]})
    assert said in refused(tokens)
    assert ask(server, "still here").status_code == 200


def test_assistants_hold_no_images(server: ScriptedServer) -> None:
    body = chat([url_of(PNG)])
    body["messages"][0]["role"] = "assistant"
    answer = server.post("/v1/chat/completions", json=body)
    assert "an assistant's hold no image_url" in answer.json()["error"]["message"]
    part = {"type": "input_image", "image_url": url_of(PNG)}
    answer = server.post(
        "/v1/responses", json={"input": [{"role": "assistant", "content": [part]}]}
    )
    assert "an assistant message holds no input_image" in answer.json()["error"]["message"]


def test_nothing_local_is_reached(
    server: ScriptedServer, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: int) -> list[Address]:
        assert (host, port) == ("inside.example", trap.port)
        return [ipaddress.ip_address("127.0.0.1")]

    # What every fetcher asks that is not given another.
    monkeypatch.setattr(fetch.socket, "getaddrinfo", _resolving(resolve, trap.port))
    hosts = ("127.0.0.1", "2130706433", "017700000001", "0x7f000001", "0x7f.1", "127.1")
    numbers = ("[::1]", "[::ffff:127.0.0.1]", "127.0.0.1.", "0.0.0.0", "[::]")
    names = ("localhost", "127.0.0.1.nip.example")
    users = ("inside.example@127.0.0.1", "127.0.0.1@inside.example", "127.0.0.1#@inside.example")
    urls = [f"http://{host}:{trap.port}/a.png" for host in (*hosts, *numbers, *names, *users)]
    urls += [f"http://127.0.0.1:{trap.port}\\@inside.example/a.png"]
    # A name that is allowed and means an address of this machine.
    urls += [f"http://inside.example:{trap.port}/a.png"]
    said = [refused(ask(server, [url])) for url in urls]
    assert "not of the public internet" in said[-1]
    assert trap.num_connections == 0


def _resolving(resolve: Any, port: int) -> Any:
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
        if asked != port:
            return real(host, asked, *args, **kwargs)
        addresses = resolve(host, asked)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (str(a), asked)) for a in addresses]

    return getaddrinfo


def test_many_images(server: ScriptedServer) -> None:
    num_processed = len(_processor(server).sizes)
    response = ask(server, *(1000 * [[url_of(PNG)]]))
    assert f"hold 1000 images, and this server takes at most {MOST_IMAGES}" in refused(
        response, "too_many_images"
    )
    assert len(_processor(server).sizes) == num_processed
    assert ask(server, *(MOST_IMAGES * [[url_of(PNG)]])).status_code == 200
    # Equal ones are read once.
    assert len(_processor(server).sizes) == num_processed + 1


def test_images_beyond_the_context_are_not_read(server: ScriptedServer) -> None:
    files = [pictures.encoded(pictures.gradient(900, height)) for height in range(1, 8)]
    num_processed = len(_processor(server).sizes)
    response = ask(server, *([url_of(file)] for file in files))
    assert "maximum context length is 2000" in refused(response, "context_length_exceeded")
    # The third is the one too many, and some are read beside it.
    assert len(_processor(server).sizes) <= num_processed + 3 + READ_AHEAD < num_processed + 7


class _Meeting(MediaLoader):
    """Nobody reads before as many read as may."""

    def __init__(self) -> None:
        super().__init__(MediaPolicy())
        self.barrier = threading.Barrier(1 + READ_AHEAD)

    def read(self, url: str) -> MediaFile:
        self.barrier.wait(20)
        return super().read(url)


def test_images_are_read_side_by_side() -> None:
    """And come in their order; the first bad one is named, whichever was found to be so first."""
    loader = _Meeting()
    reader = ImageReader(Columns(7), loader, 8, 2000)
    urls = [url_of(pictures.encoded(pictures.gradient(width))) for width in range(1, 9)]
    prompt = reader.read(Prompt([7] * 8, ""), urls, "messages")
    assert [image.num_tokens for image in prompt.images] == list(range(1, 9))
    urls[2:5] = ["data:,", url_of(b"x"), url_of(b"y")]
    with pytest.raises(ApiError, match="messages: image 3: expected data:"):
        reader.read(Prompt([7] * 8, ""), urls, "messages")
    loader.barrier.abort()  # lets go who still waits


def test_a_body_of_200_megabytes(server: ScriptedServer) -> None:
    """The server reads no more than it discards; memory is that of a body that is taken."""
    before = psutil.Process().memory_info().rss

    def body() -> Iterator[bytes]:
        head, tail = json.dumps(chat(["data:image/png;base64,@"])).split("@")
        yield head.encode()
        for _ in range(200):
            yield 2**20 * b"A"
        yield tail.encode()

    try:
        response = server.post(
            "/v1/chat/completions", content=body(), headers={"content-type": "application/json"}
        )
        assert refused(response, "request_too_large", 413)
    except httpx.WriteError:  # it went on writing behind the answer
        pass
    grown = psutil.Process().memory_info().rss - before
    assert grown < 120 * 2**20, f"{grown / 2**20:.0f} MiB"
    assert ask(server, "still here").status_code == 200


def test_large_images_are_taken(server: ScriptedServer) -> None:
    """Beyond the bound of bodies of text, up to that of an image."""
    noise = np.random.default_rng(0).integers(0, 256, (2900, 300, 3), np.uint8)
    data = pictures.encoded(pillow.fromarray(noise), "BMP")
    assert ask(server, *(5 * [[url_of(data, "image/bmp")]])).status_code == 200
    most = url_of(bytes(20 * 2**20 + 1))
    assert "more than the 20971520 bytes" in refused(ask(server, [most]))


def _processor(server: ScriptedServer) -> Columns:
    processor = server.image_processor
    assert isinstance(processor, Columns)
    return processor


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"allowed_media_hosts": ("127.0.0.1",)}, "address of a local network"),
        ({"allowed_media_hosts": ("http://a",)}, "expected hosts as NAME"),
        ({"allowed_local_media_path": "/nowhere/at/all"}, "is not a folder"),
        ({"max_image_bytes": 0}, "must be at least 1"),
        ({"max_image_pixels": 10**9}, r"must be in \[1, 89478485\]"),
        ({"media_fetch_timeout": 0.0}, "must be above 0 s"),
    ],
)
def test_wrong_options(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        ServerOptions(**given)
