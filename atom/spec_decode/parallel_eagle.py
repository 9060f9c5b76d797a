"""P-EAGLE: an Eagle3 draft that makes all drafts in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.kernels.torch.speculation import place_blocks
from atom.model_ops.metadata import SamplingMetadata
from atom.models.eagle3.base import Eagle3Draft
from atom.spec_decode.base import Guide, Lookahead, Proposal, VerifiedStep
from atom.spec_decode.chain import ChainStart
from atom.spec_decode.choice import Chosen, DraftChoice, together
from atom.spec_decode.mask_rows import MaskRows, PlaceOp, by_draft


class ParallelEagleProposer:
    """Proposes up to `num_speculative_tokens` drafts.

    The first pass is that of `EagleProposer`. All other drafts come from a second one, over rows of
    masks behind the newest one, which see it and what is before it in the cache. Their keys and
    values are overwritten by the next step's first pass.
    """

    reads_steps = True
    reads_hidden_states = False

    def __init__(
        self,
        draft: Eagle3Draft,
        kv_cache_builder: KVCacheBuilder,
        num_speculative_tokens: int,
        block_size: int,
        max_model_len: int,
        place: PlaceOp = place_blocks,
        choice: DraftChoice | None = None,
    ) -> None:
        assert draft.config.mask_token_id is not None
        self.lookahead = Lookahead(
            num_speculative_tokens,
            kv_depends_on_successor=True,
            expected_acceptance=draft.config.expected_acceptance,
        )
        self.draft_model: nn.Module | None = draft
        self.aux_layer_ids = draft.aux_layer_ids
        self.kv_cache_builders: Sequence[KVCacheBuilder] = (kv_cache_builder,)
        self._draft = draft
        self._choice = choice or DraftChoice(draft.target_ids)
        self._rows = MaskRows(draft.config.mask_token_id, block_size, max_model_len, place)
        device = draft.mask_hidden.device
        self._mask_token = torch.full((1,), draft.config.mask_token_id, device=device)
        # Before any step: what a recorded one computes is there in its replays alone.
        with torch.inference_mode():
            self._mask_state = draft.fuse_mask()

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        hidden = self._draft.fuse(step.model_output.aux_hidden_states)
        model_input, last = step.model_input, step.last_rows
        rows = (step.next_token_ids, hidden, model_input.positions, model_input.attention)
        if num_drafts == 0 or not len(last):
            self._draft.write_kv(*rows)
            return Proposal(step.next_token_ids.new_empty((len(last), num_drafts)))
        post_norm, _ = self._draft(*rows)
        positions = model_input.positions[last]
        first = self._choose(post_norm[last], step.race, positions, step.guide, 2)
        if num_drafts == 1:
            return together([first])
        masks = torch.empty_like(first.token_ids)
        masks.copy_(self._mask_token.expand(len(masks)))
        start = self._rows.start(step, masks, num_drafts - 1)
        return together([first, *self._run(start, num_drafts - 1)])

    def _run(self, start: ChainStart, num_rows: int) -> list[Chosen]:
        """The drafts of rows of masks."""
        token_ids, positions, metadata = self._rows.place(start, num_rows)
        state = self._mask_state
        hidden = state.new_empty(len(token_ids), len(state))
        hidden.copy_(state.expand_as(hidden))
        post_norm, _ = self._draft(token_ids, hidden, positions, metadata)
        states = by_draft(post_norm, len(start.token_ids))
        options = start.race, start.positions, start.guide
        return [self._choose(states[i], *options, 3 + i) for i in range(num_rows)]

    def _choose(
        self,
        states: torch.Tensor,
        race: SamplingMetadata | None,
        positions: torch.Tensor,
        guide: Guide | None,
        ahead: int,
    ) -> Chosen:
        """Drafts of rows [S, hidden]."""
        if race is None and guide is None and not self._choice.confident:
            return Chosen(self._draft.choose_token(states))
        logits = self._draft.compute_logits(states)
        return self._choice.choose(logits, race, positions, guide, ahead)
