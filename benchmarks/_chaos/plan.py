"""The requests of a run, each a function of the seed and of its number."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

# Of which prompts are made.
TEXT = (
    "the quick brown fox jumps over a lazy dog while engines stream tokens to many clients and "
    "each client reads what it asked for one word after another until the answer ends"
)
_WORDS = TEXT.split()
# Prompts that begin alike, so that blocks are shared: about 20, 40 and 80 tokens of SmolLM2.
_PREFIXES = tuple(" ".join(_WORDS[i % len(_WORDS)] for i in range(n)) for n in (12, 30, 60))
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
}
_PATTERN = "[a-c]{4,9}"
_CHOICES = ["yes", "no", "maybe so"]
# What stands for a picture in a prompt, and what ends the kinds of requests that have some.
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_SEEING = " with images"
# Of two sizes, in pixels, so that many prompts differ in their pictures alone for some blocks.
_PICTURE_SIZES = ((32, 32), (40, 24)) * 4
# Longer than any request may take here; shorter than the clock jumps.
_TIMEOUT_SECONDS = 1800

Body = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One request, and what a report calls its kind.

    Attributes:
        grows: whether its answer is as long as any, so that it needs blocks while it runs.
    """

    number: int
    kind: str
    path: str
    body: Body
    grows: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar says what its answer may be."""
        return self.kind.startswith(("grammar", "tools"))

    @property
    def sees(self) -> bool:
        """Whether it has images."""
        return self.kind.endswith(_SEEING)

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    def encode(self) -> bytes:
        """The HTTP request, as its client would send it."""
        body = json.dumps(self.body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: loopback\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def make_asks(seed: int, count: int, *, longest: int, sees: bool = False) -> list[Ask]:
    """Distinct requests of all kinds in turn.

    Args:
        longest: tokens that an answer may have.
        sees: whether there are kinds with images, too.
    """
    pictures = _make_pictures(seed) if sees else []
    return [_make(seed, number, longest, pictures) for number in range(count)]


def _make(seed: int, number: int, longest: int, pictures: list[str]) -> Ask:
    """Args:
    pictures: PNG files in base64; those of requests are some of them.
    """
    rng = random.Random(f"{seed}/{number}")
    kinds = list(_KINDS)
    if pictures:
        kinds += [kind + _SEEING for kind in kinds if kind != "completion"]
    kind = kinds[number % len(kinds)]
    path, make = _KINDS[kind.removesuffix(_SEEING)]
    # Many short answers, and some for which blocks must be found while they grow.
    is_short = rng.random() < 0.7
    body = make(rng, rng.randint(1, longest // 5) if is_short else longest)
    if path != "/generate":
        body |= {"seed": rng.randrange(2**31), "temperature": rng.choice([0.0, 0.7, 1.0])}
    if rng.random() < 0.5:
        body["stream"] = True
    if rng.random() < 0.3:
        body["priority"] = rng.randint(-2, 2)
    if rng.random() < 0.2:
        body["timeout"] = _TIMEOUT_SECONDS
    if kind.endswith(_SEEING):
        _show(rng, path, body, rng.choices(pictures, k=rng.choice([1, 1, 2])))
    ask = Ask(number, kind, path, body)
    return replace(ask, grows=not is_short and not ask.is_constrained)


def _make_pictures(seed: int) -> list[str]:
    rng = random.Random(f"{seed}/pictures")
    return [make_picture(w, h, rng.randbytes(3 * w * h)) for w, h in _PICTURE_SIZES]


def make_picture(width: int, height: int, pixels: bytes) -> str:
    """A PNG file in base64."""
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _show(rng: random.Random, path: str, body: Body, pictures: list[str]) -> None:
    """Put pictures before or behind a request's text, in the words of its API."""
    urls = [f"data:image/png;base64,{data}" for data in pictures]
    parts: list[Body]
    match path:
        case "/generate":
            body["image_data"] = urls
            texts = [PICTURE * len(urls), body["text"]]
            body["text"] = "".join(texts if rng.random() < 0.5 else reversed(texts))
            return
        case "/v1/responses":
            parts = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
            body["input"] = [{"role": "user", "content": body["input"]}]
            (message,), text = body["input"], "input_text"
        case "/v1/messages":
            sources = [{"type": "base64", "media_type": "image/png", "data": d} for d in pictures]
            parts = [{"type": "image", "source": source} for source in sources]
            (message,), text = body["messages"], "text"
        case _:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            (message,), text = body["messages"], "text"
    words = [{"type": text, "text": message["content"]}]
    message["content"] = parts + words if rng.random() < 0.5 else words + parts


