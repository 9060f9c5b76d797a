"""Incremental detokenization: only complete characters, in linear time.

The concatenation of all results equals `tokenizer.decode` of all ids.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tokenizers import decoders

from atom.model_loader.tokenizers.plain_tokenizer import BYTE_OF_CHAR, PlainTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPLACEMENT_CHARACTER = "\ufffd"


class Detokenizer(Protocol):
    """Converts one sequence's tokens to text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; it is final."""

    def finish(self) -> str:
        """The remaining text; an incomplete character becomes U+FFFD."""


class Vocabulary(Protocol):
    """Text and bytes of a tokenizer's tokens, shared by its detokenizers."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes; empty for an unknown id."""

    def token_text(self, token_id: int) -> str:
        """The token's text; parts of a character become U+FFFD."""

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts of the special tokens."""

    def is_special(self, token_id: int) -> bool:
        """Whether texts can be read without the token, as a special one."""

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool,
        kept: Sequence[str] = (),
        context_ids: Sequence[int] = (),
    ) -> Detokenizer:
        """A detokenizer for one sequence.

        Args:
            kept: texts of special tokens that are never skipped.
            context_ids: the tokens before the sequence (the prompt, or its end). Some tokenizers
                drop the leading space of a text, which must stay after a prompt.
        """


def create_vocabulary(tokenizer: PlainTokenizer | PreTrainedTokenizerBase) -> Vocabulary:
    """A byte table for ByteLevel BPE tokenizers, windowed decoding for others."""
    is_plain = isinstance(tokenizer, PlainTokenizer) or _decodes_plainly(tokenizer)
    if is_plain and isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
        return ByteLevelVocabulary(tokenizer)
    return WindowVocabulary(tokenizer)


def _decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer of transformers leaves decoding to its backend."""
    from transformers import PreTrainedTokenizerFast

    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        and type(tokenizer).decode is PreTrainedTokenizerFast.decode
    )


def _special_tokens(tokenizer: PlainTokenizer | PreTrainedTokenizerBase) -> frozenset[str]:
    added = tokenizer.added_tokens_decoder.values()
    return frozenset(token.content for token in added if token.special)


