"""White space is guessed from that which a document has in like places."""

from __future__ import annotations

import json

import pytest

from atom.structured_output.white_space import WhiteSpace

DOCUMENT = {"a, b": 1, "list": [{"x": "{", "y": True}, {"x": "\\", "y": None}], "last": [2, 3]}


def after(text: str) -> WhiteSpace:
    space = WhiteSpace()
    space.read(text.encode())
    return space


@pytest.mark.parametrize(
    "style",
    [{"indent": 2}, {"indent": 4}, {"indent": "\t"}, {}, {"separators": (",", ":")}],
    ids=["two", "four", "tab", "line", "dense"],
)
def test_a_regular_document_is_foreseen_from_its_first_lines(style: dict[str, object]) -> None:
    """Where a kind of place occurred before, and everywhere at other depths."""
    text = json.dumps(DOCUMENT, **style)  # type: ignore[arg-type]
    start = text.index("true")
    for end in range(start, len(text)):
        if text[end].isspace() or text[end - 1].isalnum() or text[end - 1] in '"\\':
            continue
        read = text[:end].rstrip()
        assert after(read).guess(ord(text[end])) == text[len(read) : end].encode(), read


def test_white_space_that_has_begun_is_completed() -> None:
    space = after('{\n  "a": 1,\n ')
    assert space.guess(ord('"')) == b" "
    assert after('{\n  "a": 1,\n   ').guess(ord('"')) == b""


def test_nothing_is_guessed_without_an_example() -> None:
    assert after("").guess(ord("{")) == b""
    assert after("{").guess(ord('"')) is None
    assert after('{"a"').guess(ord(":")) == b""
    assert after('{"a":').guess(ord("1")) == b" "
    assert after('{"a":[1').guess(0) is None


def test_copies_go_their_own_way() -> None:
    first = after('{ "a"')
    second = first.copy()
    second.read(b":\n1")
    assert (first.guess(ord(":")), second.guess(ord(","))) == (b"", b"")
    first.read(b':1, "b":')
    second.read(b', "b":')
    assert (first.guess(ord("1")), second.guess(ord("1"))) == (b"", b"\n")
