"""What a proposer does in steps that recur, as programs on a CPU."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from atom.graphs.recorded import StepRecorder, Work
from atom.model_ops.kernels.native.bindings import between_kernels
from atom.spec_decode.base import Guide, Proposal, Proposer, VerifiedStep


class RecordedGuide:
    """A guide that asks another one in each replay.

    Attributes:
        own: the guide of the step that runs, if it has one.
    """

    own: Guide | None = None

    def restrict(self, logits: torch.Tensor, target_ids: torch.Tensor | None) -> None:
        between_kernels(lambda: self._guide().restrict(logits, target_ids), logits)

    def take(self, token_ids: torch.Tensor) -> None:
        between_kernels(lambda: self._guide().take(token_ids), token_ids)

    def _guide(self) -> Guide:
        assert self.own is not None
        return self.own


class RecordedDrafts:
    """Replays the proposer's work."""

    def __init__(self, recorder: StepRecorder, proposer: Proposer) -> None:
        self._recorder = recorder
        self._proposer = proposer
        self._guide = RecordedGuide()

    @property
    def was_replayed(self) -> bool:
        """Whether the last work was."""
        return self._recorder.was_replayed

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        """What the proposer makes of a step that recurs."""
        which: Hashable = num_drafts
        if step.guide is not None:
            self._guide.own = step.guide
            step, which = replace(step, guide=self._guide), ("within grammars", num_drafts)
        try:
            return self._recorder.run(step.recordings, which, lambda: self._work(step, num_drafts))
        finally:
            self._guide.own = None

    def _work(self, step: VerifiedStep, num_drafts: int) -> Work[Proposal]:
        name = "drafting" if num_drafts else "writing the draft's cache"
        return Work(
            name if step.guide is None else f"{name} within grammars",
            num_drafts,
            step.tensors,
            lambda: self._proposer.propose(with_own_metadata(step), num_drafts),
            lambda proposal: proposal.tensors,
        )


def with_own_metadata(step: VerifiedStep) -> VerifiedStep:
    """The step with nothing derived from its lengths yet, and what will be not kept with it."""
    given = step.model_input
    own = replace(given, attention=replace(given.attention))
    return replace(step, model_input=own)
