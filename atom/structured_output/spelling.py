"""How texts are spelled in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# Bytes before a text that decide how it is spelled: a tokenizer splits texts into words.
_TAIL = 32


class Spelling:
    """The tokens of texts, as the model would most likely choose them.

    Attributes:
        tokens: the bytes of each token id.
        first_bytes: [V] uint8, the first byte of each token; 0 for those without any.

    Args:
        encode: text -> token ids, without special tokens around it.
    """

    def __init__(self, tokens: list[bytes], encode: Callable[[str], Sequence[int]]) -> None:
        self.tokens = tokens
        self.first_bytes: NDArray[np.uint8] = np.array(
            [token[0] if token else 0 for token in tokens], dtype=np.uint8
        )
        self._encode = encode

    def text(self, token_ids: Sequence[int]) -> bytes:
        """Their bytes; token ids that the vocabulary lacks have none."""
        return b"".join(self.tokens[t] for t in token_ids if t < len(self.tokens))

    def spell(self, before: bytes, text: bytes, after: bytes) -> list[int]:
        """The tokens of `text` between two others, as far as they lie in it.

        Args:
            before: the text that precedes it, which is already spelled somehow.
            after: something that may follow.
        """
        tail = before[-_TAIL:]
        return self._cut(tail, text, after) or self._cut(b"", text, after) or []

    def _cut(self, before: bytes, text: bytes, after: bytes) -> list[int] | None:
        """None if a token lies across the beginning of the text."""
        token_ids = self._encode((before + text + after).decode(errors="replace"))
        ends = np.cumsum([len(self.tokens[t]) for t in token_ids])
        if not len(ends):
            return None
        # From the end, since a tokenizer may begin with a space of its own.
        stop = int(ends[-1]) - len(after)
        start = stop - len(text)
        if start > 0 and start not in ends:
            return None
        first = int(np.searchsorted(ends, start, side="right"))
        return list(token_ids[first : int(np.searchsorted(ends, stop, side="right"))])
