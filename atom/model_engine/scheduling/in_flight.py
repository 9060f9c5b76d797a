"""The batches whose results are not known yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from atom.batch import LaunchedStep, ScheduledBatch
from atom.model_engine.sequence import Sequence, SequenceStatus

# One that runs, and one that is launched behind it.
MOST_IN_FLIGHT = 2
# One in so many tokens may be lost.
_LOSES_ONE_OF = 6


class InFlight:
    """Scheduled batches in order, with their sequences as objects: by the time the results arrive,
    an id may belong to another sequence.

    A sequence that ends meanwhile keeps its blocks and its row until no batch computes it.

    Attributes:
        batches: the oldest first; read-only for callers.
    """

    def __init__(self) -> None:
        self.batches: deque[tuple[ScheduledBatch, list[Sequence]]] = deque()

    @property
    def ended(self) -> Iterator[Sequence]:
        """The sequences that have ended, each once."""
        met = {seq.order: seq for _, sequences in self.batches for seq in sequences}
        return (seq for seq in met.values() if seq.status is SequenceStatus.FINISHED)

    def can_be_followed(self, drafts: bool) -> bool:
        """Whether the next step pays without the results of the newest batch.

        Sequences that must wait for them run in every other step then, which is half a token less,
        and others may lose tokens since their drafts are looked up late. Not to overlap costs
        h / (1 + h) of the time, if the host works for a share h of the device's time: a sixth where
        that is 1/5.

        Args:
            drafts: whether steps verify drafts.
        """
        newest = self.batches[-1][1] if self.batches else []
        lost = sum(0.5 if seq.must_wait(drafts) else seq.tokens_lost_by_overlap for seq in newest)
        return _LOSES_ONE_OF * lost <= len(newest)

    def check_room(self, before: LaunchedStep | None) -> None:
        """Check that a batch may follow those in flight.

        Args:
            before: the newest batch's step.

        Raises:
            RuntimeError: when as many batches as may be are in flight, or `before` is missing.
        """
        count = len(self.batches)
        if count >= MOST_IN_FLIGHT or (count and before is None):
            raise RuntimeError(
                f"schedule() was called again before update() of the last batch: {count} are in "
                f"flight"
            )

    def add(self, batch: ScheduledBatch, sequences: list[Sequence]) -> None:
        self.batches.append((batch, sequences))

    def take(self, batch: ScheduledBatch) -> list[Sequence]:
        """The sequences of the oldest batch, whose results have arrived; none if it is another."""
        if not self.batches or self.batches[0][0] is not batch:
            return []
        sequences = self.batches.popleft()[1]
        for seq in sequences:
            seq.launched.end_oldest()
        return sequences

    def take_back(self, failed: ScheduledBatch) -> tuple[list[Sequence], list[Sequence], list[int]]:
        """Forget all batches -> the failed one's running sequences, those that have ended, and the
        rows that all batches freed.

        Raises:
            RuntimeError: when others are in flight, but not the one that failed.
        """
        batches = self.batches
        if batches and failed.sequences and not any(b is failed for b, _ in batches):
            raise RuntimeError("give_back() got another batch than one that runs")
        freed = [row for batch, _ in batches for row in batch.freed_rows]
        if not failed.sequences:
            freed += failed.freed_rows
        ended = list(self.ended)
        blamed = [seq for batch, own in batches if batch is failed for seq in own]
        for _, sequences in batches:
            for seq in sequences:
                seq.launched.clear()
        batches.clear()
        return [s for s in blamed if s.status is SequenceStatus.RUNNING], ended, freed
