"""Block drafters: all drafts come from one pass over a block of masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from atom.graphs.capture import GraphPlan
from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.kernels.torch.speculation import place_blocks
from atom.model_ops.metadata import AttentionMetadata
from atom.models.block_draft.draft import BlockDraft
from atom.spec_decode.base import Lookahead, Proposal, VerifiedStep
from atom.spec_decode.chain import ChainStart, DraftGraphs
from atom.spec_decode.choice import Chosen, DraftChoice

# The op of this name.
PlaceOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]


class BlockProposer:
    """Proposes up to `num_speculative_tokens` drafts from a block of the draft's own size.

    Every step writes the draft's keys and values of all tokens that the target just computed, its
    context. Rows of rejected drafts lie behind the newest token, where the block is written, and
    each block is overwritten by the next: neither is ever read as context. The block has as many
    rows as in training, however many drafts are asked for, so drafts do not depend on their number.
    Where a sequence is about to end, rows that have no slot are seen by none.
    """

    reads_steps = True

    def __init__(
        self,
        draft: BlockDraft,
        kv_cache_builder: KVCacheBuilder,
        num_speculative_tokens: int,
        block_size: int,
        max_model_len: int,
        place: PlaceOp = place_blocks,
        choice: DraftChoice | None = None,
    ) -> None:
        self.lookahead = Lookahead(
            num_speculative_tokens, num_slots=max(draft.config.block_size, num_speculative_tokens)
        )
        self.draft_model: nn.Module | None = draft
        self.aux_layer_ids = draft.aux_layer_ids
        self.kv_cache_builders: Sequence[KVCacheBuilder] = (kv_cache_builder,)
        self._draft = draft
        self._choice = choice or DraftChoice(draft.target_ids)
        self._place = place
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._graphs: DraftGraphs | None = None

    def capture(self, plan: GraphPlan) -> None:
        nothing = self._draft.norm.weight.new_empty(1, 0)
        most, confident = self.lookahead.num_tokens, self._choice.confident
        self._graphs = DraftGraphs(plan, nothing, most, self._run_eagerly, confident)

    def release_graphs(self) -> None:
        self._graphs = None

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        model_input = step.model_input
        states = self._draft.fuse(step.model_output.aux_hidden_states)
        self._draft.write_context(states, model_input.positions, model_input.attention)
        if num_drafts == 0 or not len(step.last_rows):
            return Proposal(step.next_token_ids.new_empty((len(step.last_rows), num_drafts)))
        start = self._start(step)
        if self._graphs is not None and num_drafts == self.lookahead.num_tokens:
            drafts = self._graphs.replay(start)
            if drafts is not None:
                return drafts
        return self._run_eagerly(start, num_drafts)

    def _start(self, step: VerifiedStep) -> ChainStart:
        """The anchors, and where they go: behind the last rows of the sampled sequences."""
        metadata = step.model_input.attention
        tables, counts = metadata.block_tables, metadata.block_counts
        if step.sampled is not None:
            tables, counts = tables[step.sampled], counts[step.sampled]
        anchors = step.next_token_ids[step.last_rows]
        positions = step.model_input.positions[step.last_rows]
        longest = metadata.max_context_len + self._draft.config.block_size
        return ChainStart(
            anchors,
            anchors.new_empty((len(anchors), 0), dtype=self._draft.norm.weight.dtype),
            positions,
            tables,
            counts,
            min(longest, self._max_model_len),
            step.race,
        )

    def _run_eagerly(self, start: ChainStart, num_drafts: int) -> Proposal:
        """The pass over the blocks, and a walk along them."""
        config = self._draft.config
        count, rows = len(start.token_ids), config.block_size
        token_ids, positions, metadata = self._blocks(start)
        hidden = self._draft(token_ids, positions, metadata).view(count, rows, -1)
        first = 0 if config.samples_anchor else 1
        # By draft, so that those of one number lie beside each other.
        states = hidden[:, first : first + num_drafts].transpose(0, 1).contiguous()
        if start.race is None and not self._choice.confident and not self._draft.walks:
            greedy = self._draft.to_target_ids(self._draft.head.argmax(states.flatten(0, 1)))
            return Proposal(greedy.view(num_drafts, count).t().contiguous())
        logits = self._draft.compute_logits(states.flatten(0, 1)).view(num_drafts, count, -1)
        drafts: list[Chosen] = []
        previous, carried = start.token_ids, self._draft.begin_path(states[0])
        for i in range(num_drafts):
            scores, carried = self._draft.score(logits[i], states[i], previous, carried)
            chosen = self._choice.choose(scores, start.race, start.positions, ahead=2 + i)
            if self._choice.confident and config.confidence is not None:
                confidences = self._draft.confidence(states[i], previous)
                chosen = Chosen(chosen.token_ids, confidences)
            drafts.append(chosen)
            previous = chosen.token_ids
        columns = zip(*(chosen.tensors for chosen in drafts), strict=True)
        return Proposal(*(torch.cat([t[:, None] for t in each], dim=1) for each in columns))

    def _blocks(self, start: ChainStart) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Token ids and positions [S * rows] of all blocks, and where they go."""
        tables, rows = start.block_tables, self._draft.config.block_size
        token_ids, positions, slots, context_lens, starts = self._place(
            start.token_ids,
            start.positions,
            tables,
            start.block_counts,
            rows,
            self._draft.config.mask_token_id,
            self._block_size,
            self._max_model_len,
        )
        capacity = tables.shape[1] * self._block_size
        return (
            token_ids,
            positions,
            AttentionMetadata(
                slot_mapping=slots,
                block_tables=tables,
                block_counts=start.block_counts,
                context_lens=context_lens,
                cu_seqlens_q=starts,
                max_seqlen_q=rows,
                max_context_len=min(start.max_context_len, capacity),
                query_lens_cpu=(rows,) * tables.shape[0],
                context_lens_cpu=None,
            ),
        )
