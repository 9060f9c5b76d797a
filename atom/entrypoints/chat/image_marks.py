"""Images and videos in the text of a message, while it is on its way to a chat template.

A mark stands where an image does, so whatever becomes of the text, the image stays in its place;
templates get parts of text and images in the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

# A noncharacter of Unicode, which no text is meant to hold; it is removed from those that do.
_EDGE = "\ufdd1"
_MARK = re.compile(f"{_EDGE}((?:image|video) [0-9]+){_EDGE}")

Part = dict[str, str]


def mark_of(index: int, kind: Literal["image", "video"] = "image") -> str:
    """What stands for an image or a video, by its number among both in the conversation."""
    return f"{_EDGE}{kind} {index}{_EDGE}"


def without_marks(text: str) -> str:
    """A text as a client sent it, in which no image can stand."""
    return text.replace(_EDGE, "")


def parts_of(text: str) -> list[Part]:
    """The texts and images of a content, as templates take them."""
    # Texts and what the marks say take turns.
    pieces = _MARK.split(text)
    parts: list[Part] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            parts.append({"type": piece.partition(" ")[0]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def order_of(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the images that messages have, in their order."""
    return [int(mark.partition(" ")[2]) for message in messages for mark in _marks(message)]


def _marks(message: Mapping[str, Any]) -> Iterator[str]:
    yield from _MARK.findall(message["content"])
