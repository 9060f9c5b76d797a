"""Images in the text of a message, while it is on its way to a chat template.

A mark stands where an image does, so whatever becomes of the text, the image stays in its place;
templates get parts of text and images in the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# A noncharacter of Unicode, which no text is meant to hold; it is removed from those that do.
_EDGE = "\ufdd1"
_MARK = re.compile(f"{_EDGE}([0-9]+){_EDGE}")

Part = dict[str, str]


def mark_of(index: int) -> str:
    """What stands for an image, by its number in the conversation."""
    return f"{_EDGE}{index}{_EDGE}"


def without_marks(text: str) -> str:
    """A text as a client sent it, in which no image can stand."""
    return text.replace(_EDGE, "")


def parts_of(text: str) -> list[Part]:
    """The texts and images of a content, as templates take them."""
    # Texts and numbers of images take turns.
    pieces = _MARK.split(text)
    parts: list[Part] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def order_of(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the images that messages have, in their order."""
    return [int(number) for message in messages for number in _numbers(message)]


def _numbers(message: Mapping[str, Any]) -> Iterator[str]:
    yield from _MARK.findall(message["content"])
