"""The sequences of failed steps, which run apart until it is known which of them fail."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

from atom.model_engine.sequence import Sequence


class Suspects:
    """Groups of sequences; only those of the first group run, and nobody beside them.

    Each half of a failed batch is a group. A group that fails is halved again, until the sequence
    that fails is alone.

    Attributes:
        groups: by id, the one that runs first; read-only for callers.
    """

    def __init__(self) -> None:
        self.groups: list[dict[str, Sequence]] = []

    def __contains__(self, seq: Sequence) -> bool:
        return any(seq.request.id in group for group in self.groups)

    def add(self, failed: Many[Sequence], *, one_by_one: bool) -> None:
        """Take the sequences of a batch that failed; they run before all other groups."""
        for seq in failed:
            self.discard(seq.request.id)
        size = 1 if one_by_one else max((len(failed) + 1) // 2, 1)
        self.groups[:0] = list(_parts(failed, size))

    def discard(self, id: str) -> None:
        """Clear a sequence of suspicion, or forget one that has ended."""
        if not self.groups:
            return
        for group in self.groups:
            group.pop(id, None)
        self.groups = [group for group in self.groups if group]


def _parts(sequences: Many[Sequence], size: int) -> Iterator[dict[str, Sequence]]:
    for start in range(0, len(sequences), size):
        yield {seq.request.id: seq for seq in sequences[start : start + size]}
