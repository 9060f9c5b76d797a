"""Videos over the API of chats, good and bad: a real server with scripted answers."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pictures
import pytest
import seeing
from multimodal.vision_checkpoints import film
from PIL.Image import Image
from scripted_server import ScriptedServer
from seeing import FILM, PLACEHOLDER, SCRIPTED_TEMPLATE, Columns, Films
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.images import READ_AHEAD
from atom.entrypoints.server_options import ServerOptions
from atom.multimodal.media import MediaLoader

HEAD = "data:video/jpeg;base64,"
MOST_VIDEOS = 8
PNG = base64.b64encode(pictures.encoded(pictures.gradient())).decode()
PNG_URL = f"data:image/png;base64,{PNG}"


def url_of(frames: Sequence[Image]) -> str:
    files = (pictures.encoded(frame, "JPEG") for frame in frames)
    return HEAD + ",".join(base64.b64encode(file).decode() for file in files)


URL = url_of(film(16, 8, 5))


@pytest.fixture(scope="module")
def server(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    yield from served(byte_level_tokenizer, f"image=2,video={MOST_VIDEOS}")


def served(
    byte_level_tokenizer: PreTrainedTokenizerFast, limit: str, watches: bool = True
) -> Iterator[ScriptedServer]:
    tokenizer = seeing.scripted_tokenizer(byte_level_tokenizer)
    placeholder, video = tokenizer.convert_tokens_to_ids([PLACEHOLDER, FILM])
    server = ScriptedServer(
        tokenizer,
        ServerOptions(chat_template=SCRIPTED_TEMPLATE, max_image_pixels=10_000),
        max_model_len=2000,
        engine_options={"limit_mm_per_prompt": limit},
        image_processor=Columns(placeholder),
        video_processor=Films(video) if watches else None,
    )
    server.says("It is a film.")
    yield server
    server.stop()


def part_of(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def ask(server: ScriptedServer, *parts: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(parts)}]
    return server.post("/v1/chat/completions", json={"messages": messages, **fields})


def refused(response: httpx.Response, code: str = "invalid_video") -> str:
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["code"] == code
    assert len(error["message"]) < 700
    return str(error["message"])


def processor(server: ScriptedServer) -> Films:
    assert isinstance(server.video_processor, Films)
    return server.video_processor


def test_the_openai_client_sends_videos(server: ScriptedServer) -> None:
    """Beside images and texts, each in its place; as many frames a second as it says."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    other = url_of(film(8, 8, 3))
    content: Any = [
        {"type": "text", "text": "one "},
        part_of(URL),
        {"type": "image_url", "image_url": {"url": PNG_URL}},
        {"type": "text", "text": " two "},
        {"type": "video_url", "video_url": other, "fps": 4},
    ]
    completion = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": content}]
    )
    assert completion.choices[0].message.content == "It is a film."
    assert server.prompt == f"user:one {5 * FILM}{7 * PLACEHOLDER} two {3 * FILM}\n"
    assert [image.num_tokens for image in server.model.images] == [5, 7, 3]
    read = sorted(processor(server).videos[-2:], key=lambda video: video.fps)
    assert [(len(v.frames), v.frames[0].size, v.fps) for v in read] == [
        (5, (16, 8), 2.0),
        (3, (8, 8), 4.0),
    ]
    assert completion.usage is not None
    details = completion.usage.prompt_tokens_details
    assert details is not None
    assert details.model_dump()["image_tokens"] == 15
    messages = [{"role": "user", "content": content}]
    told = server.post("/tokenize", json={"messages": messages}).json()
    assert [count for [[_, count]] in told["image_ranges"]] == [5, 7, 3]
    card = httpx.get(server.url + "/v1/models").json()["data"][0]
    assert card["input_modalities"] == ["text", "image", "video"]


def test_results_of_tools_have_videos_and_assistants_none(server: ScriptedServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [part_of(URL)]},
    ]
    assert server.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert server.model.images[0].num_tokens == 5
    messages[1] = {"role": "assistant", "content": [part_of(URL)]}
    answer = server.post("/v1/chat/completions", json={"messages": messages})
    assert "an assistant's hold no video_url" in answer.json()["error"]["message"]


def test_a_frame_changes_what_blocks_are_found_by(server: ScriptedServer) -> None:
    frames = film(16, 8, 4)
    digests = []
    for given in (frames, frames, [*frames[:3], *film(16, 8, 1, seed=3)], frames[:3]):
        assert ask(server, part_of(url_of(given))).status_code == 200
        digests += [image.digest for image in server.model.images]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


