"""Runs the device's part of a step: the target's layers, the choice of tokens, and the drafts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from atom.batch import ScheduledSequence, StepParts
from atom.graphs.recorded import Recording
from atom.graphs.runner import ForwardOp
from atom.graphs.staging import Arriving, send_to_host
from atom.kv_cache.memory import PeakOf, peak_bytes
from atom.model_engine.step.input_buffers import StepInput
from atom.model_ops.attention.metadata import ModelInput, ModelOutput, SamplingMetadata
from atom.sampling.sampler import Sampler, Verified
from atom.spec_decode.proposers.base import Guide, Proposal, Proposer, VerifiedStep

# (step, number of drafts, guide) -> the drafts, and whether their work was replayed
ProposeOp = Callable[[VerifiedStep, int, Guide | None], tuple[Proposal, bool]]


@dataclass(frozen=True)
class TargetStep:
    """What the target's part of a step leaves on the device.

    Attributes:
        verified: None before the tokens are chosen.
        last_rows, draft_sampling: as in `VerifiedStep`; None when the proposer reads no steps.
        logits: [R, V] float32, from which the tokens are chosen behind a program, until other work
            is replayed; else None.
        is_drafted: whether the proposer has done its part, without drafts.
        recordings: of the proposer's work behind it, by the number of drafts.
    """

    output: ModelOutput
    verified: Verified | None
    last_rows: torch.Tensor | None
    draft_sampling: SamplingMetadata | None
    logits: torch.Tensor | None = None
    is_drafted: bool = False
    recordings: dict[Hashable, Recording[Any]] = field(default_factory=dict, repr=False)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All but the logits."""
        options = () if self.draft_sampling is None else self.draft_sampling.tensors
        states = [self.output.hidden_states, *self.output.aux_hidden_states]
        kept = [t for t in (self.last_rows, *options) if t is not None]
        chosen = [] if self.verified is None else [self.verified.sampled, *self.verified.tensors]
        return [*states, *chosen, *kept]

    def computed(
        self,
        sequences: Sequence[ScheduledSequence],
        step: StepInput,
        propose: ProposeOp,
        parts: StepParts,
    ) -> ComputedStep:
        """The step once its tokens are chosen; its drafts are left to do, if there are any."""
        assert self.verified is not None
        if step.next_token_ids is None or self.is_drafted:
            return ComputedStep(self.verified, None, propose, parts)
        assert self.last_rows is not None
        view = VerifiedStep(
            sequences,
            step.model_input,
            self.output,
            step.next_token_ids,
            self.last_rows,
            step.sampled,
            self.draft_sampling,
        )
        return ComputedStep(self.verified, view, propose, parts)


@dataclass(frozen=True)
class ComputedStep:
    """A step whose tokens are chosen, on the device; its drafts can follow.

    Attributes:
        view: what the proposer reads; None if it has nothing to do.
        propose: makes the drafts of all sampled sequences.
        parts: which parts were replayed.
    """

    verified: Verified
    view: VerifiedStep | None
    propose: ProposeOp
    parts: StepParts

    def draft(
        self, num_drafts: int, guide: Guide | None = None
    ) -> tuple[Proposal | None, StepParts]:
        """The drafts, if there are any, and which parts of the whole step were replayed."""
        if self.view is None:
            return None, self.parts
        proposal, replayed = self.propose(self.view, num_drafts, guide)
        return proposal, msgspec.structs.replace(self.parts, drafts=replayed)


class StepRunner:
    """Runs steps op by op. Those that replay some of them derive from it.

    Args:
        forward: the target's layers.
    """

    def __init__(self, forward: ForwardOp, sampler: Sampler, proposer: Proposer) -> None:
        self._forward = forward
        self._sampler = sampler
        self._proposer = proposer

    def run(
        self,
        sequences: Sequence[ScheduledSequence],
        step: StepInput,
        num_drafts: int | None,
    ) -> ComputedStep:
        """Run the target and choose the tokens.

        Args:
            num_drafts: that will follow; None where that is decided once the tokens are known.
        """
        return self._compute(step).computed(sequences, step, self._propose, StepParts())

    def run_padding(self, row: ModelInput, num_drafts: int) -> None:
        """Compute a row of padding and drafts after it, which other ranks wait for."""
        output = self._forward(row)
        if num_drafts:
            first = torch.zeros_like(row.input_ids)
            padding = VerifiedStep([], row, output, first, first, None)
            self._proposer.propose(padding, num_drafts)

    def send_to_host(self, *results: Proposal | Verified | None) -> Arriving:
        """Start to copy the tensors of these to the host."""
        return send_to_host([t for result in results if result is not None for t in result.tensors])

    def without_draft_replay(self) -> StepRunner:
        """One that replays none of the proposer's work, to try all of its ops."""
        return self

    @property
    def num_graphs(self) -> tuple[int, int, int]:
        """Of the target's layers, of choices of tokens, and of drafts."""
        return 0, 0, 0

    def estimate_graph_bytes(self, peak_of: PeakOf = peak_bytes) -> int:
        """Memory that `capture` will need.

        Args:
            peak_of: as for `kv_cache.memory.estimate_graph_bytes`.
        """
        return 0

    def capture(self) -> None:
        """Capture what is replayed from the start. The KV cache must be bound and must not move."""

    def release(self) -> None:
        """Drop all that is replayed."""

    def took_usual_time(self) -> bool:
        """Whether all work since the last call took the time that it will take again."""
        return True

    def _compute(self, step: StepInput, forward: ForwardOp | None = None) -> TargetStep:
        """The target's part, op by op, but for what another `forward` does."""
        output = (forward or self._forward)(step.model_input)
        verified, last_rows = self._choose(step, output)
        return TargetStep(
            output,
            verified,
            last_rows,
            self._sampler.draft_sampling(step.sample, step.draft_sampling_rows),
        )

    def _choose(
        self, step: StepInput, output: ModelOutput, logits: torch.Tensor | None = None
    ) -> tuple[Verified, torch.Tensor | None]:
        """The tokens, and `last_rows` where the proposer reads steps."""
        verified = self._sampler.sample(step.sample, output, logits)
        if step.next_token_ids is None:
            return verified, None
        return verified, self._sampler.place(step.sample, verified, step.next_token_ids)

    def _propose(
        self, view: VerifiedStep, num_drafts: int, guide: Guide | None
    ) -> tuple[Proposal, bool]:
        if guide is not None:
            view = replace(view, guide=guide)
        return self._proposer.propose(view, num_drafts), False
