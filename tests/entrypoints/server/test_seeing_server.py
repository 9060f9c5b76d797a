"""A server of a tiny model that sees, its engine and all, beside `LLM` of the same checkpoint."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pictures
import pytest
import seeing
from multimodal.vision_checkpoints import film, picture
from server_process import ServerProcess
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.messages import RequestRefusedError

NUM_TOKENS = 8
DATA = base64.b64encode(pictures.encoded(picture(60, 45))).decode()
URL = f"data:image/png;base64,{DATA}"


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    seeing.write_checkpoint(folder, byte_level_tokenizer)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(folder, *seeing.SERVER_FLAGS)
    try:
        yield process.wait_ready()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_threads": 1}
    with LLM(str(folder), max_model_len=160, kv_cache_memory="4MiB", **options) as llm:
        yield llm


def messages(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "the "}, part]}]


def said(llm: LLM, part: dict[str, Any]) -> tuple[str, int]:
    """The text, and tokens of the prompt."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    [output] = llm.chat(messages(part), greedy, False)
    return output.outputs[0].text, len(output.prompt_token_ids)


def test_chats_of_the_library_take_every_kind_of_image(llm: LLM, tmp_path: Path) -> None:
    image = picture(60, 45)
    image.save(tmp_path / "a.png")
    parts = [
        {"type": "image", "image": image},
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": np.asarray(image)},
        {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": URL},
    ]
    assert len({said(llm, part) for part in parts}) == 1
    other = said(llm, {"type": "image", "image": picture(60, 45, 1)})
    assert other != said(llm, parts[0])
    with pytest.raises(RequestRefusedError, match="placeholder"):
        llm.chat(messages(parts[0]), use_tqdm=False, chat_template="nothing")


def test_the_server_sees_what_the_library_sees(llm: LLM, server: ServerProcess) -> None:
    """In every API; the same picture by another way is found in the cache."""
    text, num_tokens = said(llm, {"type": "image", "image": picture(60, 45)})
    sampling = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    client = server.client()
    part = {"type": "image_url", "image_url": {"url": URL}}
    chat = client.chat.completions.create(
        model="model", messages=messages(part), max_tokens=NUM_TOKENS, **sampling
    )
    assert chat.choices[0].message.content == text
    assert chat.usage.prompt_tokens == num_tokens
    [[[first, count]]] = server.post("/tokenize", json={"messages": messages(part)}).json()[
        "image_ranges"
    ]
    assert chat.usage.prompt_tokens_details.image_tokens == count
    response = client.responses.create(
        model="model",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "the "},
                    {"type": "input_image", "image_url": URL, "detail": "auto"},
                ],
            }
        ],
        max_output_tokens=NUM_TOKENS,
        **sampling,
    )
    assert response.output_text == text
    assert response.usage.input_tokens_details.cached_tokens > first
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    block = {"type": "image", "source": source}
    # Its client has no argument for the temperature.
    import anthropic  # takes seconds, which workers without these tests save

    message = anthropic.Anthropic(base_url=server.url, api_key="none").messages.create(
        model="model",
        max_tokens=NUM_TOKENS,
        messages=messages(block),
        extra_body={"temperature": 0, "ignore_eos": True},
    )
    assert message.content[0].text == text
    assert message.usage.cache_read_input_tokens > first


def test_the_server_watches_what_the_library_watches(llm: LLM, server: ServerProcess) -> None:
    """Prompts that differ in one frame, or in its time, share nothing behind the video's start."""
    frames = film(30, 20, 5)
    files = [pictures.encoded(frame, "JPEG") for frame in [*frames, picture(30, 20)]]
    urls = [
        "data:video/jpeg;base64," + ",".join(base64.b64encode(file).decode() for file in each)
        for each in (files[:5], [*files[:4], files[5]])
    ]
    client = server.client()
    sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}

    def ask(part: dict[str, Any]) -> tuple[str, int, Any]:
        chat = client.chat.completions.create(model="model", messages=messages(part), **sampling)
        content = chat.choices[0].message.content
        return content, chat.usage.prompt_tokens, chat.usage.prompt_tokens_details

    for url, own in ((urls[0], files[:5]), (urls[1], [*files[:4], files[5]])):
        part = {"type": "video_url", "video_url": {"url": url}}
        told = server.post("/tokenize", json={"messages": messages(part)}).json()
        [ranges] = told["image_ranges"]
        text, num_tokens, details = ask(part)
        assert (text, num_tokens) == said(llm, {"type": "video", "video": own})
        assert len(ranges) == 3
        assert details.image_tokens == sum(count for _, count in ranges)
        assert details.cached_tokens <= ranges[0][0]
        assert ask(part)[2].cached_tokens > ranges[0][0]
    slow = {"type": "video_url", "video_url": {"url": urls[0]}, "fps": 1}
    text, num_tokens, details = ask(slow)
    assert (text, num_tokens) == said(llm, {"type": "video", "video": files[:5], "fps": 1})
    assert details.cached_tokens <= ranges[0][0]
    assert "video" in httpx.get(f"{server.url}/v1/models").json()["data"][0]["input_modalities"]
    bad = {"type": "video_url", "video_url": {"url": "https://a.example/a.mp4"}}
    with pytest.raises(openai.BadRequestError, match="videos are read as frames"):
        ask(bad)


def test_too_many_and_bad_images(server: ServerProcess) -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    content = {"role": "user", "content": 4 * [part]}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model="model", messages=[content])
    assert caught.value.code == "too_many_images"
    bad = {"type": "image_url", "image_url": {"url": URL[:-40]}}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model="model", messages=messages(bad))
    assert caught.value.code == "invalid_image"
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "atom:mm_cache_queries" in metrics
