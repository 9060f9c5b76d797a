"""N-gram lookup: drafts from earlier occurrences of the newest tokens in the same sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

# Most earlier occurrences that a lookup compares, the latest first; bounds its time in repetitive
# text.
_MAX_CANDIDATES = 256


class Lookup:
    """Drafts the tokens that followed an earlier occurrence of the newest tokens.

    Candidates match the last `ngram_min` to `ngram_max` tokens and are followed by at least
    `min_drafts` tokens. The longest match wins, the latest one among equals.

    Each sequence has an index until `forget`: its tokens, one integer per token, and one entry per
    distinct run of `ngram_min` tokens.

    Args:
        source: name in the statistics.
        num_drafts, min_drafts: most drafts, and fewest; where fewer are found, the proposer drafts
            instead.
    """

    def __init__(
        self, source: str, num_drafts: int, min_drafts: int, ngram_max: int, ngram_min: int
    ) -> None:
        self.source = source
        self._num_drafts = num_drafts
        self._min_drafts = min_drafts
        self._ngram_max = ngram_max
        self._ngram_min = ngram_min
        # Row -> index.
        self._indexes: dict[int, SuffixIndex] = {}

    @property
    def num_indexes(self) -> int:
        """The number of sequences with an index."""
        return len(self._indexes)

    def forget(self, rows: Sequence[int]) -> None:
        """Drop the indexes of these rows' sequences."""
        for row in rows:
            self._indexes.pop(row, None)

    def find(self, row: int, prompt: Sequence[int], outputs: Sequence[int]) -> list[int] | None:
        """Drafts for a sequence; None when no occurrence is found.

        Args:
            row: the sequence's row.
            prompt, outputs: its tokens; must extend those of earlier calls.
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
    """One sequence's tokens, and where each run of `ngram_min` tokens occurred.

    Attributes:
        num_followers: most tokens to return from behind an occurrence.
        min_followers: tokens that must follow an occurrence.
    """

    ngram_max: int
    ngram_min: int
    num_followers: int
    min_followers: int
    _tokens: list[int] = field(default_factory=list)
    # The end of the latest occurrence of each run, and for each end the one before it, or -1.
    _latest: dict[tuple[int, ...], int] = field(default_factory=dict)
    _earlier: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens and index the runs that now have enough followers."""
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
        """The tokens after the best earlier occurrence of the newest ones; None without one."""
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
