"""Stop strings against a brute-force reading of the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.text.stop_strings import StopMatcher, StopStrings

FEW = settings(max_examples=300)
# A small alphabet, so that stop strings overlap themselves, each other and the text.
STOPS = st.lists(st.text("ab�", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.text("ab�c", max_size=5), max_size=20)


def brute_force(
    pieces: list[str], stops: list[str], include: bool, first: int
) -> tuple[str, str | None, int]:
    """The text, the stop string and the number of pieces read; `first`: pieces before any match."""
    text, start = "".join(pieces), len("".join(pieces[:first]))
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            num_pieces = next(n for n in range(1 + len(pieces)) if len("".join(pieces[:n])) >= end)
            return text[: end if include else end - len(stop)], stop, num_pieces
    return text, None, len(pieces)


@FEW
@given(PIECES, STOPS, st.booleans(), st.integers(0, 6))
def test_equals_brute_force(pieces: list[str], stops: list[str], include: bool, first: int) -> None:
    matcher = StopMatcher(StopStrings(stops, include=include))
    released, num_pieces = "", 0
    for piece in pieces:
        num_pieces += 1
        released += matcher.feed(piece, may_match=num_pieces > first)
        if matcher.matched is not None:
            break
        seen = "".join(pieces[:num_pieces])
        longest = max(
            length
            for stop in stops
            for length in range(len(stop))
            if seen.endswith(stop[:length]) or length == 0
        )
        # Exactly what may still become a stop string is held back.
        assert released == (seen if include else seen[: len(seen) - longest])
    if matcher.matched is None:
        released += matcher.finish()
    assert (released, matcher.matched, num_pieces) == brute_force(pieces, stops, include, first)


@pytest.mark.parametrize(
    ("stops", "text", "expected", "matched"),
    [
        (["bc", "abcd"], "xabcd", "xa", "bc"),  # the first to be complete
        (["c", "abc"], "xabcd", "x", "abc"),  # complete together: the longest
        (["ab", "ab"], "xab", "x", "ab"),
        (["\n\nQ"], "a\n\n\nQ", "a\n", "\n\nQ"),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, expected: str, matched: str) -> None:
    matcher = StopMatcher(StopStrings(stops, include=False))
    assert matcher.feed(text) == expected
    assert matcher.matched == matched


def test_a_long_stop_string_costs_no_more_than_a_short_one() -> None:
    matcher = StopMatcher(StopStrings(["a" * 20_000 + "b"], include=False))
    start = time.thread_time()
    for _ in range(20_000):
        assert matcher.feed("ac") == "ac"
    assert matcher.feed("a" * 19_999) == ""
    assert matcher.finish() == "a" * 19_999
    assert time.thread_time() - start < 30  # where each character costs the whole string: minutes
