"""Lookup beside a draft: drafts that the text itself suggests, found while the text grows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atom.spec_decode.base import VerifiedStep

# Earlier occurrences of the newest tokens that one lookup compares, the latest first: a bound on
# its time in texts that consist of one token.
_MAX_CANDIDATES = 256


class Lookup(Protocol):
    """Finds drafts without a model."""

    def find(self, step: VerifiedStep) -> list[list[int] | None]:
        """For each sampled sequence its drafts, or None where the draft is to make them."""
        ...


class NullLookup:
    """Finds nothing."""

    def find(self, step: VerifiedStep) -> list[list[int] | None]:
        return [None] * len(step.sequence_indices)


class HistoryLookup:
    """Finds what followed the newest tokens where they occurred before.

    Of the occurrences that share the most newest tokens (`ngram_min` to `ngram_max` of them) and
    are followed by `num_drafts` tokens at least, the latest counts. Unlike the n-gram proposer it
    never finds fewer drafts than wanted: the draft is better then.

    Indexes live as long as their sequences take part in steps. An index is the sequence's tokens,
    one integer for each of them and one entry for each distinct `ngram_min` tokens.
    """

    def __init__(self, num_drafts: int, ngram_max: int, ngram_min: int) -> None:
        self._num_drafts = num_drafts
        self._ngram_max = ngram_max
        self._ngram_min = ngram_min
        self._indexes: dict[str, SuffixIndex] = {}

    @property
    def num_indexes(self) -> int:
        """Sequences that are remembered."""
        return len(self._indexes)

    def find(self, step: VerifiedStep) -> list[list[int] | None]:
        ids = [step.sequence_ids[i] for i in step.sequence_indices]
        # A sequence that is running is sampled at every step, so the others have ended.
        self._indexes = {id: self._indexes[id] for id in ids if id in self._indexes}
        found: list[list[int] | None] = []
        for id, (prompt, outputs) in zip(ids, step.histories, strict=True):
            index = self._indexes.get(id)
            # The list tells a sequence from another that took over its id.
            if index is None or index.outputs is not outputs:
                index = SuffixIndex(outputs, self._ngram_max, self._ngram_min, self._num_drafts)
                index.extend(prompt)
                self._indexes[id] = index
            index.extend(outputs[len(index) - len(prompt) :])
            found.append(index.lookup())
        return found


@dataclass
class SuffixIndex:
    """One sequence's tokens, and where its runs of `ngram_min` tokens occurred.

    Attributes:
        outputs: the sequence's own list; its identity is the sequence's.
        num_followers: tokens that follow an occurrence before it counts.
    """

    outputs: Sequence[int]
    ngram_max: int
    ngram_min: int
    num_followers: int
    _tokens: list[int] = field(default_factory=list)
    # Ends of occurrences: the latest of each run, and for each end the one before it or -1.
    _latest: dict[tuple[int, ...], int] = field(default_factory=dict)
    _earlier: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the newest tokens, and index what they follow."""
        tokens, size = self._tokens, self.ngram_min
        tokens += token_ids
        for end in range(len(self._earlier), len(tokens) - self.num_followers + 1):
            if end < size:
                self._earlier.append(-1)
                continue
            run = tuple(tokens[end - size : end])
            self._earlier.append(self._latest.get(run, -1))
            self._latest[run] = end

    def lookup(self) -> list[int] | None:
        """The `num_followers` tokens after the best occurrence of the newest ones."""
        tokens, longest, best = self._tokens, 0, -1
        size = len(tokens)
        end = self._latest.get(tuple(tokens[-self.ngram_min :]), -1)
        for _ in range(_MAX_CANDIDATES):
            if end < 0 or longest == self.ngram_max:
                break
            shared, most = self.ngram_min, min(self.ngram_max, end)
            while shared < most and tokens[end - shared - 1] == tokens[size - shared - 1]:
                shared += 1
            if shared > longest:
                longest, best = shared, end
            end = self._earlier[end]
        return None if best < 0 else tokens[best : best + self.num_followers]
