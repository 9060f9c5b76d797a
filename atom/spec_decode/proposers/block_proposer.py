"""Blocks of drafts: a small model makes all of them in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from atom.batch import Lookahead
from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.attention.metadata import AttentionMetadata
from atom.model_ops.kernels.torch.speculation import place_blocks
from atom.spec_decode.proposers.base import Chosen, DraftSampler, Proposal, VerifiedStep, together
from atom.stats import ExpectedAcceptance

# The op `place_blocks`.
PlaceOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]


class BlockRows:
    """Places rows behind the newest rows of sequences: a token, and masks after it.

    Args:
        block_size: of the cache.
    """

    def __init__(
        self, mask_token_id: int, block_size: int, max_model_len: int, place: PlaceOp
    ) -> None:
        self._mask_token_id = mask_token_id
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._place = place

    def behind(
        self, step: VerifiedStep, token_ids: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """The rows of the S sampled sequences, and where they are in the cache.

        Rows without a slot, where a sequence is about to end, are seen by none.

        Args:
            token_ids: [S] int64, of the first rows, one position behind `step.last_rows`.

        Returns:
            Token ids and positions [S * num_rows], and their metadata.
        """
        metadata = step.model_input.attention
        tables, counts = metadata.block_tables, metadata.block_counts
        if step.sampled is not None:
            tables, counts = tables[step.sampled], counts[step.sampled]
        token_ids, positions, slots, context_lens, starts = self._place(
            token_ids,
            step.model_input.positions[step.last_rows],
            tables,
            counts,
            num_rows,
            self._mask_token_id,
            self._block_size,
            self._max_model_len,
        )
        longest = min(metadata.max_context_len + num_rows, self._max_model_len)
        capacity = tables.shape[1] * self._block_size
        rows = AttentionMetadata(
            slot_mapping=slots,
            block_tables=tables,
            block_counts=counts,
            context_lens=context_lens,
            cu_seqlens_q=starts,
            max_seqlen_q=num_rows,
            max_context_len=min(longest, capacity),
            query_lens_cpu=(num_rows,) * tables.shape[0],
            context_lens_cpu=None,
        )
        return token_ids, positions, rows


def by_draft(states: torch.Tensor, count: int) -> torch.Tensor:
    """[S * rows, hidden] of S = `count` sequences -> [rows, S, hidden]."""
    return states.view(count, -1, states.shape[-1]).transpose(0, 1).contiguous()


class BlockModel(Protocol):
    """A draft model of blocks.

    Attributes:
        module: holds the attention layers.
        aux_layer_ids: target layers (boundary ids) whose hidden states it reads.
        kv_depends_on_successor: as in `Lookahead`.
        num_slots: KV slots that it writes behind the newest token, if they are more than the
            drafts.
        reads_images: as in `Proposer`.
        mask_token_id: what its rows read where there is no token yet.
        expected_acceptance: what its card says, if it does.
        target_ids: [V_draft] int64, the target's token of each logit; None if these are the same.
        walks: whether a draft depends on the one before it, else on its row alone.
    """

    aux_layer_ids: tuple[int, ...]
    kv_depends_on_successor: bool
    num_slots: int
    reads_images: bool
    mask_token_id: int
    expected_acceptance: ExpectedAcceptance | None
    target_ids: torch.Tensor | None
    walks: bool

    @property
    def module(self) -> nn.Module: ...

    def write_kv(self, step: VerifiedStep) -> None:
        """Write the draft's KV of all rows of the step."""
        ...

    def compute_states(self, step: VerifiedStep, rows: BlockRows, num_drafts: int) -> torch.Tensor:
        """Write the KV, and compute the states that drafts are made from, [drafts, S, hidden]."""
        ...

    def choose_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R] int64, the target's ids of the most likely tokens."""
        ...

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, V_draft] float32."""
        ...

    def begin_path(self, states: torch.Tensor) -> Any:
        """What `score` takes for the first drafts, from their states [S, hidden]."""
        ...

    def score(
        self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor, carried: Any
    ) -> tuple[torch.Tensor, Any]:
        """Logits [S, V_draft] after the tokens [S] before, and what the next call takes."""
        ...

    def confidence(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """[S] float32 of drafts from states [S, hidden]; None if the choice knows better."""
        ...


class BlockProposer:
    """Proposes up to `num_speculative_tokens` drafts, all from one pass.

    Every step writes the draft's keys and values of all tokens that the target just computed. The
    pass goes over rows behind the newest token; what they write is overwritten before it is read as
    a token's.
    """

    reads_steps = True
    reads_hidden_states = False

    def __init__(
        self,
        model: BlockModel,
        kv_cache_builder: KVCacheBuilder,
        num_speculative_tokens: int,
        block_size: int,
        max_model_len: int,
        place: PlaceOp = place_blocks,
        choice: DraftSampler | None = None,
    ) -> None:
        self.lookahead = Lookahead(
            num_speculative_tokens,
            kv_depends_on_successor=model.kv_depends_on_successor,
            expected_acceptance=model.expected_acceptance,
            num_slots=max(model.num_slots, num_speculative_tokens),
        )
        self.draft_model: nn.Module | None = model.module
        self.aux_layer_ids = model.aux_layer_ids
        self.reads_images = model.reads_images
        self.kv_cache_builders: Sequence[KVCacheBuilder] = (kv_cache_builder,)
        self._model = model
        self._choice = choice or DraftSampler(model.target_ids)
        self._rows = BlockRows(model.mask_token_id, block_size, max_model_len, place)

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        model, count = self._model, len(step.last_rows)
        if num_drafts == 0 or not count:
            model.write_kv(step)
            return Proposal(step.next_token_ids.new_empty((count, num_drafts)))
        states = model.compute_states(step, self._rows, num_drafts)
        is_greedy = step.draft_sampling is None and step.guide is None
        if is_greedy and not self._choice.confident and not model.walks:
            # No logits, which every rank would need all of.
            greedy = model.choose_tokens(states.flatten(0, 1))
            return Proposal(greedy.view(num_drafts, count).t().contiguous())
        return self._walk(step, states)

    def _walk(self, step: VerifiedStep, states: torch.Tensor) -> Proposal:
        """One draft after the other, from states [drafts, S, hidden]."""
        model, choice, guide = self._model, self._choice, step.guide
        positions = step.model_input.positions[step.last_rows]
        logits = model.compute_logits(states.flatten(0, 1)).view(*states.shape[:2], -1)
        previous, carried = step.next_token_ids[step.last_rows], model.begin_path(states[0])
        drafts: list[Chosen] = []
        for i in range(len(states)):
            row = logits[i]
            if guide is not None:
                # Before the path, which may look at the best tokens alone.
                guide.restrict(row, choice.token_ids)
            scores, carried = model.score(row, states[i], previous, carried)
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
