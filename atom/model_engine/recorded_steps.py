"""Steps that recur, as programs on a CPU.

A step whose tokens are chosen from tensors alone is one program. Where the host has a say in the
choice, the target's layers and the logits are one, and tokens are chosen op by op behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from atom.batch import ScheduledSequence
from atom.graphs.recorded import Recording, StepRecorder, Work
from atom.graphs.runner import ForwardRunner
from atom.model_engine.computed_step import ComputedStep
from atom.model_engine.input_builder import StepInput
from atom.model_ops.metadata import ModelOutput, SamplingMetadata
from atom.sampling.decode_rows import kind_of
from atom.sampling.sampler import Sampler
from atom.spec_decode.draft_length import DraftNumbers
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.recorded_drafts import with_own_metadata

# Among the recordings of a step's inputs, which otherwise have whether it is at rest.
_LAYERS = "layers"


@dataclass(frozen=True)
class ComputedLayers:
    """A step before its tokens are chosen.

    Attributes:
        logits: [R, V] float32, until other work is replayed.
        last_rows: [S] int64, as in `VerifiedStep`, written once the tokens are chosen; None when
            the proposer reads no steps.
        race: as in `VerifiedStep`.
        recordings: of the proposer's work behind it, by the number of drafts.
    """

    output: ModelOutput
    logits: torch.Tensor
    last_rows: torch.Tensor | None
    race: SamplingMetadata | None
    recordings: dict[Hashable, Recording[Any]] = field(default_factory=dict, repr=False)

    @property
    def kept(self) -> list[torch.Tensor]:
        """All tensors but the logits."""
        options = () if self.race is None else self.race.tensors
        states = [self.output.hidden_states, *self.output.aux_hidden_states]
        return [*states, *(t for t in (self.last_rows, *options) if t is not None)]


class RecordedSteps:
    """Runs steps that recur.

    Args:
        compute: a step without its drafts, op by op.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        forward: ForwardRunner,
        sampler: Sampler,
        drafter: Drafter,
        compute: Callable[[StepInput, DraftNumbers], ComputedStep],
    ) -> None:
        self._recorder = recorder
        self._forward = forward
        self._sampler = sampler
        self._drafter = drafter
        self._compute = compute

    @property
    def was_replayed(self) -> bool:
        """Whether the last work was."""
        return self._recorder.was_replayed

    def run(
        self, sequences: Sequence[ScheduledSequence], step: StepInput
    ) -> tuple[ComputedStep, bool]:
        """The step without its drafts, and whether others like it have the same tensors."""
        recorder = self._recorder
        if step.is_plain:
            rests = self._drafter.is_at_rest
            done = recorder.run(
                step.recordings, rests, lambda: self._whole(sequences, step, rests=rests)
            )
        else:
            done = self._in_parts(step)
        return done, recorder.has_program

    def _whole(
        self, sequences: Sequence[ScheduledSequence], step: StepInput, *, rests: bool
    ) -> Work[ComputedStep]:
        """The target's part of a step, and all of one at rest."""
        plan, model_input = step.sample, step.model_input

        def run() -> ComputedStep:
            done = self._compute(_with_unknown_lengths(step), DraftNumbers())
            view = done.view(sequences, step, recurs=True) if rests else None
            if view is not None:
                self._drafter.proposer.propose(with_own_metadata(view), 0)
            return replace(done, by_graph=True, is_drafted=view is not None)

        return Work(
            f"a step{'' if plan.is_greedy else ' that samples'}{' at rest' if rests else ''}",
            (plan.needs, model_input.attention.max_seqlen_q),
            (*_inputs(step), *plan.tensors),
            run,
            lambda done: done.tensors,
            in_parts=lambda: self._in_parts(step),
        )

    def _in_parts(self, step: StepInput) -> ComputedStep:
        plan = step.sample
        layers = self._recorder.run(step.recordings, _LAYERS, lambda: self._layers(step))
        verified = self._sampler.sample(plan, layers.output.hidden_states, layers.logits)
        if layers.last_rows is not None and step.next_token_ids is not None:
            layers.last_rows.copy_(self._sampler.place(plan, verified, step.next_token_ids))
        return ComputedStep(
            *(layers.output, verified, layers.last_rows, layers.race),
            recordings=layers.recordings,
        )

    def _layers(self, step: StepInput) -> Work[ComputedLayers]:
        """All of the target's part but for the choice of tokens."""
        plan, races = step.sample, step.race_rows is not None
        return Work(
            "a step up to its logits",
            (kind_of(plan.needs) if races else None, step.model_input.attention.max_seqlen_q),
            (*_inputs(step), plan.logits_indices),
            lambda: self._compute_layers(_with_unknown_lengths(step)),
            lambda layers: layers.kept,
            lambda layers: [layers.logits],
        )

    def _compute_layers(self, step: StepInput) -> ComputedLayers:
        plan, last_rows = step.sample, None
        output = self._forward.run(step.model_input, None)
        logits = self._sampler.logits(plan, output.hidden_states)
        if step.next_token_ids is not None:
            last_rows = plan.logits_indices.new_empty(len(plan.states))
        return ComputedLayers(output, logits, last_rows, self._sampler.race(plan, step.race_rows))


def _inputs(step: StepInput) -> tuple[torch.Tensor | None, ...]:
    """What is read whatever the choice of tokens is."""
    given = step.model_input
    rows = given.input_ids, given.positions, step.next_token_ids, step.race_rows
    return *rows, *given.attention.tensors


def _with_unknown_lengths(step: StepInput) -> StepInput:
    """The step as ops must take it where lengths differ between replays."""
    metadata = replace(step.model_input.attention, context_lens_cpu=None)
    return replace(step, model_input=replace(step.model_input, attention=metadata))
