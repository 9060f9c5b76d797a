"""Acceptance statistics of speculative decoding; steps without drafts do not count."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

import msgspec

logger = logging.getLogger(__name__)

# Warn when a draft gains less than this share of what it should, over a window of as many of its
# verifications.
_DISAPPOINTING_SHARE = 0.5
# Warn when fewer than this share of drafts was accepted in a window of so many verifications: most
# likely the draft does not fit the target, or its aux layer ids follow another convention.
_LOSING_WINDOW = 500
_LOSING_RATE = 0.02


class ExpectedAcceptance(msgspec.Struct, frozen=True, kw_only=True):
    """What a draft's card says that it reaches.

    Attributes:
        source: its name in the statistics.
        tokens_per_forward: bonus token included.
        num_speculative_tokens: drafts per step.
        data: prompts and sampling.
    """

    source: str
    tokens_per_forward: float
    num_speculative_tokens: int
    data: str


class SpecDecodeStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Totals of verified drafts, of one sequence or of the engine.

    Attributes:
        num_drafts: verifications, one for each sequence and step with drafts.
        num_draft_tokens: draft tokens verified.
        accepted_counts: verifications that accepted exactly 0, 1, ... k drafts.
        by_source: the same for each source, such as `eagle3` or `lookup`; empty in these, and where
            the source is unknown.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_counts: list[int] = []
    by_source: dict[str, SpecDecodeStats] = {}

    @property
    def num_accepted_tokens(self) -> int:
        return sum(n * count for n, count in enumerate(self.accepted_counts))

    @property
    def accepted_per_position(self) -> list[int]:
        """How often the draft at position 1, 2, ... k was accepted."""
        return [sum(self.accepted_counts[i:]) for i in range(1, len(self.accepted_counts))]

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over verified drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Acceptance length: tokens per verification, bonus token included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def summary(self) -> str:
        """Some forty characters, for lines that say other things, too."""
        if not self.num_drafts:
            return "no drafts verified"
        return (
            f"{self.tokens_per_forward:.2f} tokens per forward, {self.acceptance_rate:.1%} accepted"
        )

    def describe(self) -> str:
        """One line for the log, with a part for each source if there are several."""
        if not self.num_drafts:
            return "no drafts verified"
        positions = " / ".join(f"{n / self.num_drafts:.1%}" for n in self.accepted_per_position)
        line = (
            f"{self.tokens_per_forward:.2f} tokens per forward, acceptance "
            f"{self.acceptance_rate:.1%}, per position {positions}, "
            f"distribution over 0..k {self.accepted_counts}"
        )
        if len(self.by_source) < 2:
            return line
        parts = [
            f"{name} {stats.num_drafts / self.num_drafts:.1%} of the verified steps, "
            f"{stats.tokens_per_forward:.2f} tokens each"
            for name, stats in self.by_source.items()
        ]
        return f"{line}, by source: {'; '.join(parts)}"

    def since(self, earlier: SpecDecodeStats) -> SpecDecodeStats:
        """The difference to an earlier snapshot."""
        # More drafts may have been verified together since than ever before.
        pairs = itertools.zip_longest(self.accepted_counts, earlier.accepted_counts, fillvalue=0)
        return SpecDecodeStats(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            accepted_counts=[a - b for a, b in pairs],
            by_source={
                name: stats.since(earlier.by_source.get(name, SpecDecodeStats()))
                for name, stats in self.by_source.items()
            },
        )


def total(parts: Iterable[SpecDecodeStats]) -> SpecDecodeStats:
    """The sum of several statistics."""
    known = list(parts)
    names = dict.fromkeys(name for part in known for name in part.by_source)
    positions = itertools.zip_longest(*(part.accepted_counts for part in known), fillvalue=0)
    return SpecDecodeStats(
        num_drafts=sum(part.num_drafts for part in known),
        num_draft_tokens=sum(part.num_draft_tokens for part in known),
        accepted_counts=[sum(counts) for counts in positions],
        by_source={
            name: total(part.by_source[name] for part in known if name in part.by_source)
            for name in names
        },
    )


class SpecDecodeCounter:
    """Counts verifications, and warns when almost no drafts are accepted.

    Args:
        expected: warns also when fewer are accepted than a draft's card promises, by far.
    """

    def __init__(
        self,
        num_speculative_tokens: int = 0,
        expected: ExpectedAcceptance | None = None,
        *,
        warns: bool = True,
    ) -> None:
        self._expectation = None if expected is None else _Expectation(expected)
        self._accepted_counts = [0] * (num_speculative_tokens + 1)
        self._num_draft_tokens = 0
        self._by_source: dict[str, SpecDecodeCounter] = {}
        self._warns = warns
        self._window_start = SpecDecodeStats()

    def count(
        self, num_drafts: int, num_accepted: int, source: str | None = None, times: int = 1
    ) -> None:
        """Count a verification `times` times; without drafts nothing is counted."""
        if num_drafts == 0:
            return
        if source is not None:
            longest = len(self._accepted_counts) - 1
            own = self._by_source.get(source)
            if own is None:
                own = self._by_source[source] = SpecDecodeCounter(longest, warns=False)
            own.count(num_drafts, num_accepted, times=times)
            if self._expectation is not None:
                self._expectation.count(num_drafts, num_accepted, source, times)
        missing = num_drafts + 1 - len(self._accepted_counts)
        self._accepted_counts += [0] * missing
        self._accepted_counts[num_accepted] += times
        self._num_draft_tokens += num_drafts * times
        unseen = sum(self._accepted_counts) - self._window_start.num_drafts
        if self._warns and unseen >= _LOSING_WINDOW:
            self._check_losing()

    def snapshot(self) -> SpecDecodeStats | None:
        """The totals so far; None without speculation."""
        if len(self._accepted_counts) == 1:
            return None
        return SpecDecodeStats(
            num_drafts=sum(self._accepted_counts),
            num_draft_tokens=self._num_draft_tokens,
            accepted_counts=list(self._accepted_counts),
            by_source={
                name: stats
                for name, counter in self._by_source.items()
                if (stats := counter.snapshot()) is not None
            },
        )

    def _check_losing(self) -> None:
        now = self.snapshot()
        assert now is not None
        window, self._window_start = now.since(self._window_start), now
        if window.acceptance_rate < _LOSING_RATE:
            logger.warning(
                "the last %d verified steps accepted %.1f %% of the drafts: the draft does not "
                "fit this target, or its aux layer ids follow another convention",
                window.num_drafts,
                100 * window.acceptance_rate,
            )


class _Expectation:
    """Warns when a draft stays far below its card; once until it has recovered."""

    def __init__(self, expected: ExpectedAcceptance) -> None:
        self._expected = expected
        self._num_steps = self._num_accepted = 0
        self._has_warned = False

    def count(self, num_drafts: int, num_accepted: int, source: str, times: int) -> None:
        """Steps with fewer drafts than the card speaks of tell nothing."""
        expected, most = self._expected, self._expected.num_speculative_tokens
        if source != expected.source or num_drafts < most:
            return
        self._num_steps += times
        self._num_accepted += times * min(num_accepted, most)
        if self._num_steps < _LOSING_WINDOW:
            return
        gain, num_steps = self._num_accepted / self._num_steps, self._num_steps
        self._num_steps = self._num_accepted = 0
        is_far = gain < _DISAPPOINTING_SHARE * (expected.tokens_per_forward - 1)
        if is_far and not self._has_warned:
            logger.warning(
                "the last %d verified steps of %s drafts brought %.2f tokens each; the draft's "
                "card states %.2f (%s): other text than it was trained for, or another target",
                num_steps,
                source,
                1 + gain,
                expected.tokens_per_forward,
                expected.data,
            )
        self._has_warned = is_far
