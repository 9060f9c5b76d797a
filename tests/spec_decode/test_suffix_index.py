"""The index against a search in all texts, and what its votes add up to."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.spec_decode.suffix_index import (
    _DOUBT,
    _MAX_OCCURRENCES,
    _RUNS,
    _TRUST,
    BYTES_PER_TOKEN,
    LONGEST_MATCH,
    SuffixIndex,
    predict,
)

MOST = 5
Followers = dict[tuple[int, ...], float]


def searched(texts: Sequence[Sequence[int]], tail: list[int]) -> Followers:
    """What followed the last tokens of `tail`; every text but the last has ended."""
    tokens = [token for text in texts[:-1] for token in (*text, -1)] + list(texts[-1])
    for length in _RUNS:
        run = tail[-length:]
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == run]
        if not ends or len(tail) < length:
            continue
        found: Followers = {}
        for end in ends[: -_MAX_OCCURRENCES - 1 : -1]:
            shared = next(
                (n for n in range(min(len(tail), end)) if tokens[end - 1 - n] != tail[-1 - n]),
                min(len(tail), end),
            )
            following = tuple(tokens[end : end + MOST])
            found[following] = found.get(following, 0.0) + _TRUST**shared
        return found
    return {}


parts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


@settings(max_examples=60)
@given(st.lists(parts, min_size=1, max_size=5), st.data())
def test_it_finds_what_a_search_finds(given: list[list[list[int]]], data: st.DataObject) -> None:
    """Texts that come in parts, end, and are dropped from the oldest on."""
    index = SuffixIndex()
    texts: list[list[int]] = [[]]
    for number, text in enumerate(given):
        for part in text:
            index.extend(part)
            texts[-1] += part
            tail = texts[-1][-LONGEST_MATCH:]
            found = index.followers(tail, MOST)
            assert found == pytest.approx(searched(texts, tail))
            assert list(found) == list(searched(texts, tail))  # the latest first
        if number + 1 == len(given):
            break
        index.end_text()
        texts.append([])
        if data.draw(st.booleans()):
            assert index.drop_text() == len(texts.pop(0)) + 1
        assert len(index) == sum(len(text) + 1 for text in texts) - 1


def test_a_dropped_index_is_empty() -> None:
    """Nothing is left in any table."""
    index = SuffixIndex()
    rng = Random(0)
    for _ in range(20):
        index.extend([rng.randrange(4) for _ in range(rng.randrange(30))])
        index.end_text()
    while len(index):
        index.drop_text()
    assert all(not chain.latest and not chain.earlier for chain in index._chains)


def test_the_majority_decides_and_doubt_remains() -> None:
    """Three sentences say 7 and one says 8 after the same two tokens; then there is one way on."""
    index = SuffixIndex()
    for start, follower in ((10, 7), (11, 8), (12, 7), (13, 7)):
        index.extend([start, 1, 2, follower, 3, 4])
    found = predict(index.followers([99, 1, 2], 3), 3, 0.0)
    assert found.token_ids == [7, 3, 4]
    vote = _TRUST**2
    first = 3 * vote / (4 * vote + _DOUBT)
    assert found.confidences[0] == pytest.approx(first)
    assert found.confidences[1] == pytest.approx(3 * vote / (3 * vote + _DOUBT / _TRUST))
    one, two, three = found.confidences
    assert found.score == pytest.approx(one + one * two + one * two * three)
    assert predict(index.followers([99, 1, 2], 3), 3, first * 0.99 * two).token_ids == [7, 3]
    assert predict(index.followers([99, 1, 2], 3), 3, first * 1.01).token_ids == []


def test_a_probability_that_is_just_reached_is_enough() -> None:
    even = {(5, 6): _DOUBT}
    assert predict(even, 2, 0.5).token_ids == [5]


def test_one_token_that_came_before_is_enough() -> None:
    index = SuffixIndex()
    index.extend([5, 6, 7, 5])
    assert predict(index.followers([5, 6, 7, 5], 2), 2, 0.0).token_ids == [6, 7]


def test_a_longer_match_outweighs_many_short_ones() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 3, 4, 5, 6, 7, 8, 50])
    for i in range(10):
        index.extend([100 + i, 7, 8, 60])
    assert predict(index.followers([1, 2, 3, 4, 5, 6, 7, 8], 1), 1, 0.0).token_ids == [50]
    assert predict(index.followers([9, 7, 8], 1), 1, 0.0).token_ids == [60]


def test_what_ended_a_text_is_not_drafted() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 3])
    index.end_text()
    index.extend([5, 1, 2])
    assert predict(index.followers([5, 1, 2], 4), 4, 0.0).token_ids == [3]


def test_a_dropped_text_has_no_vote() -> None:
    """Not even while its tokens are still there, since moving the others costs time."""
    index = SuffixIndex()
    for text in ([1, 2, 3, 7], [1, 2, 3, 8], list(range(20, 60))):
        index.extend(text)
        index.end_text()
    index.extend([1, 2, 3])
    assert [run[0] for run in index.followers([1, 2, 3], 1)] == [8, 7]
    index.drop_text()
    assert index._num_dead, "it is still there"
    assert [run[0] for run in index.followers([1, 2, 3], 1)] == [8]


def test_what_follows_a_dropped_text_is_found_from_its_first_token_on() -> None:
    index = SuffixIndex()
    for text in ([1, 2, 3], [7, 8, 9], list(range(20, 60))):
        index.extend(text)
        index.end_text()
    index.drop_text()
    assert list(index.followers([7], 2)) == [(8, 9)]


def test_memory_grows_with_tokens_only() -> None:
    """And is given back."""
    rng = Random(0)
    texts = [[rng.randrange(50_000) for _ in range(500)] for _ in range(40)]
    tracemalloc.start()
    try:
        index = SuffixIndex()
        for text in texts:
            index.extend(text)
            index.end_text()
        full = tracemalloc.get_traced_memory()[0]
        while len(index):
            index.drop_text()
        empty = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert full < BYTES_PER_TOKEN * 20_000
    assert empty < full / 2


def test_a_text_of_one_token_takes_no_time() -> None:
    """Hundreds of thousands of occurrences, of which the latest count."""
    index = SuffixIndex()
    index.extend([5] * 200_000)
    found = predict(index.followers(index.tail(), 15), 15, 0.5)
    assert found.token_ids == [5] * 15
    assert min(found.confidences) > 0.99
