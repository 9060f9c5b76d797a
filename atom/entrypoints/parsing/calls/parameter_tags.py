"""Reading values that stand between tags and may speak of them."""

from __future__ import annotations

from collections.abc import Mapping

from atom.entrypoints.parsing.text_stream import Emit, Markers, Steps, TextStream


class TaggedValue:
    """The text of one value, up to a tag that ends it.

    Args:
        ends: tags that may end it, and what must follow one for that: white space aside, one of
            these tags or the end of the text. Elsewhere they are text.
    """

    def __init__(self, ends: Mapping[str, tuple[str, ...]]) -> None:
        self._markers = Markers(ends)
        self._following = {end: Markers(tags) for end, tags in ends.items()}

    def read(self, text: TextStream, emit: Emit) -> Steps[str | None]:
        """Returns the tag that ended the value; None at the end of the text."""
        while True:
            end = yield from text.until(self._markers, emit)
            if end is None or (yield from text.precedes(self._following[end])):
                return end
            emit(end)


class Lines:
    """Passes on what stands between tags on lines of their own: less one line feed at each end."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._is_first = True
        self._held = ""

    def feed(self, text: str) -> None:
        if self._is_first and text:
            text = text.removeprefix("\n")
            self._is_first = False
        if text:
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            self._emit(text.removesuffix("\n"))
