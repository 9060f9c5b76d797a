"""How a format writes calls, so that a grammar can make a model write them so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atom.structured_output.tags import Format, token


@dataclass(frozen=True)
class CallGrammar:
    """How a format writes calls.

    Attributes:
        call: (name, format of the arguments) -> one call.
        separator: what stands between two calls.
        section: the markers around all calls of an answer; None where there are none.
        forbidden: what no string of the arguments may hold, since the reader would take it for
            a marker. Empty for formats whose reader knows where strings of JSON end.
    """

    call: Callable[[str, Format], Format]
    separator: str
    section: tuple[str, str] | None
    forbidden: tuple[str, ...] = ()


def tagged(begin: str, content: Format, end: str) -> Format:
    """What stands between two markers."""
    return {"type": "tag", "begin": token(begin), "content": content, "end": token(end)}
