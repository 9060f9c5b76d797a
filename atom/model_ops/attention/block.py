"""Attention of a draft's block over its context and itself."""

from __future__ import annotations

import torch

from atom.model_ops.attention.metadata import CacheTensor
from atom.model_ops.attention.mha import Attention
from atom.model_ops.attention.mla import MLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import AttentionInputs


class BlockAttention(Attention):
    """Writes a block's keys and values after those of its context, then attends over all of them.

    The block's rows are the last of each sequence's context. Their keys and values are scratch:
    what is written to their slots next replaces them.

    Args:
        sliding_window: a query at position p sees keys after p - window; None for all.
        causal: whether queries see no keys after their own; else they see the whole block.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        context: LayerContext,
        sliding_window: int | None,
        causal: bool,
    ) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, head_dim**-0.5, context, sliding_window)
        self._op = "paged_attention" if causal else "block_attention"

    def bind_kv_cache(self, cache: CacheTensor) -> None:
        (self._decode,) = self._use_cache(cache, (self._op,))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs
    ) -> torch.Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d], not rotated yet -> [T, heads * d]; at most 16
        rows a block.
        """
        q = self._rotate_and_write(q, k, v, inputs)
        out = self._run(self._decode, q, inputs.metadata)
        return out.reshape(q.shape[0], self.num_heads * self.head_dim)


class BlockMLAAttention(MLAAttention):
    """The same with latents, where queries see the whole block and all of the context."""

    def bind_kv_cache(self, cache: CacheTensor) -> None:
        super().bind_kv_cache(cache)
        self._block = self._resolve("mla_block_attention")

    def forward(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        up_proj: torch.Tensor,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """As `MLAAttention.forward`; at most 16 rows a block."""
        q = self._rotate_and_write(q, latent, k_rope, inputs)
        out: torch.Tensor = self._block(q, self.kv_cache, up_proj, inputs.metadata, self.scale)
        return out.reshape(q.shape[0], self.num_heads * self.v_head_dim)
