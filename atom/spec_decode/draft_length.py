"""What chooses numbers of drafts: asked by the drafter, told what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Candidates(msgspec.Struct, frozen=True):
    """Drafts that were made for a sequence.

    Attributes:
        source: of the drafts, also when it made none.
        confidences: how sure it is of each, as a probability if those before are right.
    """

    source: str
    confidences: Sequence[float]


class Verification(msgspec.Struct, frozen=True):
    """The result of verifying one sequence's drafts.

    Attributes:
        source: source of the drafts, also when it made none; None after a step that proposed none.
        confidences: of each verified draft.
        num_accepted: of them.
    """

    source: str | None
    confidences: Sequence[float]
    num_accepted: int


class Choice(msgspec.Struct, frozen=True):
    """What was chosen for a step, from which its other calls go on.

    Attributes:
        asked: drafts to make for each sampled sequence.
        made: those of them that the draft model makes.
        verified: how many of them the next step verifies of each sequence, if that is chosen
            already: where steps overlap, and where all are; None if `cut` chooses.
        is_try: all drafts are verified.
        rate: expected tokens per second of what is best; None before times are known.
        is_watched: `observe` learns from the step.
    """

    asked: int
    made: int
    verified: int | None = None
    is_try: bool = False
    rate: float | None = None
    is_watched: bool = True


class DraftLength(Protocol):
    """Chooses how many drafts are made for all sequences of a step, and which are verified.

    Each step that samples and is not at rest calls `choose`, `cut`, then `observe`, if it is
    watched: when it chooses, the acceptance of the drafts that it verifies is not known yet. Where
    steps overlap, the next one chooses before this one cuts.
    """

    def choose(self, sources: Sequence[str], *, drafts: bool) -> Choice:
        """The number of drafts to make in this step for each sampled sequence.

        Args:
            sources: of each sequence's drafts; at least one.
            drafts: whether the draft model makes drafts, rather than only writing its KV.
        """
        ...

    def cut(self, choice: Choice, made: Sequence[Candidates]) -> list[int]:
        """How many of each sequence's drafts to verify, the first ones.

        Args:
            choice: of the step that made them.
        """
        ...

    def observe(
        self, choice: Choice, verifications: Sequence[Verification], seconds: float | None
    ) -> None:
        """Learn from a finished step.

        Args:
            choice: the step's own.
            verifications: of its sampled sequences, for the drafts made in the step before.
            seconds: time of the whole step, drafting included; None when it also computed prompts.
        """
        ...

    def rest(self, num_sequences: int, seconds: Sequence[float | None]) -> None:
        """Learn from finished steps that verified and made no drafts, and did not ask.

        Args:
            seconds: of each, as for `observe`.
        """
        ...


class DraftNumbers(msgspec.Struct, frozen=True):
    """How many drafts a step makes.

    Attributes:
        most: of a sequence, whatever their source.
        made: of a sampled sequence, by the proposer.
        choice: where numbers are adaptive; else None.
    """

    most: int = 0
    made: int = 0
    choice: Choice | None = None

    @property
    def carried(self) -> int:
        """Drafts of each sequence that a step verifies which is launched before they are known."""
        chosen = None if self.choice is None else self.choice.verified
        return self.made if chosen is None else min(self.made, chosen)
