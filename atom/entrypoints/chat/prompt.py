"""A prompt of a request as the engine takes it."""

from __future__ import annotations

from dataclasses import dataclass

from atom.messages import ImageInput


@dataclass(frozen=True)
class Prompt:
    """Attributes:
    text: what was tokenised; None when the client sent token ids.
    images: those whose tokens are in `token_ids`.
    """

    token_ids: list[int]
    text: str | None = None
    images: tuple[ImageInput, ...] = ()
