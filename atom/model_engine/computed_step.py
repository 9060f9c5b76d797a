"""A step without its drafts, computed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from atom.batch import ScheduledSequence
from atom.graphs.recorded import Recording
from atom.model_engine.input_builder import StepInput
from atom.model_ops.metadata import ModelOutput, SamplingMetadata
from atom.sampling.sampler import Verified
from atom.spec_decode.base import DraftKey, VerifiedStep


@dataclass(frozen=True)
class ComputedStep:
    """Attributes:
    last_rows, race: as in `VerifiedStep`; None when the proposer reads no steps.
    by_graph: whether a graph, or the program of the whole step, chose the tokens.
    drafting: the graph of the drafts, if there is one.
    is_drafted: whether the proposer has done its part, without drafts.
    recordings: of the proposer's work on it, by the number of drafts.
    """

    output: ModelOutput
    verified: Verified
    last_rows: torch.Tensor | None
    race: SamplingMetadata | None
    by_graph: bool = False
    drafting: DraftKey | None = None
    is_drafted: bool = False
    recordings: dict[Hashable, Recording[Any]] = field(default_factory=dict, repr=False)

    @property
    def tensors(self) -> list[torch.Tensor]:
        options = () if self.race is None else self.race.tensors
        states = [self.output.hidden_states, *self.output.aux_hidden_states]
        kept = [t for t in (self.last_rows, *options) if t is not None]
        return [*states, self.verified.sampled, *self.verified.tensors, *kept]

    def view(
        self, sequences: Sequence[ScheduledSequence], step: StepInput, *, recurs: bool
    ) -> VerifiedStep | None:
        """What the proposer reads of it; None if it reads no steps.

        Args:
            recurs: whether other steps have these tensors.
        """
        if step.next_token_ids is None:
            return None
        assert self.last_rows is not None
        return VerifiedStep(
            sequences,
            step.model_input,
            self.output,
            step.next_token_ids,
            self.last_rows,
            step.sampled,
            self.race,
            recurs,
            self.is_drafted,
            self.drafting,
            recordings=self.recordings,
        )