JPEG = URL[len(HEAD) :].split(",")[0]
BAD = {
    "mp4": ("data:video/mp4;base64,AAAA", {}, f"videos are read as frames, {HEAD}FRAME,FRAME"),
    "address": ("https://a.example/a.mp4", {}, "videos are read as frames"),
    "file": ("file:///etc/passwd", {}, "videos are read as frames"),
    "image": (PNG_URL, {}, "videos are read as frames"),
    "no frames": (HEAD, {}, "frame 1: the file is empty"),
    "png": (HEAD + JPEG + "," + PNG, {}, "frame 2: the file is PNG"),
    "cut": (f"{URL[:-40]}", {}, "frame 5: "),
    "no base64": (f"{HEAD}{JPEG},????", {}, "frame 2: the image's data are not base64"),
    "sizes": (url_of([*film(16, 8, 1), *film(8, 8, 1)]), {}, "frame 2 of a video has 8 by 8"),
    "large frame": (url_of(film(101, 100, 1)), {}, "frame 1: "),
    "large": (url_of(film(100, 90, 5)), {}, "40000 pixels in all; take fewer or smaller"),
    "many frames": (HEAD + 769 * f"{JPEG},", {}, "a video of 770 frames; at most 768 are read"),
    "commas": (HEAD + 2_000_000 * ",", {}, "a video of 2000001 frames"),
    "fps": (URL, {"fps": 0}, "fps should be in [0.01, 1000], got 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_videos(server: ScriptedServer, name: str) -> None:
    url, fields, said = BAD[name]
    num_read = len(processor(server).videos)
    message = refused(ask(server, part_of(url, **fields)))
    assert message.startswith("messages: video 1: ")
    assert said in message
    assert len(processor(server).videos) == num_read
    beside = {"type": "image_url", "image_url": {"url": PNG_URL}}
    assert "messages: video 2: " in refused(
        ask(server, beside, part_of(URL), part_of(url, **fields))
    )
    assert ask(server, {"type": "text", "text": "still here"}).status_code == 200


def test_what_others_say_of_videos_is_refused(server: ScriptedServer) -> None:
    """By name: nothing that would change the answer is passed over."""
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        answer = ask(server, part_of(URL), **{name: {"fps": 4}})
        assert f"{name} is not supported" in refused(answer, "unsupported_field")
    part = {"type": "input_video", "video_url": URL}
    answer = server.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})
    assert "only parts of type input_text, input_image" in refused(answer, "unsupported_content")
    block = {"type": "video", "source": {"type": "url", "url": URL}}
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 5}
    answer = server.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "only blocks of type text, image," in answer.json()["error"]["message"]
    answer = server.post("/generate", json={"text": FILM, "video_data": [URL]})
    assert "video_data is not supported" in refused(answer, "unsupported_field")


def test_many_videos(server: ScriptedServer) -> None:
    """Equal ones are read once, and more than a prompt may have are not read at all."""
    num_read = len(processor(server).videos)
    said = refused(ask(server, *((MOST_VIDEOS + 1) * [part_of(URL)])), "too_many_videos")
    assert f"hold 9 videos, and this server takes at most {MOST_VIDEOS} in a prompt" in said
    assert len(processor(server).videos) == num_read
    assert ask(server, *(MOST_VIDEOS * [part_of(URL)])).status_code == 200
    assert len(processor(server).videos) == num_read + 1
    # The same frames, otherwise timed.
    assert ask(server, part_of(URL), part_of(URL, fps=1)).status_code == 200
    assert len(processor(server).videos) == num_read + 3


def test_videos_beyond_the_context_are_not_read(server: ScriptedServer) -> None:
    num_read = len(processor(server).videos)
    frame = url_of(film(1, 1, 1))
    again = f",{frame[len(HEAD) :]}"
    urls = [frame + (700 + i) * again for i in range(MOST_VIDEOS)]
    answer = ask(server, *map(part_of, urls))
    assert "maximum context length is 2000" in refused(answer, "context_length_exceeded")
    # The third is the one too many, and some are read beside it.
    assert len(processor(server).videos) <= num_read + 3 + READ_AHEAD < num_read + MOST_VIDEOS


def test_the_event_loop_waits_for_no_video(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    load = MediaLoader.load_video

    def waiting(*args: Any) -> Any:
        begun.set()
        assert goes_on.wait(20)
        return load(*args)

    monkeypatch.setattr(MediaLoader, "load_video", waiting)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, part_of(URL))))
    asking.start()
    try:
        assert begun.wait(20)
        assert httpx.get(server.url + "/health").status_code == 200
        assert ask(server, {"type": "text", "text": "meanwhile"}).status_code == 200
    finally:
        goes_on.set()
        asking.join()
    assert answers[0].status_code == 200


@pytest.mark.parametrize(
    ("limit", "watches", "code", "said", "modalities"),
    [
        ("image=1,video=0", True, "too_many_videos", "takes at most 0", ["text", "image"]),
        ("image=0,video=1", True, None, "", ["text", "video"]),
        ("image=1", False, "unsupported_content", "this model reads none", ["text", "image"]),
    ],
)
def test_servers_that_read_less(
    byte_level_tokenizer: PreTrainedTokenizerFast,
    limit: str,
    watches: bool,
    code: str | None,
    said: str,
    modalities: list[str],
) -> None:
    for server in served(byte_level_tokenizer, limit, watches):
        answer = ask(server, part_of(URL))
        if code is None:
            assert answer.status_code == 200
            image = {"type": "image_url", "image_url": {"url": PNG_URL}}
            assert "takes at most 0" in refused(ask(server, image), "too_many_images")
        else:
            assert said in refused(answer, code)
        card = httpx.get(server.url + "/v1/models").json()["data"][0]
        assert card["input_modalities"] == modalities
