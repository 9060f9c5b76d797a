"""Verification that keeps the target's distribution exactly.

Every row is sampled from the target's own processed distribution, as if there were no drafts.
A draft is kept as long as it equals the sample of the row before it; the first sample that
differs is the correction, and after k matches the last sample is the bonus token. Whatever the
drafts are, the tokens are those that the target alone would have sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Pads the drafts of sequences that have fewer than others; equals no token.
NO_DRAFT = -1


@dataclass(frozen=True)
class VerifyResult:
    """Attributes:
    token_ids: [S, k + 1] int64; row s holds `num_accepted[s]` accepted drafts, then the
        correction or bonus token; the rest is undefined.
    num_accepted: [S] int64.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor


def verify(sampled: torch.Tensor, drafts: torch.Tensor) -> VerifyResult:
    """Keep the longest prefix of drafts that the target sampled as well.

    Args:
        sampled: [S, k + 1] int64; column j is sampled after the first j drafts, -1 where nothing
            could be. Columns past a sequence's own drafts hold anything.
        drafts: [S, k] int64, padded with `NO_DRAFT`.
    """
    # Padding equals no sample, not even one that could not be drawn.
    matches = ((sampled[:, :-1] == drafts) & (drafts >= 0)).long()
    return VerifyResult(sampled, matches.cumprod(dim=1).sum(dim=1))
