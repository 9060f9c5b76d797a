"""Eagle3: a one-layer draft model that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.kernels.torch.speculation import advance_drafts
from atom.model_ops.metadata import AttentionMetadata, SamplingMetadata
from atom.models.eagle3.base import Eagle3Draft
from atom.spec_decode.base import Guide, Lookahead, Proposal, VerifiedStep
from atom.spec_decode.chain import AdvanceOp, DraftChain
from atom.spec_decode.choice import Chosen, DraftChoice

# With more rows of a sampled sequence most are a prompt's, of which only the KV is needed.
_ROWS_OF_PROMPTS = 16


class EagleProposer:
    """Proposes a chain of up to `num_speculative_tokens` drafts.

    A first pass over the step's rows writes the draft's KV for all tokens that the target just
    computed; the row at position t combines the hidden state at t with the token at t + 1. The
    newest row yields the first draft; where most rows are a prompt's, it is computed by itself,
    after the KV of all. Each further draft is a single-token step on the draft's own hidden state;
    its KV is overwritten by the next step's first pass. With 0 drafts the pass only writes KV.
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
        advance: AdvanceOp = advance_drafts,
        choice: DraftChoice | None = None,
    ) -> None:
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
        self._chain = DraftChain(self._predict, block_size, max_model_len, advance)

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        metadata = step.model_input.attention
        hidden = self._draft.fuse(step.model_output.aux_hidden_states)
        rows = (step.next_token_ids, hidden, step.model_input.positions, metadata)
        if num_drafts == 0:
            self._draft.write_kv(*rows)
            return Proposal.empty(step)
        last = step.last_rows
        positions = step.model_input.positions[last]
        if 0 < _ROWS_OF_PROMPTS * len(last) < len(hidden):
            self._draft.write_kv(*rows)
            newest = positions, step.next_token_ids[last], hidden[last]
            return self._chain.begin(step, *newest, num_drafts)
        post_norm, pre_norm = self._draft(*rows)
        own, fed = post_norm[last], self._draft.feedback(post_norm, pre_norm)
        first = self._choose(own, positions, step.race, step.guide)
        hidden = own if fed is post_norm else fed[last]
        return self._chain.extend(step, positions, first, hidden, num_drafts)

    def _predict(
        self,
        _: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        race: SamplingMetadata | None,
        guide: Guide | None,
    ) -> tuple[Chosen, torch.Tensor]:
        """One step of the chain; the same at every index."""
        post_norm, pre_norm = self._draft(token_ids, hidden, positions, metadata)
        chosen = self._choose(post_norm, positions, race, guide)
        return chosen, self._draft.feedback(post_norm, pre_norm)

    def _choose(
        self,
        post_norm: torch.Tensor,
        positions: torch.Tensor,
        race: SamplingMetadata | None,
        guide: Guide | None,
    ) -> Chosen:
        """One draft of each sequence, from [S, hidden]."""
        if race is None and guide is None and not self._choice.confident:
            return Chosen(self._draft.choose_token(post_norm))
        logits = self._draft.compute_logits(post_norm)
        return self._choice.choose(logits, race, positions, guide)
