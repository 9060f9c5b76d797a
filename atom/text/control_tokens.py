"""Special tokens that the texts of a chat spell: they stay text.

A chat template writes special tokens between messages. What users and tools write is rendered with
a mark inside of each special token that it spells; the rendered text is then tokenised as if the
marks were not there, and what they broke is no special token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from atom.model_loader.tokenizers.plain_tokenizer import PlainTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A noncharacter of Unicode, which no text is meant to hold; it is removed from those that do.
_MARK = "\ufdd0"
# Added tokens that are not special may also be words and white space.
_MARKER = re.compile(r"[<\[{]\S+[>\]}]")


class ControlTokens:
    """The special tokens of a tokenizer, in texts of messages and in what they are rendered to.

    Args:
        template: a chat template; other added tokens that it writes as markers count as special.
    """

    def __init__(
        self, tokenizer: PlainTokenizer | PreTrainedTokenizerBase, template: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        # The longest first: one may begin another.
        special = sorted(
            (
                t.content
                for t in added
                if len(t.content) > 1
                and (t.special or (t.content in template and _MARKER.fullmatch(t.content)))
            ),
            key=len,
        )
        self._special = re.compile("|".join(map(re.escape, reversed(special))) or r"(?!)")

    def mark(self, value: Any) -> Any:
        """A copy of plain data in whose texts no special token is spelled whole, keys included."""
        if isinstance(value, str):
            return self._special.sub(_broken, value.replace(_MARK, ""))
        if isinstance(value, Mapping):
            return {
                self.mark(key) if isinstance(key, str) else key: self.mark(item)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[str, list[int]]:
        """A rendered text without marks, and its tokens."""
        if _MARK not in text:
            return text, self._encode(text, add_special_tokens)
        plain = text.replace(_MARK, "")
        if self._backend is not None:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            kept = _without_marks(text, encoding.ids, encoding.offsets)
            if kept is not None:
                return plain, kept
        # Without offsets, or with a token over a mark's edge: piece by piece.
        first, *others = text.split(_MARK)
        token_ids = self._encode(first, add_special_tokens)
        for piece in others:
            token_ids += self._encode(piece, False)
        return plain, token_ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=add_special_tokens, verbose=False
        )
        return token_ids


def _backend(tokenizer: PlainTokenizer | PreTrainedTokenizerBase) -> Tokenizer | None:
    """What says where in a text each token lies; None if nothing does."""
    if not isinstance(tokenizer, PlainTokenizer):
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            return None
    backend = tokenizer.backend_tokenizer
    # A `tokenizer.json` may ask for both, and transformers ignores it.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _broken(match: re.Match[str]) -> str:
    token = match[0]
    return f"{token[0]}{_MARK}{token[1:]}"


def _without_marks(
    text: str, token_ids: list[int], offsets: list[tuple[int, int]]
) -> list[int] | None:
    """The tokens that do not spell marks; None if some spell a mark and what is beside it."""
    kept = []
    for token_id, (start, end) in zip(token_ids, offsets, strict=True):
        covered = text[start:end]
        if _MARK not in covered:
            kept.append(token_id)
        elif covered.strip(_MARK):
            return None
    return kept
