"""Chains of drafts: a small model makes each draft from the one before it. No host sync inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from atom.batch import Lookahead
from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.attention.metadata import (
    DRAFT_CHOICE,
    AttentionMetadata,
    ImageRows,
    ModelOutput,
    SamplingMetadata,
)
from atom.model_ops.kernels.torch.speculation import advance_drafts
from atom.spec_decode.proposers.base import (
    Chosen,
    DraftSampler,
    Guide,
    Proposal,
    VerifiedStep,
    together,
)
from atom.stats import ExpectedAcceptance

# With more rows of a sampled sequence most are a prompt's, of which only the KV is needed.
_ROWS_OF_PROMPTS = 16
# (index of the draft, token ids [S], hidden [S, hidden], positions [S], metadata, draft sampling,
# guide) -> (next drafts, hidden states for the next step)
PredictOp = Callable[
    [
        int,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        AttentionMetadata,
        SamplingMetadata | None,
        Guide | None,
    ],
    tuple[Chosen, torch.Tensor],
]
# The op of this name.
AdvanceOp = Callable[
    [torch.Tensor, int, torch.Tensor, torch.Tensor, int, int],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]


@dataclass(frozen=True)
class ChainStart:
    """The input of the first chain step for S sequences.

    Attributes:
        token_ids: [S] int64; the first drafts.
        hidden: [S, hidden]; the hidden states that go with them.
        positions: [S] int64; of the rows that the first drafts were made from.
        block_tables: [S, max_blocks] int32.
        block_counts: [S] int32; blocks of each sequence.
        max_context_len: upper bound of the context lengths in the last step.
        choice: `AttentionMetadata.draft_choice` of the sequences.
        draft_sampling, guide: as in `VerifiedStep`.
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    block_counts: torch.Tensor
    max_context_len: int
    draft_sampling: SamplingMetadata | None = None
    guide: Guide | None = None
    choice: AttentionMetadata | None = None


class DraftChain:
    """Single-token draft steps.

    Args:
        predict: one draft step, which also writes the draft's KV.
        advance: the op `advance_drafts`.
    """

    def __init__(
        self,
        predict: PredictOp,
        block_size: int,
        max_model_len: int,
        advance: AdvanceOp = advance_drafts,
    ) -> None:
        self._predict = predict
        self._advance_drafts = advance
        self._block_size = block_size
        self._max_model_len = max_model_len

    def extend(
        self,
        step: VerifiedStep,
        positions: torch.Tensor,
        first: Chosen,
        hidden: torch.Tensor,
        num_drafts: int,
        choice: AttentionMetadata | None = None,
    ) -> Proposal:
        """Make the remaining drafts from the first ones and their hidden states [S, hidden].

        Args:
            positions: [S], of the rows that the first drafts were made from.
            num_drafts: at least 1. Without any sequence a padding row is computed: other ranks may
                wait for this one's experts.
            choice: the sequences' `AttentionMetadata.draft_choice` in the pass of the first drafts.

        Returns:
            The first drafts included.
        """
        if num_drafts == 1:
            return together([first])
        start = self._start(step, positions, first.token_ids, hidden, num_drafts - 1)
        if not len(positions):
            self.run(_padding(start), num_drafts - 1)
            return together([first] * num_drafts)
        start = replace(start, choice=choice)
        return together([first, *self.run(start, num_drafts - 1)])

    def begin(
        self,
        step: VerifiedStep,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        num_drafts: int,
        first: int = 0,
    ) -> Proposal:
        """Make all drafts, at least one, of S sequences, at least one.

        Args:
            positions: [S], of the sequences' last rows.
            token_ids, hidden: [S] and [S, hidden]; the input of the step that makes the first
                drafts.
            first: how far that step is behind the last rows; at 0 it is one of theirs, whose KV is
                written already.
        """
        start = self._start(step, positions, token_ids, hidden, first + num_drafts - 1)
        return together(self.run(start, num_drafts, first))

    def run(self, start: ChainStart, num_steps: int, first: int = 1) -> list[Chosen]:
        """Draft `num_steps` more tokens, from step `first` after the start on."""
        token_ids, hidden = start.token_ids, start.hidden
        drafts: list[Chosen] = []
        for i in range(first, first + num_steps):
            positions, metadata = self._advance(start, i)
            chosen, hidden = self._predict(
                i, token_ids, hidden, positions, metadata, start.draft_sampling, start.guide
            )
            token_ids = chosen.token_ids
            drafts.append(chosen)
        return drafts

    def _start(
        self,
        step: VerifiedStep,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        num_steps: int,
    ) -> ChainStart:
        """The chain's start after the last rows of the sampled sequences.

        `step.last_rows` precede the newest token, whose KV is not computed, by one position.
        """
        metadata = step.model_input.attention
        tables, counts = metadata.block_tables, metadata.block_counts
        if step.sampled is not None:
            tables, counts = tables[step.sampled], counts[step.sampled]
        return ChainStart(
            token_ids,
            hidden,
            positions,
            tables,
            counts,
            min(metadata.max_context_len + num_steps, self._max_model_len),
            step.draft_sampling,
            step.guide,
        )

    def _advance(self, start: ChainStart, step: int) -> tuple[torch.Tensor, AttentionMetadata]:
        """Positions and metadata for one token of each sequence, `step` positions after the start.

        Beyond its blocks or `max_model_len`, a sequence stays at its last position with slot -1:
        the scheduler never verifies those drafts.
        """
        tables = start.block_tables
        count, capacity = tables.shape[0], tables.shape[1] * self._block_size
        positions, slots, context_lens, starts = self._advance_drafts(
            start.positions,
            step,
            tables,
            start.block_counts,
            self._block_size,
            self._max_model_len,
        )
        metadata = AttentionMetadata(
            slot_mapping=slots,
            block_tables=tables,
            block_counts=start.block_counts,
            context_lens=context_lens,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            max_context_len=min(start.max_context_len, capacity),
            query_lens_cpu=(1,) * count,
            context_lens_cpu=None,
        )
        metadata.leave(DRAFT_CHOICE, start.choice)
        return positions, metadata


