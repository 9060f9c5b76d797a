"""A sequence's parts of steps whose results are not known yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from atom.batch import ScheduledSequence


@dataclass(slots=True)
class LaunchedParts:
    """Oldest first.

    Attributes:
        num_tokens: that they compute, drafts included.
        num_sampled: tokens that they bring if all their drafts are accepted.
        is_sampling: whether the newest samples a token.
    """

    num_tokens: int = 0
    num_sampled: int = 0
    is_sampling: bool = False
    _parts: list[ScheduledSequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, part: ScheduledSequence) -> None:
        self._parts.append(part)
        self.num_tokens += len(part.token_ids)
        self.num_sampled += _sampled(part)
        self.is_sampling = part.wants_sample

    def end_oldest(self) -> None:
        """Its results are known."""
        part = self._parts.pop(0)
        self.num_tokens -= len(part.token_ids)
        self.num_sampled -= _sampled(part)
        self.is_sampling = self.is_sampling and bool(self._parts)

    def clear(self) -> None:
        self._parts.clear()
        self.num_tokens = self.num_sampled = 0
        self.is_sampling = False


def _sampled(part: ScheduledSequence) -> int:
    return part.num_drafts + 1 if part.wants_sample else 0
