"""Who makes drafts: a proposer on the device, a lookup on the host, and a rule for how many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from atom.batch import ScheduledBatch, StepOutput
from atom.spec_decode.base import Proposer, VerifiedStep
from atom.spec_decode.lengths import DraftLength, Verification
from atom.spec_decode.lookup import Lookup

# The tokens of a sequence: its prompt and its outputs.
History = tuple[Sequence[int], Sequence[int]]
# What the lookup found for each sampled sequence; None where the proposer is asked.
Found = Sequence[list[int] | None]


class Drafter:
    """Asks the lookup and, for what it does not find, the proposer.

    The proposer sees every step: when nobody needs its drafts it still completes its KV.

    Attributes:
        proposer: makes drafts on the device.
        looks: whether there is a lookup.
        looks_first: whether it comes before the proposer, which it may spare. On a GPU
            the host would have to wait for the tokens in the middle of the step.

    Args:
        source: what statistics call the proposer.
        length: chooses how many drafts to make; None makes as many as there may be.
    """

    def __init__(
        self,
        proposer: Proposer,
        source: str,
        lookup: Lookup | None,
        length: DraftLength | None,
        *,
        waiting_is_free: bool,
    ) -> None:
        self.proposer = proposer
        self.looks = lookup is not None
        self.looks_first = self.looks and waiting_is_free
        self._source = source
        self._lookup = lookup
        self._length = length
        self._count = 0

    def forget(self, rows: Sequence[int]) -> None:
        """The sequences of these rows are gone."""
        if self._lookup is not None:
            self._lookup.forget(rows)

    def look_up(self, rows: Sequence[int], histories: Sequence[History]) -> Found:
        """What the text of each sampled sequence suggests."""
        lookup = self._lookup
        assert lookup is not None
        pairs = zip(rows, histories, strict=True)
        return [lookup.find(row, *history) for row, history in pairs]

    def propose(
        self, step: VerifiedStep | None, num_sampled: int, found: Found | None
    ) -> torch.Tensor | None:
        """[S, n] int64, the proposer's drafts; None when it makes none.

        Args:
            step: None when the proposer reads no steps.
            found: by the lookup, where it came first.
        """
        known = [None] * num_sampled if found is None else found
        sources = [self._source_of(drafts) for drafts in known]
        needed = any(drafts is None for drafts in known)
        self._count = self._choose(sources, needed) if sources else 0
        if step is None:
            return None
        return self.proposer.propose(step, self._count if needed else 0)

    def merge(self, found: Found, made: np.ndarray | None) -> list[tuple[list[int], str]]:
        """For each sampled sequence its drafts, as many as were asked for at most, and who was."""
        rows: list[list[int]] = [[] for _ in found] if made is None else made.tolist()
        count = self._count
        return [
            (row if drafts is None else drafts[:count], self._source_of(drafts))
            for drafts, row in zip(found, rows, strict=True)
        ]

    def observe(self, batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        """Learn from a step that took so long, drafting included."""
        if self._length is None:
            return
        verifications, num_rows = [], 0
        for sequence, result in zip(batch.sequences, output.sequences, strict=True):
            if sequence.wants_sample:
                accepted = max(min(len(result.token_ids) - 1, sequence.num_drafts), 0)
                verifications.append(
                    Verification(sequence.draft_source, sequence.num_drafts, accepted)
                )
                num_rows += sequence.num_drafts + 1
        is_decode = num_rows == batch.num_tokens
        self._length.observe(verifications, seconds if is_decode else None)

    def _choose(self, sources: Sequence[str], needed: bool) -> int:
        if self._length is None:
            return self.proposer.lookahead.num_tokens
        return self._length.choose(sources, drafts=needed and self.proposer.reads_steps)

    def _source_of(self, drafts: list[int] | None) -> str:
        if drafts is None or self._lookup is None:
            return self._source
        return self._lookup.source
