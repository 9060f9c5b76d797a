"""P-EAGLE: an Eagle3 draft that makes all drafts in one pass."""

from __future__ import annotations

from typing import Any

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, ImageRows
from atom.models.eagle3.base import Eagle3Draft
from atom.spec_decode.proposers.base import VerifiedStep
from atom.spec_decode.proposers.block_proposer import BlockRows, by_draft


class ParallelEagleModel:
    """A P-EAGLE draft as `BlockModel`.

    A first pass over the step's rows is that of other Eagle3 drafts, and makes the first draft. All
    others come from a second one, over rows of masks behind the newest one, which see it and what
    is before it in the cache. Their keys and values are overwritten by the next step's first pass.
    """

    kv_depends_on_successor = True
    num_slots = 0
    walks = False

    def __init__(self, draft: Eagle3Draft, reads_images: bool = False) -> None:
        assert draft.config.mask_token_id is not None
        self.module = draft
        self.reads_images = reads_images
        self.aux_layer_ids = draft.aux_layer_ids
        self.mask_token_id = draft.config.mask_token_id
        self.expected_acceptance = draft.config.expected_acceptance
        self.target_ids = draft.target_ids
        self.compute_logits = draft.compute_logits
        device = draft.mask_hidden.device
        self._mask_token = torch.full((1,), self.mask_token_id, device=device)
        # Before any step: what a recorded one computes is there in its replays alone.
        with torch.inference_mode():
            self._mask_state = draft.fuse_mask()

    def write_kv(self, step: VerifiedStep) -> None:
        self.module.write_kv(*self._rows_of(step))

    def compute_states(self, step: VerifiedStep, rows: BlockRows, num_drafts: int) -> torch.Tensor:
        states, _ = self.module(*self._rows_of(step))
        first: torch.Tensor = states[step.last_rows]
        if num_drafts == 1:
            return first[None]
        count = len(first)
        masks = step.next_token_ids.new_empty(count)
        masks.copy_(self._mask_token.expand(count))
        token_ids, positions, metadata = rows.behind(step, masks, num_drafts - 1)
        hidden = self._mask_state.new_empty(len(token_ids), len(self._mask_state))
        hidden.copy_(self._mask_state.expand_as(hidden))
        others, _ = self.module(token_ids, hidden, positions, metadata)
        return torch.cat((first[None], by_draft(others, count)))

    def choose_tokens(self, states: torch.Tensor) -> torch.Tensor:
        return self.module.head.argmax(states, self.target_ids)

    def begin_path(self, states: torch.Tensor) -> None:
        return None

    def score(
        self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor, carried: Any
    ) -> tuple[torch.Tensor, Any]:
        return logits, None

    def confidence(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        return None

    def _rows_of(
        self, step: VerifiedStep
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, ImageRows | None]:
        """What the first pass reads: the row at position t has the token at t + 1."""
        hidden = self.module.fuse(step.model_output.aux_hidden_states)
        model_input = step.model_input
        where = model_input.positions, model_input.attention, model_input.next_images
        return step.next_token_ids, hidden, *where
