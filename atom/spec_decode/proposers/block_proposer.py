"""Blocks of drafts: a small model makes all of them in one pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch

from atom.model_ops.attention.metadata import ModelInput
from atom.models.block_draft.heads import PathHead
from atom.spec_decode.proposers.base import (
    Chosen,
    DraftModel,
    ModelProposer,
    Proposal,
    VerifiedStep,
    together,
)

# (step, first token of each sampled sequence [S], number of rows) -> the rows behind their newest
# ones: that token, and masks after it, [S * rows]
PlaceRows = Callable[[VerifiedStep, torch.Tensor, int], ModelInput]


def by_draft(states: torch.Tensor, count: int) -> torch.Tensor:
    """[S * rows, hidden] of S = `count` sequences -> [rows, S, hidden]."""
    return states.view(count, -1, states.shape[-1]).transpose(0, 1).contiguous()


class BlockModel(DraftModel):
    """A draft model of blocks.

    Attributes:
        path: chooses along the block.
    """

    path: PathHead = PathHead()

    @abstractmethod
    def write_kv(self, step: VerifiedStep) -> None:
        """Write the draft's KV of all rows of the step."""

    @abstractmethod
    def compute_states(self, step: VerifiedStep, place: PlaceRows, num_drafts: int) -> torch.Tensor:
        """Write the KV, and compute the states that drafts are made from, [drafts, S, hidden]."""

    def confidence(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """[S] float32 of drafts from states [S, hidden]; None if the choice knows better."""
        return None


class BlockProposer(ModelProposer[BlockModel]):
    """Proposes drafts that come from one pass.

    Every step writes the draft's keys and values of all tokens that the target just computed. The
    pass goes over rows behind the newest token; what they write is overwritten before it is read as
    a token's.
    """

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        model, count = self._model, len(step.last_rows)
        if num_drafts == 0 or not count:
            model.write_kv(step)
            return Proposal.empty(step, num_drafts)
        states = model.compute_states(step, self._place_rows, num_drafts)
        is_greedy = step.draft_sampling is None and step.guide is None
        if is_greedy and not self._choice.confident and not model.path.walks:
            # No logits, which every rank would need all of.
            greedy = model.choose_tokens(states.flatten(0, 1))
            return Proposal(greedy.view(num_drafts, count).t().contiguous())
        return self._walk(step, states)

    def _place_rows(self, step: VerifiedStep, token_ids: torch.Tensor, num_rows: int) -> ModelInput:
        """As `PlaceRows`; rows without a slot, near a sequence's end, are seen by none."""
        positions = step.model_input.positions[step.last_rows]
        newest = self._newest_rows(step, positions, num_rows)
        return self._rows_behind(newest, token_ids, 1, num_rows)

    def _walk(self, step: VerifiedStep, states: torch.Tensor) -> Proposal:
        """One draft after the other, from states [drafts, S, hidden]."""
        model, choice, guide = self._model, self._choice, step.guide
        positions = step.model_input.positions[step.last_rows]
        logits = model.compute_logits(states.flatten(0, 1)).view(*states.shape[:2], -1)
        previous, carried = step.next_token_ids[step.last_rows], model.path.begin(states[0])
        drafts: list[Chosen] = []
        for i in range(len(states)):
            row = logits[i]
            if guide is not None:
                # Before the path, which may look at the best tokens alone.
                guide.restrict(row, choice.token_ids)
            scores, carried = model.path.score(row, states[i], previous, carried)
            chosen = choice.choose(scores, step.draft_sampling, positions, ahead=2 + i)
            if guide is not None:
                guide.take(chosen.token_ids)
            if choice.confident:
                confidence = model.confidence(states[i], previous)
                if confidence is not None:
                    chosen = replace(chosen, confidences=confidence)
            drafts.append(chosen)
            previous = chosen.token_ids
        return together(drafts)
