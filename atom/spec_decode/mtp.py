"""Multi-token prediction: the target's own prediction layers draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.kernels.torch.speculation import advance_drafts
from atom.model_ops.metadata import AttentionMetadata, SamplingMetadata
from atom.models.deepseek_mtp import DeepseekMTP
from atom.spec_decode.base import Guide, Lookahead, Proposal, VerifiedStep
from atom.spec_decode.chain import AdvanceOp, DraftChain
from atom.spec_decode.choice import Chosen, DraftChoice


class MTPProposer:
    """Proposes a chain of up to `num_speculative_tokens` drafts; draft i uses layer i modulo
    their number.

    The steps are those of `EagleProposer`; the first pass reads the target's last hidden states
    directly.
    """

    aux_layer_ids: tuple[int, ...] = ()
    reads_steps = True
    reads_hidden_states = True

    def __init__(
        self,
        mtp: DeepseekMTP,
        kv_cache_builder: KVCacheBuilder,
        num_speculative_tokens: int,
        block_size: int,
        max_model_len: int,
        advance: AdvanceOp = advance_drafts,
        choice: DraftChoice | None = None,
    ) -> None:
        self.lookahead = Lookahead(num_speculative_tokens, kv_depends_on_successor=True)
        self.draft_model: nn.Module | None = mtp
        self.kv_cache_builders: Sequence[KVCacheBuilder] = (kv_cache_builder,)
        self._mtp = mtp
        self._choice = choice or DraftChoice()
        self._chain = DraftChain(self._predict, block_size, max_model_len, advance)

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        rows = (
            step.next_token_ids,
            step.model_output.hidden_states,
            step.model_input.positions,
            step.model_input.attention,
        )
        if num_drafts == 0:
            self._mtp.write_kv(*rows)
            return Proposal.empty(step)
        hidden = self._mtp(0, *rows)[step.last_rows]
        positions = step.model_input.positions[step.last_rows]
        first = self._choose(0, hidden, positions, step.race, step.guide)
        return self._chain.extend(step, positions, first, hidden, num_drafts)

    def _predict(
        self,
        place: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        race: SamplingMetadata | None,
        guide: Guide | None,
    ) -> tuple[Chosen, torch.Tensor]:
        """One step of the chain."""
        hidden = self._mtp(place, token_ids, hidden, positions, metadata)
        return self._choose(place, hidden, positions, race, guide), hidden

    def _choose(
        self,
        place: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        race: SamplingMetadata | None,
        guide: Guide | None,
    ) -> Chosen:
        """Draft `place` of each sequence, from [S, hidden]."""
        if race is None and guide is None and not self._choice.confident:
            return Chosen(self._mtp.choose_token(place, hidden))
        logits = self._mtp.compute_logits(place, hidden)
        return self._choice.choose(logits, race, positions, guide)
