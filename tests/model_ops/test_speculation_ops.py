"""Verification and its neighbours in PyTorch, on examples worked out by hand."""

from __future__ import annotations

import pytest
import torch

from atom.model_ops.kernels.torch.speculation import place_samples, verify_drafts

SAMPLED = torch.tensor([5, 6, 7, 8, 5, 9, 9, 9])


@pytest.mark.parametrize(
    ("limits", "accepted"), [(None, [3, 1]), ([2, 0], [2, 0]), ([0, 5], [0, 1]), ([3, 1], [3, 1])]
)
def test_accepted_are_the_first_that_agree_up_to_the_limits(
    limits: list[int] | None, accepted: list[int]
) -> None:
    drafts = torch.tensor([[5, 6, 7], [5, 6, 9]])
    bound = None if limits is None else torch.tensor(limits)
    tokens, counts = verify_drafts(SAMPLED, drafts, None, bound)
    assert tokens.tolist() == [[5, 6, 7, 8], [5, 9, 9, 9]]
    assert counts.tolist() == accepted


def test_a_later_draft_that_agrees_does_not_count() -> None:
    _, counts = verify_drafts(SAMPLED, torch.tensor([[4, 6, 7], [5, 0, 9]]), None)
    assert counts.tolist() == [0, 1]


def test_rows_of_each_sequence() -> None:
    """The second has one draft; its last row is repeated."""
    table = torch.tensor([[0, 1, 2], [3, 4, 4]])
    tokens, counts = verify_drafts(SAMPLED, torch.tensor([[5, 0], [8, -1]]), table)
    assert tokens.tolist() == [[5, 6, 7], [8, 5, 5]]
    assert counts.tolist() == [1, 1]


def test_no_drafts() -> None:
    tokens, counts = verify_drafts(SAMPLED[:2], None, None)
    assert tokens.tolist() == [[5], [6]]
    assert counts.tolist() == [0, 0]


def test_samples_are_placed_behind_their_rows() -> None:
    after = torch.full((6,), 99)
    rows = torch.tensor([1, 2, 4, 5])
    newest = place_samples(after, rows, torch.tensor([7, 8, -1, 3]), torch.tensor([0, 1]), None)
    assert after.tolist() == [99, 7, 8, 99, 0, 3]
    assert newest.tolist() == [1, 5]
    table = torch.tensor([[0, 1, 2], [3, 3, 3]])
    newest = place_samples(after, rows, torch.tensor([7, 8, 2, 3]), torch.tensor([2, 0]), table)
    assert newest.tolist() == [4, 5]
