"""Verification that keeps the target's distribution exactly.

Every row is sampled from the target's own processed distribution, as if there were no drafts.
A draft is kept as long as it equals the sample of the row before it; the first sample that
differs is the correction, and after k matches the last sample is the bonus token. Whatever the
drafts are, the tokens are those that the target alone would have sampled.
"""

from __future__ import annotations

import torch

# Pads the drafts of sequences that have fewer than others; equals no sample.
NO_DRAFT = -2


def count_accepted(sampled: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """How many drafts of each sequence the target sampled as well, up to the first that differs.

    Args:
        sampled: [S, k + 1] int64; column j is sampled after the first j drafts, -1 where nothing
            could be. Columns past a sequence's own drafts hold anything.
        drafts: [S, k] int64, padded with `NO_DRAFT`.

    Returns:
        [S] int64. Row s of `sampled` begins with that many accepted drafts, then comes the
        correction or bonus token.
    """
    matches = (sampled[:, :-1] == drafts).long()
    return matches.cumprod(dim=1).sum(dim=1)
