"""Eagle3: a one-layer draft that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atom.model_engine.kv_cache import KVCacheBuilder
from atom.models.eagle3_base import Eagle3Draft
from atom.spec_decode.base import Lookahead, VerifiedStep
from atom.spec_decode.draft_metadata import advance


class EagleProposer:
    """Proposes a greedy chain of `num_speculative_tokens` drafts.

    One causal pass over the step's rows writes the draft's KV for every token that the target
    just computed (the row that pairs the hidden state at position t with the token at t + 1
    sits at position t). The newest row's output is the first draft; each further one is a
    single-token step fed with the draft's own hidden state.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        kv_cache_builder: KVCacheBuilder,
        num_speculative_tokens: int,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self.lookahead = Lookahead(num_speculative_tokens, kv_depends_on_successor=True)
        self.draft_model: nn.Module | None = draft
        self.aux_layer_ids = draft.aux_layer_ids
        self.kv_cache_builders: Sequence[KVCacheBuilder] = (kv_cache_builder,)
        self._draft = draft
        self._block_size = block_size
        self._max_model_len = max_model_len

    def propose(self, step: VerifiedStep) -> torch.Tensor:
        metadata = step.model_input.attention
        positions = step.model_input.positions
        hidden = self._draft.fuse(step.model_output.aux_hidden_states)
        post_norm, pre_norm = self._draft(step.next_token_ids, hidden, positions, metadata)
        if not step.sequence_indices:
            return step.next_token_ids.new_empty((0, self.lookahead.num_tokens))
        post_norm, pre_norm = post_norm[step.last_rows], pre_norm[step.last_rows]
        drafts = [self._most_likely(post_norm)]
        # The newest token is known but not computed: the pass above ended one position before.
        newest = [len(prompt) + len(outputs) - 1 for prompt, outputs in step.histories]
        for i in range(self.lookahead.num_tokens - 1):
            # Past the context no draft is ever verified; the rotary table ends there.
            at = [min(n + i, self._max_model_len - 1) for n in newest]
            ahead = advance(metadata, step.sequence_indices, at, self._block_size)
            post_norm, pre_norm = self._draft(
                drafts[-1],
                self._draft.feedback(post_norm, pre_norm),
                torch.tensor(at, dtype=torch.int64, device=positions.device),
                ahead,
            )
            drafts.append(self._most_likely(post_norm))
        return torch.stack(drafts, dim=1)

    def _most_likely(self, post_norm: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S] target token ids."""
        draft_ids = self._draft.compute_logits(post_norm).argmax(dim=-1)
        return self._draft.to_target_ids(draft_ids)