def _padding(like: ChainStart) -> ChainStart:
    """One row without blocks, so it writes no KV."""
    return ChainStart(
        like.token_ids.new_zeros(1),
        like.hidden.new_zeros(1, like.hidden.shape[1]),
        like.positions.new_zeros(1),
        like.block_tables.new_zeros(1, like.block_tables.shape[1]),
        like.block_counts.new_zeros(1),
        like.max_context_len,
    )


class ChainModel(Protocol):
    """A draft model of a chain.

    Its row at position t reads token t + 1 beside the target's hidden state at t, or, if it
    `reads_target` not, token t alone.

    Attributes:
        module: holds the attention layers.
        reads_target: whether it reads the target's hidden states.
        reads_hidden_states: whether these include `ModelOutput.hidden_states`.
        reads_images: whether its rows whose tokens are those of images read their embeddings, not
            that of the placeholder; only if it `reads_target`.
        aux_layer_ids: target layers (boundary ids) whose hidden states it reads.
        keeps_pace: whether other ranks may wait for this one's experts: every step then passes all
            its rows, and a chain, whatever they are needed for.
        expected_acceptance: what its card says, if it does.
        target_ids: [V_draft] int64, the target's token of each logit; None if these are the same.
    """

    reads_target: bool
    reads_hidden_states: bool
    reads_images: bool
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
        images: ImageRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One causal pass over R rows, which writes the draft's KV.

        Args:
            index: of the drafts that it makes, from 0.
            token_ids, positions: [R] int64.
            hidden: [R, hidden], of `read_target` or the last pass.
            images: rows whose tokens have an image's embedding.

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
        images: ImageRows | None = None,
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
        self.reads_images = model.reads_images
        self.kv_cache_builders: Sequence[KVCacheBuilder] = (kv_cache_builder,)
        self._model = model
        self._choice = choice or DraftSampler(model.target_ids)
        self._chain = DraftChain(self._predict, block_size, max_model_len, advance)

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        model, model_input, last = self._model, step.model_input, step.last_rows
        token_ids = step.next_token_ids if model.reads_target else model_input.input_ids
        hidden = model.read_target(step.model_output)
        positions, metadata = model_input.positions, model_input.attention
        images = model_input.next_images
        if num_drafts == 0 or not (len(last) or model.keeps_pace):
            model.write_kv(token_ids, hidden, positions, metadata, images)
            return Proposal(step.next_token_ids.new_empty((len(last), num_drafts)))
        newest = positions[last]
        is_prompt = not model.keeps_pace and len(token_ids) > _ROWS_OF_PROMPTS * len(last)
        if not model.reads_target or is_prompt:
            model.write_kv(token_ids, hidden, positions, metadata, images)
            first, newest_hidden = 1, hidden[: len(last)]
            if model.reads_target:
                first, newest_hidden = 0, hidden[last]
            newest_ids = step.next_token_ids[last]
            return self._chain.begin(step, newest, newest_ids, newest_hidden, num_drafts, first)
        states, fed = model.forward(0, token_ids, hidden, positions, metadata, images)
        newest_states = states[last]
        chosen = self._choose(0, newest_states, newest, step.draft_sampling, step.guide)
        newest_fed = newest_states if fed is states else fed[last]
        choice = metadata.draft_choice
        if choice is not None:
            choice = choice.of_queries(last)
        return self._chain.extend(step, newest, chosen, newest_fed, num_drafts, choice)

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