def _text(rng: random.Random) -> str:
    """A tiny prompt, a long one, or one that begins like others."""
    shape = rng.random()
    if shape < 0.2:
        return rng.choice(_WORDS)
    words = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 25)))
    return words if shape < 0.4 else f"{rng.choice(_PREFIXES)} {words}"


def _messages(rng: random.Random) -> list[Body]:
    return [{"role": "user", "content": _text(rng)}]


def _completion(rng: random.Random, longest: int) -> Body:
    body: Body = {"prompt": _text(rng), "max_tokens": longest, "ignore_eos": rng.random() < 0.5}
    match rng.randrange(6):
        case 0:
            body["n"] = 3
        case 1:
            body |= {"logprobs": 2, "echo": rng.random() < 0.5}
        case 2:
            body["stop"] = [rng.choice("aeiou"), "the"]
        case 3:
            body["prompt"] = [_text(rng), _text(rng)]
        case 4:
            body |= {"top_p": 0.8, "top_k": 30, "repetition_penalty": 1.1}
    return body


def _chat(rng: random.Random, longest: int) -> Body:
    body: Body = {"messages": _messages(rng), "max_tokens": longest}
    match rng.randrange(4):
        case 0:
            body |= {"logprobs": True, "top_logprobs": 2}
        case 1:
            body["n"] = 2
        case 2:
            body |= {"stop": ["e", "zz"], "presence_penalty": 0.3}
    return body


def _tools(rng: random.Random, longest: int) -> Body:
    function = {"name": "note", "parameters": _PERSON, "strict": True}
    return {
        "messages": _messages(rng),
        "max_tokens": longest + 24,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }


def _grammar(rng: random.Random, longest: int) -> Body:
    body: Body = {"messages": _messages(rng), "max_tokens": longest + 16}
    match rng.randrange(3):
        case 0:
            schema = {"name": "person", "schema": _PERSON}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        case 1:
            body["guided_regex"] = _PATTERN
        case 2:
            body["guided_choice"] = _CHOICES
    return body


def _responses(rng: random.Random, longest: int) -> Body:
    return {"input": _text(rng), "max_output_tokens": longest}


def _anthropic(rng: random.Random, longest: int) -> Body:
    body: Body = {"messages": _messages(rng), "max_tokens": longest}
    if rng.random() < 0.3:
        body["stop_sequences"] = ["e"]
    return body


def _generate(rng: random.Random, longest: int) -> Body:
    sampling: Body = {
        "max_new_tokens": longest,
        "temperature": rng.choice([0.0, 1.0]),
        "sampling_seed": rng.randrange(2**31),
    }
    if rng.random() < 0.3:
        sampling["regex"] = _PATTERN
    return {"text": _text(rng), "sampling_params": sampling}


_KINDS: dict[str, tuple[str, Callable[[random.Random, int], Body]]] = {
    "completion": ("/v1/completions", _completion),
    "chat": ("/v1/chat/completions", _chat),
    "tools": ("/v1/chat/completions", _tools),
    "grammar": ("/v1/chat/completions", _grammar),
    "responses": ("/v1/responses", _responses),
    "anthropic": ("/v1/messages", _anthropic),
    "generate": ("/generate", _generate),
}
