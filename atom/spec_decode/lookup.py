"""Lookup: drafts that the text itself suggests, found while the text grows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

# Earlier occurrences of the newest tokens that one lookup compares, the latest first: a bound on
# its time in texts that consist of one token.
_MAX_CANDIDATES = 256


class Lookup:
    """Finds what followed the newest tokens of a sequence where they occurred before.

    Of the occurrences that share the most newest tokens (`ngram_min` to `ngram_max` of them) and
    are followed by `min_drafts` tokens at least, the latest counts.

    An index is the sequence's tokens, one integer for each of them and one entry for each
    distinct `ngram_min` tokens; it lives as long as its sequence takes part in steps.

    Args:
        source: what statistics call it.
        num_drafts, min_drafts: the most drafts, and the fewest that are worth more than those of
            whoever makes the others.
    """

    def __init__(
        self, source: str, num_drafts: int, min_drafts: int, ngram_max: int, ngram_min: int
    ) -> None:
        self.source = source
        self._num_drafts = num_drafts
        self._min_drafts = min_drafts
        self._ngram_max = ngram_max
        self._ngram_min = ngram_min
        # By row.
        self._indexes: dict[int, SuffixIndex] = {}

    @property
    def num_indexes(self) -> int:
        """Sequences that are remembered."""
        return len(self._indexes)

    def forget(self, rows: Sequence[int]) -> None:
        """The sequences of these rows are gone."""
        for row in rows:
            self._indexes.pop(row, None)

    def find(self, row: int, prompt: Sequence[int], outputs: Sequence[int]) -> list[int] | None:
        """Drafts behind a sequence's tokens, to which it only ever adds; None when none are found.

        Args:
            row: the sequence's own.
        """
        index = self._indexes.get(row)
        if index is None:
            index = SuffixIndex(
                self._ngram_max, self._ngram_min, self._num_drafts, self._min_drafts
            )
            index.extend(prompt)
            self._indexes[row] = index
        index.extend(outputs[len(index) - len(prompt) :])
        return index.lookup()


@dataclass
class SuffixIndex:
    """One sequence's tokens, and where its runs of `ngram_min` tokens occurred.

    Attributes:
        num_followers: tokens to take from behind an occurrence.
        min_followers: tokens that follow an occurrence before it counts.
    """

    ngram_max: int
    ngram_min: int
    num_followers: int
    min_followers: int
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
        for end in range(len(self._earlier), len(tokens) - self.min_followers + 1):
            if end < size:
                self._earlier.append(-1)
                continue
            run = tuple(tokens[end - size : end])
            self._earlier.append(self._latest.get(run, -1))
            self._latest[run] = end

    def lookup(self) -> list[int] | None:
        """The tokens after the best occurrence of the newest ones; None when there is none."""
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
