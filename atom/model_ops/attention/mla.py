"""Multi-head latent attention (MLA): caches one latent vector per token, shared by all heads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from atom.model_ops.attention.cached_attention import CachedAttention, StoredPart
from atom.model_ops.attention.kv_scale import KVScale
from atom.model_ops.attention.metadata import (
    MAX_DECODE_QUERIES,
    AttentionMetadata,
    CacheTensor,
    LatentCacheTensor,
)
from atom.model_ops.attention.mixed_batch import attend_by_length
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import share_of
from atom.model_ops.quant.storage import Cut, Part
from atom.model_ops.rotary import AttentionInputs
from atom.model_ops.stacked import DequantisedMatrix


class LatentUpProjection(DequantisedMatrix):
    """Weights [heads * (nope + v), rank] that expand a latent into each head's key part and value.

    Not a linear layer: attention reads it per head.
    """

    def __init__(
        self, num_heads: int, rank: int, head_rows: int, context: LayerContext, prefix: str
    ) -> None:
        self.num_heads = context.group.divide(num_heads, "num_attention_heads")
        rows = share_of(context.group, num_heads * head_rows, "num_attention_heads")
        super().__init__({None: Part(rows, Cut.whole(rank))}, False, context, prefix)

    def by_head(self) -> torch.Tensor:
        """[heads, nope + v, rank], a view."""
        return self.weight.view(self.num_heads, -1, self.weight.shape[1])


class MLAAttention(CachedAttention):
    """Rotates, writes latents to the KV cache, then attends over it.

    Attributes:
        kv_cache: bound before the first forward.
        kv_scale: the checkpoint's scales, for an FP8 cache.
    """

    kv_cache: LatentCacheTensor

    def __init__(
        self,
        num_heads: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        scale: float,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.scale = scale
        self.kv_scale = KVScale(context.device)
        self._context = context

    def stored_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"latent": (self.kv_lora_rank + self.qk_rope_head_dim,)}

    def stored_scales(self, storage: torch.dtype) -> torch.Tensor:
        return self.kv_scale.of_latents(storage)

    def view_cache(self, parts: Mapping[str, StoredPart]) -> LatentCacheTensor:
        latent = parts["latent"]
        return LatentCacheTensor(latent.tensor, latent.scale)

    def bind_kv_cache(self, cache: CacheTensor) -> None:
        if not isinstance(cache, LatentCacheTensor):
            raise TypeError(f"latent attention wants latents, not {type(cache).__name__}")
        self.kv_cache = cache
        self._write = self._resolve("mla_cache_write")
        self._rope_and_cache = self._resolve("mla_rope_and_cache")
        self._decode = self._resolve("mla_decode")
        self._write_and_decode = self._resolve("mla_write_and_decode")
        self._prefill = self._resolve("mla_prefill")

    def _resolve(self, op: str, cache: LatentCacheTensor | None = None) -> Any:
        """The function for `op` on a cache; None for the bound one."""
        cache = cache or self.kv_cache
        return self._context.ops.resolve(
            op,
            self._context.dtype,
            cache.latent.dtype,
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            block_size=cache.block_size,
            num_blocks=cache.latent.shape[0],
        )

    def forward(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        up_proj: torch.Tensor,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """q [T, heads, nope + rope], latent [T, rank], k_rope [T, rope], not rotated yet ->
        [T, heads * v].

        up_proj [heads, nope + v, rank] expands a latent into keys and values.
        """
        metadata = inputs.metadata
        if metadata.max_seqlen_q <= MAX_DECODE_QUERIES:
            out = self._decode_step(q, latent, k_rope, up_proj, inputs)
            return out.reshape(q.shape[0], self.num_heads * self.v_head_dim)
        q = self._rotate_and_write(q, latent, k_rope, inputs)

        def attend(op: Any, q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
            out: torch.Tensor = op(q, self.kv_cache, up_proj, metadata, self.scale)
            return out

        out = attend_by_length(self._decode, self._prefill, attend, q, metadata)
        return out.reshape(q.shape[0], self.num_heads * self.v_head_dim)

    def _decode_step(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        up_proj: torch.Tensor,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """`forward` where every sequence gets the decode op -> [T, heads, v]."""
        out: torch.Tensor = self._write_and_decode(
            inputs.positions,
            q,
            latent,
            k_rope,
            inputs.rotary.cos_sin,
            inputs.rotary.interleaved,
            self.kv_cache,
            up_proj,
            inputs.metadata,
            self.scale,
            partial(self._rope_and_cache, rope=inputs.rotary.rope, write=self._write),
            self._decode,
        )
        return out

    def write(self, latent: torch.Tensor, k_rope: torch.Tensor, inputs: AttentionInputs) -> None:
        """Write the KV cache like `forward`, without attending."""
        # The rotation takes queries, too; one head of anything will do.
        self._rotate_and_write(k_rope[:, None], latent, k_rope, inputs)

    def _rotate_and_write(
        self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, inputs: AttentionInputs
    ) -> torch.Tensor:
        """Write the KV cache -> the rotated queries."""
        rotated: torch.Tensor = self._rope_and_cache(
            inputs.positions,
            q,
            latent,
            k_rope,
            inputs.rotary.cos_sin,
            inputs.rotary.interleaved,
            self.kv_cache,
            inputs.metadata.slot_mapping,
            inputs.rotary.rope,
            self._write,
        )
        return rotated
