"""Lookup in a growing text: the same as searching all of it each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.metadata import ModelOutput
from atom.spec_decode.base import VerifiedStep
from atom.spec_decode.lookup import HistoryLookup, NullLookup, SuffixIndex


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
    index = SuffixIndex([], shortest + more, shortest, count)
    tokens: list[int] = []
    for part in parts:
        tokens += part
        index.extend(part)
        assert index.lookup() == searched(tokens, shortest + more, shortest, count)


def test_a_text_of_one_token_takes_no_time() -> None:
    """Hundreds of thousands of occurrences, none of which shares three tokens."""
    index = SuffixIndex([], 4, 2, 3)
    index.extend([5] * 200_000 + [6, 5, 5])
    assert index.lookup() == [6, 5, 5]


def step(ids: list[str], histories: list[tuple[list[int], list[int]]], **fields: Any) -> Any:
    return VerifiedStep(
        model_input=fields.get("model_input"),  # type: ignore[arg-type]
        model_output=ModelOutput(torch.empty(0, 1), ()),
        next_token_ids=torch.empty(0, dtype=torch.int64),
        sequence_ids=ids,
        last_rows=torch.empty(0, dtype=torch.int64),
        sequence_indices=range(len(ids)),
        histories=histories,
        verifications=[],
        num_drafts=3,
        started=0.0,
    )


def test_sequences_come_and_go() -> None:
    lookup = HistoryLookup(2, ngram_max=4, ngram_min=2)
    prompt, outputs = [1, 2, 3, 4, 9], [1]
    assert lookup.find(step(["a"], [(prompt, outputs)])) == [None]
    outputs += [2]
    other: list[int] = [8]
    found = lookup.find(step(["a", "b"], [(prompt, outputs), ([7, 8, 9, 9, 7], other)]))
    assert found == [[3, 4], [9, 9]]
    assert lookup.num_indexes == 2
    outputs += [3, 4]
    assert lookup.find(step(["a"], [(prompt, outputs)])) == [[9, 1]]
    assert lookup.num_indexes == 1
    # Another sequence that took over the id.
    assert lookup.find(step(["a"], [([5, 6, 7, 5], [6])])) == [[7, 5]]
    assert lookup.find(step([], [])) == []
    assert lookup.num_indexes == 0


@pytest.mark.parametrize("count", [0, 2])
def test_the_null_lookup_finds_nothing(count: int) -> None:
    assert NullLookup().find(step(["a", "b"][:count], [([1], [1])] * count)) == [None] * count
