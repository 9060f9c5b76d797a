"""Guesses the white space between the parts of a document from that which it has so far."""

from __future__ import annotations

import copy

WHITE_SPACE = b" \t\n\r"
_OPENING, _CLOSING = b"{[", b"}]"
# White space that belongs to what precedes it; else it belongs to what follows.
_LEADING = b"{[,:"
_QUOTE, _BACKSLASH, _COLON, _COMMA, _BRACE = b'"\\:,{'


class WhiteSpace:
    """Reads a document in JSON's notation as it grows; of other texts it merely learns less."""

    def __init__(self) -> None:
        self._in_string = self._is_escaped = False
        self._depth = 0
        self._last = 0  # the last byte outside strings that is no white space
        self._run = b""  # the white space since then
        self._unit: bytes | None = None  # what a level is indented by
        # (byte before, 0) or (0, byte after) -> white space, without its indentation if that is
        # the level's
        self._seen: dict[tuple[int, int], tuple[bytes, bool]] = {}

    def copy(self) -> WhiteSpace:
        other = copy.copy(self)
        other._seen = dict(self._seen)
        return other

    def read(self, text: bytes) -> None:
        """Go on with the document's next bytes."""
        for byte in text:
            if self._in_string:
                if self._is_escaped or byte == _BACKSLASH:
                    self._is_escaped = not self._is_escaped
                elif byte == _QUOTE:
                    self._in_string = False
            elif byte in WHITE_SPACE:
                self._run += bytes((byte,))
            else:
                self._learn(byte)
                self._depth += (byte in _OPENING) - (byte in _CLOSING)
                self._in_string = byte == _QUOTE
                self._last, self._run = byte, b""

    def guess(self, following: int) -> bytes | None:
        """What is missing of the white space before a byte; None without an idea.

        Args:
            following: 0 if it is not known.
        """
        style = self._style(following)
        if style is None:
            return None
        start, is_indented = style
        whole = start + (self._unit or b"") * self._level(following) if is_indented else start
        return whole[len(self._run) :] if whole.startswith(self._run) else b""

    def _style(self, following: int) -> tuple[bytes, bool] | None:
        key = self._key(following)
        if key in self._seen or key == (0, 0):
            return self._seen.get(key)
        if key == (_COLON, 0):
            return b" ", False
        opened = self._seen.get((_BRACE, 0))
        if key == (_COMMA, 0) and opened is not None and not opened[1]:
            return self._seen.get((_COLON, 0), opened)
        if key[0]:
            return opened
        is_lined = opened is not None and opened[1] and following in _CLOSING
        return (b"\n", True) if is_lined else (b"", False)

    def _key(self, following: int) -> tuple[int, int]:
        return (self._last, 0) if self._last in _LEADING else (0, following)

    def _level(self, following: int) -> int:
        return max(self._depth - (following in _CLOSING), 0) if following else self._depth

    def _learn(self, following: int) -> None:
        if not self._last:
            return
        start, newline, indent = self._run.rpartition(b"\n")
        level = self._level(following)
        if newline and indent and level and len(indent) % level == 0:
            self._unit = indent[: len(indent) // level]
        if newline and indent == (self._unit or b"") * level:
            self._seen[self._key(following)] = start + newline, True
        else:
            self._seen[self._key(following)] = self._run, False
