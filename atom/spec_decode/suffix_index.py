"""Where runs of tokens occurred in texts, and what is likely to follow them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec

# Lengths of the runs whose occurrences are chained. Those of the longest run that has any count:
# the latest occurrences of a short run would hide a long match further back.
_RUNS = (6, 2, 1)
# Most tokens of an occurrence that are compared; a longer match is not trusted more.
LONGEST_MATCH = 16
# Most occurrences that a lookup compares, the latest first; bounds its time in repetitive text.
_MAX_OCCURRENCES = 16
# Each further token that an occurrence shares multiplies the weight of its vote; `_DOUBT` is the
# weight of everything that was never seen to follow. Fitted to what SmolLM2 writes on questions of
# GSM8K's training set and on chats: about the share of tokens that a confidence names is right.
_TRUST = 1.5
_DOUBT = 4.0
_WEIGHTS = [_TRUST**n for n in range(LONGEST_MATCH + 1)]
# Share of the tokens that may be dropped ones.
_MOST_DEAD = 0.25
# Most memory of a token in an index: of texts in which no run occurs twice.
BYTES_PER_TOKEN = 400
# Follows a text that has ended.
_END = -1

# Tokens that followed a run, and the weight of the occurrences with just these.
Followers = Mapping[tuple[int, ...], float]


class Continuation(msgspec.Struct, frozen=True):
    """Tokens that are likely to follow a text.

    Attributes:
        confidences: of each token, the estimated probability that it is right if those before are.
    """

    token_ids: list[int]
    confidences: list[float]

    @property
    def score(self) -> float:
        """The expected number of leading tokens that are right."""
        expected, reached = 0.0, 1.0
        for confidence in self.confidences:
            reached *= confidence
            expected += reached
        return expected

    def behind(self, drafts: Sequence[int]) -> Continuation:
        """What is likely to follow once a step that verifies `drafts` has brought what is likely:
        those of them that are expected here, too, and one more token.

        The first confidence is that all before it is right, too.
        """
        count = 1
        for draft, expected in zip(drafts, self.token_ids, strict=False):
            if draft != expected:
                break
            count += 1
        rest = self.token_ids[count:]
        reached = prod(self.confidences[: count + 1])
        return Continuation(rest, [reached, *self.confidences[count + 1 :]][: len(rest)])

    def likely(self, least: float) -> Continuation:
        """The first tokens, which are all right with at least this probability."""
        reached = 1.0
        for count, confidence in enumerate(self.confidences):
            reached *= confidence
            if reached < least:
                return self.first(count)
        return self

    def first(self, count: int) -> Continuation:
        """The first tokens."""
        return Continuation(self.token_ids[:count], self.confidences[:count])


NOTHING = Continuation([], [])


def predict(followers: Followers, most: int, floor: float) -> Continuation:
    """The tokens that weighted votes of the followers choose, one after the other.

    Args:
        most: tokens at most.
        floor: ends before the probability that all tokens are right falls below it.
    """
    voters = list(followers.items())
    token_ids: list[int] = []
    confidences: list[float] = []
    reached, doubt = 1.0, _DOUBT
    for place in range(most):
        votes: dict[int, float] = {}
        for tokens, weight in voters:
            if place < len(tokens):
                token_id = tokens[place]
                votes[token_id] = votes.get(token_id, 0.0) + weight
        if not votes:
            break
        best = max(votes, key=votes.__getitem__)
        confidence = votes[best] / (sum(votes.values()) + doubt)
        reached *= confidence
        if best == _END or reached < floor:
            break
        token_ids.append(best)
        confidences.append(confidence)
        voters = [voter for voter in voters if voter[0][place : place + 1] == (best,)]
        # Those that remain share one more token with the text.
        doubt /= _TRUST
    return Continuation(token_ids, confidences)


@dataclass
class _Chain:
    """The occurrences of all runs of one length: by hash the end of the latest, and by end the one
    before, or -1.

    Ends count all tokens ever indexed. Different runs may have the same hash: tokens are compared.
    """

    length: int
    latest: dict[int, int] = field(default_factory=dict)
    earlier: array[int] = field(default_factory=lambda: array("q"))


class SuffixIndex:
    """Texts, one behind the other, that can be searched for the newest tokens of a text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._chains = [_Chain(length) for length in _RUNS]
        # Tokens removed before `_tokens`, and those at its start that are dropped but still there.
        self._num_removed = self._num_dead = 0
        # Where the current text starts in `_tokens`; lengths of those that have ended.
        self._start = 0
        self._ended: deque[int] = deque()

    def __len__(self) -> int:
        """The number of tokens held, and of texts that have ended."""
        return len(self._tokens) - self._num_dead

    def tail(self) -> list[int]:
        """The last `LONGEST_MATCH` tokens."""
        return self._tokens[-LONGEST_MATCH:]

    def since(self, start: int) -> list[int]:
        """The tokens from this index on."""
        return self._tokens[start:]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the current text."""
        tokens, removed = self._tokens, self._num_removed
        old = len(tokens)
        tokens += token_ids
        for chain in self._chains:
            length, latest, earlier = chain.length, chain.latest, chain.earlier
            first = max(old + 1, min(self._start + length, len(tokens) + 1))
            earlier.extend([-1] * (first - old - 1))
            for end in range(first, len(tokens) + 1):
                key = hash(tuple(tokens[end - length : end]))
                earlier.append(latest.get(key, -1))
                latest[key] = end + removed

    def end_text(self) -> None:
        """End the current text; the next token begins another."""
        self.extend([_END])
        self._ended.append(len(self._tokens) - self._start)
        self._start = len(self._tokens)

    def drop_text(self) -> int:
        """Drop the oldest of the texts that have ended; returns what `len` falls by."""
        count = self._ended.popleft()
        start = self._num_dead
        self._num_dead += count
        for chain in self._chains:
            length, latest = chain.length, chain.latest
            for end in range(start + length, self._num_dead + 1):
                key = hash(tuple(self._tokens[end - length : end]))
                if latest.get(key) == end + self._num_removed:
                    del latest[key]
        # Moving what remains costs time, so not for every text.
        if self._num_dead > _MOST_DEAD * len(self._tokens):
            self._remove_dead()
        return count

    def _remove_dead(self) -> None:
        count, self._num_dead = self._num_dead, 0
        del self._tokens[:count]
        for chain in self._chains:
            del chain.earlier[:count]
        self._num_removed += count
        self._start -= count

    def followers(self, tail: list[int], most: int) -> dict[tuple[int, ...], float]:
        """What followed where the last tokens of a text occurred, the latest first.

        Args:
            tail: the last `LONGEST_MATCH` tokens of the text, or all of a shorter one.
            most: tokens at most.
        """
        tokens, removed = self._tokens, self._num_removed
        found: dict[tuple[int, ...], float] = {}
        for chain in self._chains:
            length = chain.length
            if length > len(tail):
                continue
            end = chain.latest.get(hash(tuple(tail[-length:])), -1) - removed
            if end == len(tokens):  # the text's own end
                end = chain.earlier[end - 1] - removed
            for _ in range(_MAX_OCCURRENCES):
                if end < self._num_dead + length:
                    break
                weight = _WEIGHTS[_num_shared(tokens, end, tail)]
                following = tuple(tokens[end : end + most])
                found[following] = found.get(following, 0.0) + weight
                end = chain.earlier[end - 1] - removed
            if found:
                break
        return found


def _num_shared(tokens: list[int], end: int, tail: list[int]) -> int:
    """The number of last tokens that `tokens[:end]` shares with `tail`."""
    before = tokens[max(end - len(tail), 0) : end]
    if before == tail:
        return len(tail)
    for shared, (own, other) in enumerate(zip(reversed(before), reversed(tail), strict=False)):
        if own != other:
            return shared
    return len(before)
