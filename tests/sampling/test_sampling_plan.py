"""Which rows of a step have logits, and which of them belong to a sequence."""

from __future__ import annotations

import numpy as np

from atom.batch import ScheduledSequence
from atom.sampling.plan import NO_DRAFT, RowLayout


def sequence(num_tokens: int, num_drafts: int = 0, samples: bool = True) -> ScheduledSequence:
    return ScheduledSequence("a", 0, [0] * num_tokens, 0, [], 1, samples, num_drafts)


def test_the_layout_of_a_mixed_batch() -> None:
    """A chunk of a prompt, p0 p1, a sequence with two drafts, a b0 b1, and one without, c."""
    batch = [sequence(2, samples=False), sequence(3, 2), sequence(1)]
    layout = RowLayout.of(batch, np.array([2, 5, 6]))
    assert layout.indices == [1, 2]
    assert layout.num_drafts.tolist() == [2, 0]
    assert layout.logits_indices.tolist() == [2, 3, 4, 5]
    assert layout.owners.tolist() == [0, 0, 0, 1]
    assert layout.first.tolist() == [0, 3]
    assert layout.most == 2
    table = layout.table()
    assert table is not None
    assert table.tolist() == [[0, 1, 2], [3, 3, 3]]
    tokens = np.array([10, 11, 20, 21, 22, 30])
    assert layout.drafts(tokens).tolist() == [[21, 22], [NO_DRAFT, NO_DRAFT]]


def test_fewer_drafts_are_padded_though_others_tokens_follow() -> None:
    layout = RowLayout.of([sequence(2, 1), sequence(4, 3)], np.array([2, 6]))
    tokens = np.array([10, 11, 20, 21, 22, 23])
    assert layout.drafts(tokens).tolist() == [[11, NO_DRAFT, NO_DRAFT], [21, 22, 23]]
    table = layout.table()
    assert table is not None
    assert table.tolist() == [[0, 1, 1, 1], [2, 3, 4, 5]]


def test_equal_numbers_of_drafts_need_no_table_and_others_have_places_to_spare() -> None:
    for count in (0, 2):
        even = RowLayout.of([sequence(count + 1, count)] * 3, np.arange(1, 4) * (count + 1), 5)
        assert even.table() is None
        assert even.most == count
    ragged = RowLayout.of([sequence(1), sequence(3, 2)], np.array([1, 4]), 5)
    assert ragged.most == 5
    assert ragged.drafts(np.arange(4)).shape == (2, 5)
    assert RowLayout.of([sequence(2, samples=False)], np.array([2])).most == 0
