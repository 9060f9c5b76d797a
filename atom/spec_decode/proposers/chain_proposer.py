"""Chains of drafts: a small model makes each draft from the one before it. No host sync inside."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch

from atom.model_ops.attention.metadata import (
    DRAFT_CHOICE,
    AttentionMetadata,
    ModelInput,
    ModelOutput,
)
from atom.spec_decode.proposers.base import (
    Chosen,
    DraftModel,
    ModelProposer,
    Proposal,
    VerifiedStep,
    together,
)

# With more rows of a sampled sequence most are a prompt's, of which only the KV is needed.
_ROWS_OF_PROMPTS = 16


class ChainModel(DraftModel):
    """A draft model of a chain.

    If its KV depends on the successor, its row at position t reads token t + 1 beside the target's
    hidden state at t; else it reads token t, and nothing of the target.

    Attributes:
        keeps_pace: whether other ranks may wait for this one's experts: every step then passes all
            its rows, and a chain, whatever they are needed for.
    """

    keeps_pace = False

    @abstractmethod
    def read_target(self, output: ModelOutput) -> torch.Tensor:
        """[T, hidden]: what the first pass reads of the target; [T, 0] if that is nothing."""

    @abstractmethod
    def forward(
        self, index: int, rows: ModelInput, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One causal pass over R rows, which writes the draft's KV.

        Args:
            index: of the drafts that it makes, from 0.
            hidden: [R, hidden], of `read_target` or the last pass.

        Returns:
            States for the output head, and those that the next pass reads, both [R, hidden].
        """

    @abstractmethod
    def write_kv(self, rows: ModelInput, hidden: torch.Tensor) -> None:
        """Write the KV like `forward`, and nothing else where that is possible."""


class ChainProposer(ModelProposer[ChainModel]):
    """Proposes a chain of drafts.

    A first pass over the step's rows writes the draft's KV for all tokens that the target just
    computed. If the draft reads the target's hidden states, the row at position t combines the one
    at t with the token at t + 1, so the newest row yields the first draft; where most rows are a
    prompt's, it is computed by itself, after the KV of all. A draft that reads tokens alone has
    written the KV of all but the newest one, whose step yields the first draft. Each further draft
    is a single-token step; its KV is overwritten by the next step's first pass. With 0 drafts the
    pass only writes KV.

    The target computed a and b at positions 0 and 1, and c was sampled. For drafts x, y and z the
    rows are, as (token, position):

        (b, 0) (c, 1) -> x, (x, 2) -> y, (y, 3) -> z        with the target's hidden states
        (a, 0) (b, 1), (c, 2) -> x, (x, 3) -> y, (y, 4) -> z        of tokens alone
    """

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        model, given, last = self._model, step.model_input, step.last_rows
        reads_target = model.kv_depends_on_successor
        rows = ModelInput(given.input_ids, given.positions, given.attention)
        rows = step.successors if reads_target else rows
        hidden = model.read_target(step.model_output)
        if num_drafts == 0 or not (len(last) or model.keeps_pace):
            model.write_kv(rows, hidden)
            return Proposal.empty(step, num_drafts)
        newest = given.positions[last]
        is_prompt = not model.keeps_pace and len(rows.positions) > _ROWS_OF_PROMPTS * len(last)
        if not reads_target or is_prompt:
            model.write_kv(rows, hidden)
            hidden = hidden[last] if reads_target else hidden[: len(last)]
            return self._extend(step, newest, [], step.next_token_ids[last], hidden, num_drafts)
        states, fed = model.forward(0, rows, hidden)
        newest_states = states[last]
        first = self._choose(step, 0, newest_states, newest)
        hidden = newest_states if fed is states else fed[last]
        choice = given.attention.draft_choice
        choice = None if choice is None else choice.of_queries(last)
        return self._extend(step, newest, [first], first.token_ids, hidden, num_drafts, choice)

    def _extend(
        self,
        step: VerifiedStep,
        newest: torch.Tensor,
        drafts: list[Chosen],
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        num_drafts: int,
        choice: AttentionMetadata | None = None,
    ) -> Proposal:
        """The first drafts, if there are any, and those that follow: a single-token step each.

        Args:
            newest: [S], positions of the sampled sequences' last rows.
            token_ids, hidden: [S] and [S, hidden], which the next step reads.
            choice: the sequences' `AttentionMetadata.draft_choice` in the first pass.
        """
        if len(drafts) == num_drafts:
            return together(drafts)
        if not len(newest):
            # Other ranks may wait for this one's experts.
            step, newest = _padding(step), newest.new_zeros(1)
            token_ids, hidden = token_ids.new_zeros(1), hidden.new_zeros(1, hidden.shape[1])
        # How far behind the newest row the first draft is made.
        lag = 0 if self._model.kv_depends_on_successor else 1
        behind = self._newest_rows(step, newest, num_drafts - 1 + lag)
        for index in range(len(drafts), num_drafts):
            rows = self._rows_behind(behind, token_ids, index + lag, 1)
            rows.attention.leave(DRAFT_CHOICE, choice)
            states, hidden = self._model.forward(index, rows, hidden)
            drafts.append(self._choose(step, index, states, rows.positions))
            token_ids = drafts[-1].token_ids
        return together(drafts) if len(step.last_rows) else Proposal.empty(step, num_drafts)

    def _choose(
        self, step: VerifiedStep, index: int, states: torch.Tensor, positions: torch.Tensor
    ) -> Chosen:
        """Draft `index` of each sequence, from [S, hidden] of rows at `positions` [S]."""
        if step.draft_sampling is None and step.guide is None:
            return Chosen(self._model.choose_tokens(states, index))
        logits = self._model.compute_logits(states, index)
        ahead = 2 if self._model.kv_depends_on_successor else 1
        return self._choice.choose(logits, step.draft_sampling, positions, step.guide, ahead)


def _padding(step: VerifiedStep) -> VerifiedStep:
    """A step of no sequence, with the blocks of one that has none, so that nothing is written."""
    tables, counts = (
        step.model_input.attention.block_tables,
        step.model_input.attention.block_counts,
    )
    attention = replace(
        step.model_input.attention,
        block_tables=tables.new_zeros(1, tables.shape[1]),
        block_counts=counts.new_zeros(1),
    )
    model_input = replace(step.model_input, attention=attention)
    return replace(step, model_input=model_input, sampled=None, draft_sampling=None, guide=None)
