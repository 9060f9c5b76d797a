"""Counts of tokens on the device."""

from __future__ import annotations

import torch

from atom.sampling.token_counts import TokenCounts

CPU = torch.device("cpu")


def counted(counts: TokenCounts, slot: int) -> tuple[set[int], dict[int, int]]:
    """Tokens that were seen, and how often they were generated."""
    seen, generated = counts.seen(torch.tensor([slot]), None)
    ids = torch.nonzero(generated[0]).flatten().tolist()
    return set(torch.nonzero(seen[0]).flatten().tolist()), {t: int(generated[0, t]) for t in ids}


def test_prompts_and_outputs_are_told_apart() -> None:
    counts = TokenCounts(10, CPU)
    slot = counts.claim([1, 2, 2, 3], [3, 4, 4])
    assert counted(counts, slot) == ({1, 2, 3, 4}, {3: 1, 4: 2})


def test_kept_tokens_count_and_the_rest_does_not() -> None:
    counts = TokenCounts(10, CPU)
    a, b = counts.claim([0], []), counts.claim([1], [7])
    counts.add(torch.tensor([b, a]), torch.tensor([[7, 8, 9], [5, -1, 6]]), torch.tensor([2, 1]))
    assert counted(counts, a) == ({0, 5}, {5: 1})
    assert counted(counts, b) == ({1, 7, 8}, {7: 2, 8: 1})


def test_drafts_count_at_their_rows_only() -> None:
    counts = TokenCounts(10, CPU)
    slot = counts.claim([1], [2])
    more = torch.tensor([1, 2, 2]), torch.tensor([2, 2, 5])
    _, generated = counts.seen(torch.tensor([slot, slot, slot]), more)
    assert generated[:, [2, 5]].tolist() == [[1, 0], [2, 0], [2, 1]]
    assert counted(counts, slot) == ({1, 2}, {2: 1})


def test_slots_are_used_again_and_empty_then() -> None:
    counts = TokenCounts(10, CPU)
    slots = [counts.claim([i], [i]) for i in range(5)]
    assert len(set(slots)) == 5
    counts.release(slots[2])
    assert counts.claim([9], []) == slots[2]
    assert counted(counts, slots[2]) == ({9}, {})
    assert counted(counts, slots[3]) == ({3}, {3: 1})
