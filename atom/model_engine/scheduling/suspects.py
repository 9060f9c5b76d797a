"""The sequences of failed steps, which run apart until it is known which of them fail."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Many

from atom.model_engine.sequence import Sequence


class Suspects:
    """Groups of sequences; only those of the first group run, and nobody beside them.

    Each half of a failed batch is a group. A group that fails is halved again, until the sequence
    that fails is alone.
    """

    def __init__(self) -> None:
        self._groups: list[dict[str, Sequence]] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __contains__(self, seq: Sequence) -> bool:
        return any(seq.request.id in group for group in self._groups)

    def first_group(self) -> Collection[Sequence]:
        return self._groups[0].values() if self._groups else ()

    def add(self, failed: Many[Sequence], *, one_by_one: bool) -> None:
        """Take the sequences of a batch that failed; they run before all other groups."""
        for seq in failed:
            self.discard(seq.request.id)
        size = 1 if one_by_one else max((len(failed) + 1) // 2, 1)
        self._groups[:0] = list(_parts(failed, size))

    def discard(self, id: str) -> None:
        """Clear a sequence of suspicion, or forget one that has ended."""
        if not self._groups:
            return
        for group in self._groups:
            group.pop(id, None)
        self._groups = [group for group in self._groups if group]


def _parts(sequences: Many[Sequence], size: int) -> Iterator[dict[str, Sequence]]:
    for start in range(0, len(sequences), size):
        yield {seq.request.id: seq for seq in sequences[start : start + size]}
