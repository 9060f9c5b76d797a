"""Chains of drafts: a small model makes each draft from the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from atom.batch import Lookahead
from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.attention.metadata import AttentionMetadata, ModelOutput, SamplingMetadata
from atom.model_ops.kernels.torch.speculation import advance_drafts
from atom.spec_decode.proposers.base import Guide, Proposal, VerifiedStep
from atom.spec_decode.proposers.chain import AdvanceOp, DraftChain
from atom.spec_decode.proposers.choice import Chosen, DraftSampler
from atom.stats import ExpectedAcceptance

# With more rows of a sampled sequence most are a prompt's, of which only the KV is needed.
_ROWS_OF_PROMPTS = 16


class ChainModel(Protocol):
    """A draft model of a chain.

    Its row at position t reads token t + 1 beside the target's hidden state at t, or, if it
    `reads_target` not, token t alone.

    Attributes:
        module: holds the attention layers.
        reads_target: whether it reads the target's hidden states.
        reads_hidden_states: whether these include `ModelOutput.hidden_states`.
        aux_layer_ids: target layers (boundary ids) whose hidden states it reads.
        keeps_pace: whether other ranks may wait for this one's experts: every step then passes all
            its rows, and a chain, whatever they are needed for.
        expected_acceptance: what its card says, if it does.
        target_ids: [V_draft] int64, the target's token of each logit; None if these are the same.
    """

    reads_target: bool
    reads_hidden_states: bool
    aux_layer_ids: tuple[int, ...]
    keeps_pace: bool
    expected_acceptance: ExpectedAcceptance | None
    target_ids: torch.Tensor | None

    @property
    def module(self) -> nn.Module: ...

    def read_target(self, output: ModelOutput) -> torch.Tensor:
        """[T, hidden]: what the first pass reads of the target; [T, 0] if that is nothing."""
        ...

    def forward(
        self,
        index: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One causal pass over R rows, which writes the draft's KV.

        Args:
            index: of the drafts that it makes, from 0.
            token_ids, positions: [R] int64.
            hidden: [R, hidden], of `read_target` or the last pass.

        Returns:
            States for the output head, and those that the next pass reads, both [R, hidden].
        """
        ...

    def write_kv(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the KV like `forward`, and nothing else where that is possible."""
        ...

    def compute_logits(self, index: int, states: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, V_draft] float32."""
        ...

    def choose_token(self, index: int, states: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S] int64, the target's ids of the most likely tokens."""
        ...


class ChainProposer:
    """Proposes a chain of up to `num_speculative_tokens` drafts.

    A first pass over the step's rows writes the draft's KV for all tokens that the target just
    computed. If the draft reads the target's hidden states, the row at position t combines the one
    at t with the token at t + 1, so the newest row yields the first draft; where most rows are a
    prompt's, it is computed by itself, after the KV of all. A draft that reads tokens alone has
    written the KV of all but the newest one, whose step yields the first draft. Each further draft
    is a single-token step; its KV is overwritten by the next step's first pass. With 0 drafts the
    pass only writes KV.
    """

    reads_steps = True

    def __init__(
        self,
        model: ChainModel,
        kv_cache_builder: KVCacheBuilder,
        num_speculative_tokens: int,
        block_size: int,
        max_model_len: int,
        advance: AdvanceOp = advance_drafts,
        choice: DraftSampler | None = None,
    ) -> None:
        self.lookahead = Lookahead(
            num_speculative_tokens,
            kv_depends_on_successor=model.reads_target,
            expected_acceptance=model.expected_acceptance,
        )
        self.draft_model: nn.Module | None = model.module
        self.aux_layer_ids = model.aux_layer_ids
        self.reads_hidden_states = model.reads_hidden_states
        self.kv_cache_builders: Sequence[KVCacheBuilder] = (kv_cache_builder,)
        self._model = model
        self._choice = choice or DraftSampler(model.target_ids)
        self._chain = DraftChain(self._predict, block_size, max_model_len, advance)

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        model, model_input, last = self._model, step.model_input, step.last_rows
        token_ids = step.next_token_ids if model.reads_target else model_input.input_ids
        hidden = model.read_target(step.model_output)
        positions, metadata = model_input.positions, model_input.attention
        if num_drafts == 0 or not (len(last) or model.keeps_pace):
            model.write_kv(token_ids, hidden, positions, metadata)
            return Proposal(step.next_token_ids.new_empty((len(last), num_drafts)))
        newest = positions[last]
        if not model.reads_target or self._is_prompt(len(token_ids), len(last)):
            model.write_kv(token_ids, hidden, positions, metadata)
            first, newest_hidden = 1, hidden[: len(last)]
            if model.reads_target:
                first, newest_hidden = 0, hidden[last]
            newest_ids = step.next_token_ids[last]
            return self._chain.begin(step, newest, newest_ids, newest_hidden, num_drafts, first)
        states, fed = model.forward(0, token_ids, hidden, positions, metadata)
        newest_states = states[last]
        chosen = self._choose(0, newest_states, newest, step.draft_sampling, step.guide)
        newest_fed = newest_states if fed is states else fed[last]
        return self._chain.extend(step, newest, chosen, newest_fed, num_drafts)

    def _is_prompt(self, num_rows: int, num_sampled: int) -> bool:
        """Whether the newest rows are computed by themselves."""
        return not self._model.keeps_pace and num_rows > _ROWS_OF_PROMPTS * num_sampled

    def _predict(
        self,
        index: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        draft_sampling: SamplingMetadata | None,
        guide: Guide | None,
    ) -> tuple[Chosen, torch.Tensor]:
        """One step of the chain."""
        states, fed = self._model.forward(index, token_ids, hidden, positions, metadata)
        return self._choose(index, states, positions, draft_sampling, guide), fed

    def _choose(
        self,
        index: int,
        states: torch.Tensor,
        positions: torch.Tensor,
        draft_sampling: SamplingMetadata | None,
        guide: Guide | None,
    ) -> Chosen:
        """Draft `index` of each sequence, from [S, hidden] of rows at `positions` [S]."""
        if draft_sampling is None and guide is None:
            return Chosen(self._model.choose_token(index, states))
        logits = self._model.compute_logits(index, states)
        ahead = 2 if self._model.reads_target else 1
        return self._choice.choose(logits, draft_sampling, positions, guide, ahead)