class ByteLevelVocabulary:
    """For ByteLevel BPE: each token is a fixed byte string, and text is their UTF-8 decoding."""

    def __init__(self, tokenizer: PlainTokenizer | PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        # By text, because that is how the tokenizers library skips special tokens.
        self.special_tokens = _special_tokens(tokenizer)
        self._plain_bytes: dict[int, bytes] = {}
        self._skipping_bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        return self.lookup(token_id, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) in self.special_tokens

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool,
        kept: Sequence[str] = (),
        context_ids: Sequence[int] = (),
    ) -> Detokenizer:
        del context_ids  # bytes do not depend on the context
        kept_ids = frozenset(self._backend.token_to_id(token) for token in kept)
        return _ByteLevelDetokenizer(self, skip_special_tokens, kept_ids)

    def lookup(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        table = self._skipping_bytes if skip_special_tokens else self._plain_bytes
        found = table.get(token_id)
        if found is None:
            found = table[token_id] = self._encode(token_id, skip_special_tokens)
        return found

    def _encode(self, token_id: int, skip_special_tokens: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or (skip_special_tokens and token in self.special_tokens):
            return b""
        try:
            return bytes(BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token, whose text is not byte-encoded
            return str(token).encode("utf-8")


class _ByteLevelDetokenizer:
    def __init__(
        self,
        vocabulary: ByteLevelVocabulary,
        skip_special_tokens: bool,
        kept_ids: frozenset[int | None],
    ) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._kept_ids = kept_ids
        # Replaces invalid sequences like the tokenizers library: one U+FFFD per maximal subpart.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        lookup, skip, kept = self._vocabulary.lookup, self._skip, self._kept_ids
        return self._decoder.decode(
            b"".join([lookup(t, skip_special_tokens=skip and t not in kept) for t in token_ids])
        )

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class WindowVocabulary:
    """For any tokenizer (SentencePiece, tiktoken, ...); uses only its `decode`."""

    def __init__(self, tokenizer: PlainTokenizer | PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = _special_tokens(tokenizer)
        # Padded embeddings have ids without tokens; some tokenizers raise on them.
        self._id_of_token: dict[str, int] = tokenizer.get_vocab()
        self._known = frozenset(self._id_of_token.values())
        self._token_bytes: dict[int, bytes] = {}
        self._is_byte: dict[int, bool] = {}
        self._is_skipped: dict[int, bool] = {}

    def token_bytes(self, token_id: int) -> bytes:
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._encode(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool,
        kept: Sequence[str] = (),
        context_ids: Sequence[int] = (),
    ) -> Detokenizer:
        kept_ids = frozenset(self._id_of_token.get(token) for token in kept) - {None}
        return _WindowDetokenizer(self, skip_special_tokens, kept_ids, context_ids)

    def knows(self, token_id: int) -> bool:
        return token_id in self._known

    def is_byte(self, token_id: int) -> bool:
        """Whether this is a byte fallback token."""
        found = self._is_byte.get(token_id)
        if found is None:
            token = str(self._tokenizer.convert_ids_to_tokens(token_id))
            # Without byte fallback a token that looks like this is normal text.
            found = _BYTE_TOKEN.fullmatch(token) is not None and self.decode([token_id]) != token
            self._is_byte[token_id] = found
        return found

    def is_special(self, token_id: int) -> bool:
        found = self._is_skipped.get(token_id)
        if found is None:
            # Twice, because decoding may drop a leading space.
            found = not self.decode([token_id, token_id], skip_special_tokens=True)
            self._is_skipped[token_id] = found
        return found

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _encode(self, token_id: int) -> bytes:
        if not self.knows(token_id):
            return b""
        if self.is_byte(token_id):
            match = _BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token_id)))
            assert match is not None
            return bytes([int(match[1], 16)])
        # Decoded twice, since decoding may drop the space of the first.
        doubled = self.decode([token_id, token_id])
        return doubled[len(self.decode([token_id])) :].encode("utf-8")


class _WindowDetokenizer:
    """Decodes a short window of recent tokens and returns what was appended.

    Held back until more tokens arrive: a run of byte tokens, which decoders convert as a whole, and
    a single U+FFFD at the end, which may be an incomplete character.
    """

    _KEEP = 8  # more tokens than a character can have
    _LIMIT = 24

    def __init__(
        self,
        vocabulary: WindowVocabulary,
        skip_special_tokens: bool,
        kept_ids: frozenset[int | None],
        context_ids: Sequence[int],
    ) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._kept_ids = kept_ids
        self._byte_run: list[int] = []
        self._window = [t for t in context_ids[-self._KEEP :] if vocabulary.knows(t)]
        self._num_returned = len(self._decode())  # characters of the window's text

    def feed(self, token_ids: Sequence[int]) -> str:
        settled = False
        for token_id in token_ids:
            if not self._vocabulary.knows(token_id):
                continue
            if self._skip and self._is_left_out(token_id):
                continue
            self._byte_run.append(token_id)
            if not self._vocabulary.is_byte(token_id):
                self._window += self._byte_run
                self._byte_run.clear()
                settled = True
        return self._grow() if settled else ""

    def finish(self) -> str:
        self._window += self._byte_run
        self._byte_run.clear()
        text = self._decode()[self._num_returned :]
        self._num_returned += len(text)
        return text

    def _grow(self) -> str:
        text = self._decode()
        end = len(text) - text.endswith(REPLACEMENT_CHARACTER)
        new = text[self._num_returned : end]
        self._num_returned = max(self._num_returned, end)
        if len(self._window) > self._LIMIT:
            num_held = len(text) - self._num_returned
            self._window = self._window[-self._KEEP :]
            self._num_returned = len(self._decode()) - num_held
        return new

    def _is_left_out(self, token_id: int) -> bool:
        return token_id not in self._kept_ids and self._vocabulary.is_special(token_id)

    def _decode(self) -> str:
        # Skipped tokens never enter the window; kept ones must be decoded.
        skip = self._skip and not self._kept_ids
        return self._vocabulary.decode(self._window, skip_special_tokens=skip)
