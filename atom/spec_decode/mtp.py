"""Multi-token prediction: the target's own layers draft for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atom.model_engine.kv_cache import KVCacheBuilder
from atom.model_engine.mla_cache import MLACacheBuilder
from atom.model_ops.attention_mla import MLAAttention
from atom.models.base import attention_layers
from atom.models.deepseek_mtp import DeepseekMTP
from atom.spec_decode.base import Lookahead, VerifiedStep
from atom.spec_decode.draft_metadata import advance


class MTPCacheBuilder(MLACacheBuilder):
    """The prediction layers' latents, in the format and with the block ids of the target's."""

    key = "mtp_kv_cache"

    def __init__(
        self, mtp: DeepseekMTP, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = attention_layers(mtp).items()
        latent = {i: layer for i, layer in layers if isinstance(layer, MLAAttention)}
        super().__init__(latent, block_size, dtype, device)


class MTPProposer:
    """Proposes a greedy chain of `num_speculative_tokens` drafts; layers take turns.

    The pass over the step's rows and the single-token steps after it are those of Eagle3; here
    the first takes the target's last hidden states, and there is nothing to fuse.
    """

    aux_layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        mtp: DeepseekMTP,
        kv_cache_builder: KVCacheBuilder,
        num_speculative_tokens: int,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self.lookahead = Lookahead(num_speculative_tokens, kv_depends_on_successor=True)
        self.draft_model: nn.Module | None = mtp
        self.kv_cache_builders: Sequence[KVCacheBuilder] = (kv_cache_builder,)
        self._mtp = mtp
        self._block_size = block_size
        self._max_model_len = max_model_len

    def propose(self, step: VerifiedStep) -> torch.Tensor:
        metadata = step.model_input.attention
        positions = step.model_input.positions
        hidden = step.model_output.hidden_states
        hidden = self._mtp(0, step.next_token_ids, hidden, positions, metadata)
        if not step.sequence_indices:
            return step.next_token_ids.new_empty((0, self.lookahead.num_tokens))
        hidden = hidden[step.last_rows]
        drafts = [self._mtp.compute_logits(0, hidden).argmax(dim=-1)]
        # The newest token is known but not computed: the pass above ended one position before.
        newest = [len(prompt) + len(outputs) - 1 for prompt, outputs in step.histories]
        for i in range(1, self.lookahead.num_tokens):
            # Past the context no draft is ever verified; the rotary table ends there.
            at = [min(n + i - 1, self._max_model_len - 1) for n in newest]
            ahead = advance(metadata, step.sequence_indices, at, self._block_size)
            positions = torch.tensor(at, dtype=torch.int64, device=hidden.device)
            hidden = self._mtp(i, drafts[-1], hidden, positions, ahead)
            drafts.append(self._mtp.compute_logits(i, hidden).argmax(dim=-1))
        return torch.stack(drafts, dim=1)
