"""Stop strings in streamed text, in linear time.

Generation ends with the first character that completes a stop string, however the text is split
into pieces. If it completes several, the longest counts.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, shared by its sequences.

    `include`: keep the stop string in the output.
    """

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        self.include = include
        self.patterns = [(string, _borders(string)) for string in dict.fromkeys(strings)]

    def __bool__(self) -> bool:
        return bool(self.patterns)


class StopMatcher:
    """Searches the text of one sequence (Knuth-Morris-Pratt for each stop string).

    `matched`: the stop string that ended the text, or None.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        # For each stop string, the length of its longest prefix that ends the text.
        self._lengths = [0] * len(stops.patterns)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Add a piece of text; returns the text that cannot be part of a stop string any more.

        With `may_match` false, stop strings completed in this piece do not count. After a match the
        rest of the piece is dropped.
        """
        assert self.matched is None, "text after the stop string"
        for i, char in enumerate(text):
            completed = self._advance(char)
            if completed is not None and may_match:
                self.matched = completed
                text = self._held + text[: i + 1]
                self._held = ""
                return text if self._stops.include else text[: len(text) - len(completed)]
        text = self._held + text
        num_held = 0 if self._stops.include else max(self._lengths, default=0)
        end = len(text) - num_held
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """The text held back as a possible beginning of a stop string."""
        text, self._held = self._held, ""
        return text

    def _advance(self, char: str) -> str | None:
        """Add one character; returns the longest stop string that it completes."""
        completed: str | None = None
        for i, (string, borders) in enumerate(self._stops.patterns):
            length = self._lengths[i]
            if not length and string[0] != char:
                continue
            while length and string[length] != char:
                length = borders[length - 1]
            if string[length] == char:
                length += 1
            if length == len(string):
                if completed is None or len(string) > len(completed):
                    completed = string
                length = borders[-1]
            self._lengths[i] = length
        return completed


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest border (proper prefix that is also a suffix)."""
    borders = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = borders[length - 1]
        if string[i] == string[length]:
            length += 1
        borders[i] = length
    return borders
