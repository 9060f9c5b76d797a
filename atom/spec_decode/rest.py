"""Steps without drafts that take as little of the host as they can."""

from __future__ import annotations

from atom.batch import ScheduledBatch

# Steps at rest, one after the other.
_MOST = 31


class Rest:
    """Steps in which nothing is looked up, chosen or learnt, since no drafts paid lately.

    They are the more the more often none did. They end where the number of sequences changes or a
    sequence starts, and there are none until that has been sampled.

    Attributes:
        is_on: in this step.
        num_sequences: of the last step that had any.
    """

    def __init__(self) -> None:
        self.is_on, self.num_sequences = False, 0
        self._left = self._last = 0
        self._seconds: list[float | None] = []
        # Rows of sequences that have started and not been sampled yet.
        self._starting: set[int] = set()

    def is_awaited(self, batch: ScheduledBatch) -> bool:
        """Whether a sequence starts in a step, or has not been sampled before it."""
        starting = self._starting
        starting.difference_update(batch.freed_rows)
        starting.update([each.row for each in batch.new])
        if not starting:
            return False
        starting.difference_update([s.row for s in batch.sequences if s.wants_sample])
        return True

    def begin(self, num_sequences: int, *, starts: bool) -> None:
        """A step begins.

        Args:
            num_sequences: that it samples and that want drafts.
            starts: whether a sequence does, or has not been sampled before.
        """
        if num_sequences and num_sequences != self.num_sequences:
            self.num_sequences, self._last = num_sequences, 0
            self._seconds.clear()
            starts = True
        if starts:
            self._left = 0
        self.is_on = num_sequences > 0 and self._left > 0
        self._left -= self.is_on

    def chosen(self, num_drafts: int) -> None:
        """So many drafts were asked for in a step that was not at rest."""
        self._left = self._last = 0 if num_drafts else min(2 * self._last + 1, _MOST)

    def ended(self, seconds: float | None) -> None:
        """A step at rest took so long; None if another like it would take another time."""
        self._seconds.append(seconds)

    def take(self) -> list[float | None]:
        """What the steps took that were at rest since the last call, with as many sequences."""
        seconds, self._seconds = self._seconds, []
        return seconds
