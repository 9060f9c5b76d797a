"""Drafts from earlier text: the sequence's own, and recent outputs of other requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from atom.batch import NewSequence
from atom.spec_decode.suffix_index import (
    LONGEST_MATCH,
    NOTHING,
    Continuation,
    SuffixIndex,
    predict,
)

# Drafts end before the probability that all of them are right falls below this: further ones would
# rather cost than bring something. Higher behind others' drafts, which may be wrong themselves.
_FLOOR, _FLOOR_BEHIND = 0.05, 0.2
# Tokens before an output that are kept with it, so that its first tokens are found, too.
_CONTEXT = 8


class RecentOutputs:
    """Outputs of sequences that have ended, found only by sequences with the same cache salt.

    Args:
        max_tokens: tokens to hold over all salts; the oldest outputs are dropped beyond it.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._indexes: dict[str, SuffixIndex] = {}
        # Salts of the outputs, the oldest first.
        self._order: deque[str] = deque()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens held, an end after each output included."""
        return self._num_tokens

    def add(self, cache_salt: str, token_ids: Sequence[int]) -> None:
        """Add an output; of one that is too long, its end."""
        token_ids = token_ids[max(len(token_ids) + 1 - self._max_tokens, 0) :]
        index = self._indexes.setdefault(cache_salt, SuffixIndex())
        index.extend(token_ids)
        index.end_text()
        self._order.append(cache_salt)
        self._num_tokens += len(token_ids) + 1
        while self._num_tokens > self._max_tokens:
            self._drop_oldest()

    def followers(
        self, cache_salt: str, tail: list[int], most: int
    ) -> dict[tuple[int, ...], float]:
        """As `SuffixIndex.followers`, in the outputs with this salt."""
        index = self._indexes.get(cache_salt)
        return {} if index is None else index.followers(tail, most)

    def _drop_oldest(self) -> None:
        salt = self._order.popleft()
        index = self._indexes[salt]
        self._num_tokens -= index.drop_text()
        if not len(index):
            del self._indexes[salt]


@dataclass
class _Text:
    """A live sequence's text.

    Attributes:
        cache_salt: the sequence's.
        start: index of the first token that is not among the recent outputs already.
    """

    index: SuffixIndex
    cache_salt: str
    start: int


class SuffixLookup:
    """Looks the newest tokens of sequences up in their own text and in recent outputs.

    Each sequence has an index from its first lookup until `forget`.

    Args:
        source: name in the statistics.
        max_drafts: most drafts of a sequence.
        recent: outputs of other sequences; None to look in a sequence's own text only.
    """

    def __init__(self, source: str, max_drafts: int, recent: RecentOutputs | None = None) -> None:
        self.source = source
        self.max_drafts = max_drafts
        self._recent = recent
        self._texts: dict[int, _Text] = {}
        # Rows of sequences that have not been looked up yet: salt, and outputs known at the start.
        self._started: dict[int, tuple[str, int]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens held in all indexes."""
        num_live = sum(len(text.index) for text in self._texts.values())
        return num_live if self._recent is None else num_live + self._recent.num_tokens

    def start(self, new: Sequence[NewSequence]) -> None:
        """Learn of sequences that start or resume."""
        if self._recent is not None:
            for each in new:
                self._started[each.row] = each.cache_salt, len(each.output_token_ids)

    def forget(self, rows: Sequence[int]) -> None:
        """Drop the indexes of these rows' sequences; their outputs become recent ones."""
        for row in rows:
            self._started.pop(row, None)
            text = self._texts.pop(row, None)
            if text is not None and self._recent is not None:
                self._recent.add(text.cache_salt, text.index.since(text.start))

    @property
    def shares(self) -> bool:
        """Whether sequences find others' outputs, so that all of each must be known."""
        return self._recent is not None

    def find(
        self, row: int, prompt: Sequence[int], outputs: Sequence[int], more: int = 0
    ) -> Continuation:
        """What is likely to follow a sequence; nothing where its end is new.

        Args:
            row: the sequence's row.
            prompt, outputs: its tokens; must extend those of earlier calls.
            more: tokens beyond `max_drafts`.
        """
        text = self.take_in(row, prompt, outputs)
        return self._predict(text, text.index.tail(), self.max_drafts + more, _FLOOR)

    def take_in(self, row: int, prompt: Sequence[int], outputs: Sequence[int]) -> _Text:
        """Index a sequence's new tokens; arguments as for `find`."""
        text = self._texts.get(row)
        if text is None:
            salt, num_known = self._started.pop(row, ("", 0))
            start = max(len(prompt) + num_known - _CONTEXT, 0)
            text = self._texts[row] = _Text(SuffixIndex(), salt, start)
            text.index.extend(prompt)
        text.index.extend(outputs[len(text.index) - len(prompt) :])
        return text

    def extend(self, row: int, drafts: Sequence[int], most: int) -> Continuation:
        """What is likely to follow `drafts` of others, if these are right.

        Args:
            row: of a sequence that `find` was called for in this step.
            most: tokens at most.
        """
        text = self._texts[row]
        return self._predict(
            text, [*text.index.tail(), *drafts][-LONGEST_MATCH:], most, _FLOOR_BEHIND
        )

    def _predict(self, text: _Text, tail: list[int], most: int, floor: float) -> Continuation:
        followers = text.index.followers(tail, most)
        if self._recent is not None:
            recent = self._recent.followers(text.cache_salt, tail, most)
            for tokens, weight in recent.items():
                followers[tokens] = followers.get(tokens, 0.0) + weight
        return predict(followers, most, floor)


class NoLookup(SuffixLookup):
    """Finds nothing.

    Args:
        source: of the drafts that others make.
    """

    num_tokens = 0

    def __init__(self, source: str) -> None:
        super().__init__(source, 0)

    def extend(self, row: int, drafts: Sequence[int], most: int) -> Continuation:
        return NOTHING
