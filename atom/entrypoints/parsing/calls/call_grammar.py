"""How a format writes calls, so that a grammar can make a model write them so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atom.structured_output.tags import Format, token

# A model that is made to call tools goes on as long as it may.
MAX_CALLS = 16


@dataclass(frozen=True)
class CallGrammar:
    """How a format writes calls.

    Attributes:
        call: (name, format of the arguments) -> one call.
        separator: what stands between two calls.
        section: the markers around all calls of an answer; None where there are none.
        forbidden: what no string of the arguments may hold, since the reader would take it for
            a marker. Empty for formats whose reader knows where strings of JSON end.
        head, tail: what stands before the first call and after the last one.
        text: an answer without calls; for formats whose calls have no markers of their own.
        max_calls: calls that an answer holds at most.
        takes_json: arguments are written as JSON.
    """

    call: Callable[[str, Format], Format]
    separator: str
    section: tuple[str, str] | None
    forbidden: tuple[str, ...] = ()
    head: Format | None = None
    tail: Format | None = None
    text: Format | None = None
    max_calls: int = MAX_CALLS
    takes_json: bool = True


def tagged(begin: str, content: Format, end: str) -> Format:
    """What stands between two markers."""
    return {"type": "tag", "begin": token(begin), "content": content, "end": token(end)}
