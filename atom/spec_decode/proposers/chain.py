"""The single-token draft steps after a proposer's first pass. No host sync inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, SamplingMetadata
from atom.model_ops.kernels.torch.speculation import advance_drafts
from atom.spec_decode.proposers.base import Guide, Proposal, VerifiedStep
from atom.spec_decode.proposers.choice import Chosen, together

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
    ) -> Proposal:
        """Make the remaining drafts from the first ones and their hidden states [S, hidden].

        Args:
            positions: [S], of the rows that the first drafts were made from.
            num_drafts: at least 1. Without any sequence a padding row is computed: other ranks may
                wait for this one's experts.

        Returns:
            The first drafts included.
        """
        if num_drafts == 1:
            return together([first])
        start = self._start(step, positions, first.token_ids, hidden, num_drafts - 1)
        if not len(positions):
            self.run(_padding(start), num_drafts - 1)
            return Proposal(*(t.new_empty((0, num_drafts)) for t in first.tensors))
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
        longest = min(metadata.max_context_len + num_steps, self._max_model_len)
        limits = tables, counts, longest
        return ChainStart(token_ids, hidden, positions, *limits, step.draft_sampling, step.guide)

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
        return positions, AttentionMetadata(
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
