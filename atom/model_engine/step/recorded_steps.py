"""Steps that recur, as programs on a CPU.

A step that decodes and whose tokens are chosen from tensors alone is one program. Where the host
has a say in the choice, the target's layers and the logits are one, and tokens are chosen op by op
behind it. What the proposer does behind either is another. Of prompts the target's layers are one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from atom.batch import ScheduledSequence, StepParts
from atom.graphs.recorded import Recordable, Recording, StepRecorder
from atom.graphs.recorded_forward import RecordedForward
from atom.graphs.runner import ForwardOp
from atom.graphs.staging import Arriving
from atom.model_engine.step.input_buffers import StepInput
from atom.model_engine.step.step_runner import ComputedStep, ProposeOp, StepRunner, TargetStep
from atom.model_ops.kernels.native.bindings import between_kernels
from atom.sampling.sampler import Sampler, Verified
from atom.spec_decode.proposers.base import Guide, Proposal, Proposer, VerifiedStep

# Among the recordings of a step's inputs, which otherwise have whether it is at rest.
_LAYERS = "layers"


class _RecordedGuide:
    """A guide that asks another one in each replay.

    Attributes:
        guide: that of the step that runs, if it has one.
    """

    guide: Guide | None = None

    def restrict(self, logits: torch.Tensor, target_ids: torch.Tensor | None) -> None:
        between_kernels(lambda: self._known().restrict(logits, target_ids), logits)

    def take(self, token_ids: torch.Tensor) -> None:
        between_kernels(lambda: self._known().take(token_ids), token_ids)

    def _known(self) -> Guide:
        assert self.guide is not None
        return self.guide


class RecordedSteps(StepRunner):
    """Replays steps that recur, and what the proposer does behind them."""

    def __init__(
        self, recorder: StepRecorder, forward: ForwardOp, sampler: Sampler, proposer: Proposer
    ) -> None:
        super().__init__(forward, sampler, proposer)
        self._recorder = recorder
        self._prompts = RecordedForward(forward, recorder)
        self._guide = _RecordedGuide()

    def run(
        self,
        sequences: Sequence[ScheduledSequence],
        step: StepInput,
        num_drafts: int | None,
    ) -> ComputedStep:
        recorder = self._recorder
        if not step.is_replayable:
            target = self._compute(step, self._prompts)
            parts = StepParts(self._prompts.was_replayed)
            return target.computed(sequences, step, self._propose, parts)
        if step.samples_on_device:
            rests = num_drafts == 0 and step.next_token_ids is not None
            target = recorder.run(step.recordings, rests, lambda: self._whole(step, rests=rests))
        else:
            target = self._in_parts(step)
        replayed = recorder.was_replayed
        sample, drafts = replayed and target.logits is None, replayed if target.is_drafted else None
        propose: ProposeOp = self._propose
        # What a proposer without a network does is the host's, in every step.
        if recorder.has_program and self._proposer.draft_model is not None:
            propose = partial(self._propose_recorded, target.recordings)
        return target.computed(sequences, step, propose, StepParts(replayed, sample, drafts))

    def send_to_host(self, *results: Proposal | Verified | None) -> Arriving:
        """They are read in place."""
        known = [result for result in results if result is not None]
        return lambda: [array for result in known for array in result.arrays]

    def without_draft_replay(self) -> StepRunner:
        return StepRunner(self._forward, self._sampler, self._proposer)

    def release(self) -> None:
        self._recorder.release()
        self._prompts.release()

    def took_usual_time(self) -> bool:
        return self._recorder.take_usual()

    def _propose(
        self, view: VerifiedStep, num_drafts: int, guide: Guide | None
    ) -> tuple[Proposal, bool]:
        # The layout may be that of steps to come, too, with other lengths.
        return super()._propose(_with_own_metadata(view), num_drafts, guide)

    def _propose_recorded(
        self,
        recordings: dict[Hashable, Recording[Any]],
        view: VerifiedStep,
        num_drafts: int,
        guide: Guide | None,
    ) -> tuple[Proposal, bool]:
        """What the proposer makes of a step whose tensors other steps have, too."""
        name = "drafting" if num_drafts else "writing the draft's cache"
        key: Hashable = num_drafts
        if guide is not None:
            self._guide.guide = guide
            view = replace(view, guide=self._guide)
            name, key = f"{name} within grammars", ("within grammars", num_drafts)

        def work() -> Recordable[Proposal]:
            return Recordable(
                name,
                num_drafts,
                view.tensors,
                lambda: self._proposer.propose(_with_own_metadata(view), num_drafts),
                lambda proposal: proposal.tensors,
            )

        try:
            proposal = self._recorder.run(recordings, key, work)
        finally:
            self._guide.guide = None
        return proposal, self._recorder.was_replayed

    def _whole(self, step: StepInput, *, rests: bool) -> Recordable[TargetStep]:
        """The target's part of a step, and all of one at rest."""
        plan, model_input = step.sample, step.model_input

        def run() -> TargetStep:
            target = self._compute(_with_unknown_lengths(step))
            view = target.computed([], step, self._propose, StepParts()).view if rests else None
            if view is not None:
                self._proposer.propose(_with_own_metadata(view), 0)
            return replace(target, is_drafted=view is not None)

        return Recordable(
            f"a step{'' if plan.is_greedy else ' that samples'}{' at rest' if rests else ''}",
            (plan.needs, model_input.attention.max_seqlen_q),
            (*_inputs(step), *plan.tensors),
            run,
            lambda target: target.tensors,
            in_parts=lambda: self._in_parts(step),
        )

    def _in_parts(self, step: StepInput) -> TargetStep:
        target = self._recorder.run(step.recordings, _LAYERS, lambda: self._layers(step))
        verified, last_rows = self._choose(step, target.output, target.logits)
        if target.last_rows is not None and last_rows is not None:
            target.last_rows.copy_(last_rows)
        return replace(target, verified=verified)

    def _layers(self, step: StepInput) -> Recordable[TargetStep]:
        """All of the target's part but for the choice of tokens."""
        plan, is_sampled = step.sample, step.draft_sampling_rows is not None
        return Recordable(
            "a step up to its logits",
            (plan.filters if is_sampled else None, step.model_input.attention.max_seqlen_q),
            (*_inputs(step), plan.logits_indices),
            lambda: self._compute_layers(_with_unknown_lengths(step)),
            lambda target: target.tensors,
            lambda target: [target.logits] if target.logits is not None else [],
        )

    def _compute_layers(self, step: StepInput) -> TargetStep:
        """The target's part up to its logits; `last_rows` are written behind them."""
        plan, last_rows = step.sample, None
        output = self._forward(step.model_input)
        logits = self._sampler.logits(plan, output)
        if step.next_token_ids is not None:
            last_rows = plan.logits_indices.new_empty(len(plan.states))
        draft_sampling = self._sampler.draft_sampling(plan, step.draft_sampling_rows)
        return TargetStep(output, None, last_rows, draft_sampling, logits)


def _inputs(step: StepInput) -> tuple[torch.Tensor | None, ...]:
    """What is read whatever the choice of tokens is."""
    return *step.model_input.tensors, step.next_token_ids, step.draft_sampling_rows


def _with_unknown_lengths(step: StepInput) -> StepInput:
    """The step as ops must take it where lengths differ between replays."""
    metadata = replace(step.model_input.attention, context_lens_cpu=None)
    return replace(step, model_input=replace(step.model_input, attention=metadata))


def _with_own_metadata(view: VerifiedStep) -> VerifiedStep:
    """The step with nothing derived from its lengths yet, and what will be not kept with it."""
    model_input = view.model_input
    attention = replace(model_input.attention)
    return replace(view, model_input=replace(model_input, attention=attention))
