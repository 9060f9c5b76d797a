"""Verification that keeps the target's distribution exactly.

Every row is sampled from the target's processed distribution, as if there were no drafts. A draft
is accepted while it equals the sample of the row before it. The first sample that differs is the
correction; after k accepted drafts the last sample is the bonus token. So the output never depends
on the drafts.
"""

from __future__ import annotations

import torch

# Padding of drafts; equals no sampled token.
NO_DRAFT = -2


def count_accepted(sampled: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """The number of accepted drafts of each sequence.

    Args:
        sampled: [S, k + 1] int64; column j is sampled after the first j drafts, -1 where no token
            could be chosen. Columns past a sequence's own drafts are ignored.
        drafts: [S, k] int64, padded with `NO_DRAFT`.

    Returns:
        [S] int64. Row s of `sampled` starts with so many accepted drafts, followed by the
        correction or bonus token.
    """
    matches = (sampled[:, :-1] == drafts).long()
    return matches.cumprod(dim=1).sum(dim=1)
