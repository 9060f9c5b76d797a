"""What comes back from the device: samples, and rows where nothing could be sampled."""

from __future__ import annotations

import pytest
import torch

from atom.batch import ScheduledBatch, ScheduledSequence
from atom.model_engine.model_runner import SampleLayout, bring_to_host
from atom.sampling.verify import verify


def layout_of(*drafts: list[int]) -> SampleLayout:
    """One sequence for each list of drafts; rows of logits: the drafts' and one more."""
    sequences = [
        ScheduledSequence(
            id=str(i),
            token_ids=[1, *d],
            start=0,
            block_ids=[i],
            num_drafts=len(d),
            wants_sample=True,
        )
        for i, d in enumerate(drafts)
    ]
    return SampleLayout.of(ScheduledBatch(sequences, [], []), torch.device("cpu"))


def bring(layout: SampleLayout, sampled: list[int]) -> list[list[int]]:
    return bring_to_host(verify(torch.tensor(sampled)[layout.rows], layout.drafts))


def test_samples_and_how_many_drafts_they_confirm() -> None:
    layout = layout_of([5, 6], [], [7])
    assert bring(layout, [5, 9, 3, 4, 8, 2]) == [[1, 5, 9, 3], [0, 4, 4, 4], [0, 8, 2, 2]]


@pytest.mark.parametrize("bad", [[0], [2], [3], [1, 5], [0, 1, 2, 3, 4, 5]])
def test_drafts_count_up_to_a_row_without_an_admissible_token(bad: list[int]) -> None:
    """And no padding counts as a draft, though it is as negative as the row's token."""
    layout = layout_of([5, 6], [], [7])
    sampled = [-1 if row in bad else token for row, token in enumerate([5, 6, 3, 4, 7, 2])]
    kept = [row[1 : row[0] + 2] for row in bring(layout, sampled)]
    for tokens, first, expected in zip(kept, [0, 3, 4], [[5, 6, 3], [4], [7, 2]], strict=True):
        stop = next((i for i in range(len(expected)) if first + i in bad), len(expected))
        assert tokens == [*expected[:stop], *([-1] if stop < len(expected) else [])]


def test_a_step_without_samples() -> None:
    assert bring(layout_of(), []) == []
