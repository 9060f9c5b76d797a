"""Acceptance statistics, counted only on steps where drafts were verified."""

from __future__ import annotations

import logging

import msgspec

logger = logging.getLogger(__name__)

# A drafter that gets nothing accepted for this many verified sequences in a row of windows is
# almost surely wired wrongly: another aux layer convention, another target.
_LOSING_WINDOW = 500
_LOSING_RATE = 0.02


class SpecDecodeStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Totals of verified drafts, of one sequence or of the whole engine.

    Attributes:
        num_drafts: verifications: one for each sequence and step that had drafts.
        num_draft_tokens: drafts proposed in them.
        accepted_counts: how many verifications accepted exactly 0, 1, ... k drafts.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_counts: list[int] = []

    @property
    def num_accepted_tokens(self) -> int:
        return sum(n * count for n, count in enumerate(self.accepted_counts))

    @property
    def accepted_per_position(self) -> list[int]:
        """How often the draft at position 1, 2, ... k was accepted."""
        return [sum(self.accepted_counts[i:]) for i in range(1, len(self.accepted_counts))]

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over proposed ones."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Accept length: what one verified step yields, the bonus token included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def describe(self) -> str:
        """One line for a log."""
        if not self.num_drafts:
            return "no drafts verified"
        positions = " / ".join(f"{n / self.num_drafts:.1%}" for n in self.accepted_per_position)
        return (
            f"{self.tokens_per_forward:.2f} tokens per forward, acceptance "
            f"{self.acceptance_rate:.1%}, per position {positions}, "
            f"distribution over 0..k {self.accepted_counts}"
        )

    def since(self, earlier: SpecDecodeStats) -> SpecDecodeStats:
        """What was counted after `earlier`."""
        before = earlier.accepted_counts or [0] * len(self.accepted_counts)
        return SpecDecodeStats(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            accepted_counts=[a - b for a, b in zip(self.accepted_counts, before, strict=True)],
        )


class SpecDecodeCounter:
    """Counts verifications, and warns when a drafter keeps losing."""

    def __init__(self, num_speculative_tokens: int = 0, *, warns: bool = True) -> None:
        self._accepted_counts = [0] * (num_speculative_tokens + 1)
        self._num_draft_tokens = 0
        self._warns = warns
        self._window_start = SpecDecodeStats()

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """One sequence in one step; steps without drafts do not count."""
        if num_drafts == 0:
            return
        missing = num_drafts + 1 - len(self._accepted_counts)
        self._accepted_counts += [0] * missing
        self._accepted_counts[num_accepted] += 1
        self._num_draft_tokens += num_drafts
        if self._warns:
            self._check_losing()

    def snapshot(self) -> SpecDecodeStats | None:
        """The totals so far; None where no draft can have been verified."""
        if len(self._accepted_counts) == 1:
            return None
        return SpecDecodeStats(
            num_drafts=sum(self._accepted_counts),
            num_draft_tokens=self._num_draft_tokens,
            accepted_counts=list(self._accepted_counts),
        )

    def _check_losing(self) -> None:
        if sum(self._accepted_counts) - self._window_start.num_drafts < _LOSING_WINDOW:
            return
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
