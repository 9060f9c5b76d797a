"""Lookup in a growing text: the same as searching all of it each time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atom.spec_decode.lookup import Lookup, SuffixIndex


def searched(tokens: list[int], longest: int, shortest: int, count: int) -> list[int] | None:
    """What followed the latest earlier occurrence of the longest possible suffix."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - count, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + count]
    return None


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_an_index_finds_what_a_search_finds(
    parts: list[list[int]], shortest: int, more: int, count: int
) -> None:
    index = SuffixIndex(shortest + more, shortest, count, count)
    tokens: list[int] = []
    for part in parts:
        tokens += part
        index.extend(part)
        assert index.lookup() == searched(tokens, shortest + more, shortest, count)


def test_a_text_of_one_token_takes_no_time() -> None:
    """Hundreds of thousands of occurrences, none of which shares three tokens."""
    index = SuffixIndex(4, 2, 3, 3)
    index.extend([5] * 200_000 + [6, 5, 5])
    assert index.lookup() == [6, 5, 5]


def test_fewer_drafts_than_wanted() -> None:
    """Where nobody else makes drafts, one is better than none."""
    index = SuffixIndex(4, 1, 3, 1)
    index.extend([7, 8, 7])
    assert index.lookup() == [8, 7]
    index.extend([7])
    assert index.lookup() == [7]
    alone = SuffixIndex(4, 1, 3, 3)
    alone.extend([7, 8, 7])
    assert alone.lookup() is None


def test_sequences_come_and_go() -> None:
    lookup = Lookup("lookup", 2, 2, ngram_max=4, ngram_min=2)
    prompt, outputs = [1, 2, 3, 4, 9], [1]
    assert lookup.find(0, prompt, outputs) is None
    outputs += [2]
    assert lookup.find(0, prompt, outputs) == [3, 4]
    assert lookup.find(1, [7, 8, 9, 9, 7], [8]) == [9, 9]
    assert lookup.num_indexes == 2
    lookup.forget([1, 5])
    outputs += [3, 4]
    assert lookup.find(0, prompt, outputs) == [9, 1]
    assert lookup.num_indexes == 1
    # Another sequence that took over the row.
    lookup.forget([0])
    assert lookup.find(0, [5, 6, 7, 5], [6]) == [7, 5]
