"""Drafts of a proposer or a grammar, with confidences, as those of a lookup have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atom.spec_decode.suffix_index import Continuation

# Of a sequence that wants none.
NO_DRAFTS = Continuation([], [])
# Confidence in drafts whose source says nothing.
_UNSAID = 0.5


def by_sequence(made: Sequence[np.ndarray], num_sequences: int) -> list[Continuation]:
    """The proposer's drafts of each sequence.

    Args:
        made: the tensors of a `Proposal`, if there is one.
    """
    if not made:
        return [NO_DRAFTS] * num_sequences
    token_ids = made[0].tolist()
    if len(made) == 1:
        return [Continuation(own, [_UNSAID] * len(own)) for own in token_ids]
    return [Continuation(*own) for own in zip(token_ids, made[1].tolist(), strict=True)]


def replaced(drafts: Continuation, token_ids: list[int]) -> Continuation:
    """Drafts as a grammar allows them: those that it put in must follow."""
    known = zip(drafts.token_ids, drafts.confidences, strict=True)
    said = [c if t == new else 1.0 for (t, c), new in zip(known, token_ids, strict=False)]
    return Continuation(token_ids, said + [1.0] * (len(token_ids) - len(said)))
