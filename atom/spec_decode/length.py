"""How many drafts each step asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from atom.spec_decode.base import Verification


class DraftLength(Protocol):
    """Chooses one number of drafts for all sequences of a step.

    The calls of a step come in this order: `observe_step`, `choose`, `observe_drafting`.
    """

    def observe_step(self, verifications: Sequence[Verification], seconds: float | None) -> None:
        """The drafts that were asked for last have been verified.

        Args:
            verifications: of the sampled sequences.
            seconds: what the step took until its tokens were on the host; None when it computed
                prompts too.
        """
        ...

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        """How many drafts to ask each sequence's source for.

        Args:
            sources: by sequence, one or more.
            drafts: whether the draft has to run for any of them.
        """
        ...

    def observe_drafting(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """What the draft took for `num_drafts` each; with 0 it completed its KV at most."""
        ...


class FixedLength:
    """The same number at every step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def observe_step(self, verifications: Sequence[Verification], seconds: float | None) -> None:
        """Nothing is learnt."""

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        return self._num_drafts

    def observe_drafting(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Nothing is learnt."""
