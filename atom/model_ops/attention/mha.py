"""Multi-head and grouped-query attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from atom.model_ops.attention.cached_attention import CachedAttention, StoredPart
from atom.model_ops.attention.kv_scale import KVScale
from atom.model_ops.attention.metadata import (
    MAX_DECODE_QUERIES,
    AttentionMetadata,
    CacheTensor,
    KVCacheTensor,
)
from atom.model_ops.attention.mixed_batch import attend_by_length
from atom.model_ops.attention.sinks import HeadSinks
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import AttentionInputs


class Attention(CachedAttention):
    """Rotates, writes keys and values to the KV cache, then attends over it.

    Args:
        softcap: scaled scores s become softcap * tanh(s / softcap); None for no cap.
        sinks: a score more in each head's softmax.

    Attributes:
        kv_cache: bound before the first forward.
        kv_scale: the checkpoint's scales, for an FP8 cache.
    """

    kv_cache: KVCacheTensor

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        context: LayerContext,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: HeadSinks | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        # Some checkpoint configs use 0 or -1 for "off".
        self.sliding_window = sliding_window if sliding_window and sliding_window > 0 else None
        self.softcap = softcap
        self.sinks = sinks
        self.kv_scale = KVScale(context.device)
        self._context = context
        self._is_windowed = False

    @property
    def window(self) -> int | None:
        return self.sliding_window

    def stored_parts(self) -> Mapping[str, tuple[int, ...]]:
        head = self.num_kv_heads, self.head_dim
        return {"key": head, "value": head}

    def stored_scales(self, storage: torch.dtype) -> torch.Tensor:
        return self.kv_scale.of_keys_and_values(storage)

    def view_cache(self, parts: Mapping[str, StoredPart]) -> KVCacheTensor:
        key, value = parts["key"], parts["value"]
        return KVCacheTensor(key.tensor, value.tensor, key.scale, value.scale)

    def bind_kv_cache(self, cache: CacheTensor) -> None:
        ops = "paged_attention", "prefill_attention"
        self._decode, self._prefill = self._use_cache(cache, ops)

    def _use_cache(self, cache: CacheTensor, ops: tuple[str, ...]) -> list[Any]:
        """The functions for `ops` on this cache, beside those that write it.

        Raises:
            TypeError: when the cache is of another kind of attention.
        """
        if not isinstance(cache, KVCacheTensor):
            raise TypeError(f"attention wants keys and values, not {type(cache).__name__}")
        self.kv_cache = cache
        self._is_windowed = cache.is_windowed
        # Resolved together, since they must agree on the cache layout.
        self._write, self._rope_and_cache, *functions = self._context.ops.resolve_together(
            ("kv_cache_write", "rope_and_cache", *ops),
            self._context.dtype,
            cache.key.dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=cache.block_size,
            num_blocks=cache.key.shape[0],
            sliding_window=self.sliding_window or 0,
            **self._special_scores(),
        )
        return functions

    def _special_scores(self) -> dict[str, int]:
        """What most layers do not have, as sizes of a query of the table of ops."""
        present = {"softcap": self.softcap is not None, "sinks": self.sinks is not None}
        return {name: 1 for name, is_there in present.items() if is_there}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs
    ) -> torch.Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d], not rotated yet -> [T, heads * d]."""
        if self._is_windowed:
            inputs = inputs.windowed()
        q = self._rotate_and_write(q, k, v, inputs)
        return self._attend(q, inputs.metadata)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """`forward` of queries and keys that are rotated already."""
        if self._is_windowed:
            assert metadata.windowed is not None
            metadata = metadata.windowed
        self._write(k, v, self.kv_cache, metadata.slot_mapping)
        return self._attend(q, metadata)

    def _attend(self, q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Rotated queries [T, heads, d] over the cache -> [T, heads * d]."""
        if metadata.max_seqlen_q <= MAX_DECODE_QUERIES:
            out = self._run(self._decode, q, metadata)
        else:
            out = attend_by_length(self._decode, self._prefill, self._run, q, metadata)
        return out.reshape(q.shape[0], self.num_heads * self.head_dim)

    def _run(self, op: Any, q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        cache = self.kv_cache, metadata, self.scale, self.sliding_window
        out: torch.Tensor
        if self.softcap is None and self.sinks is None:
            out = op(q, *cache)
        else:
            out = op(q, *cache, self.softcap, None if self.sinks is None else self.sinks.weight)
        return out

    def write(self, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs) -> None:
        """Write the KV cache like `forward`, without attending."""
        # The rotation takes queries, too; one head of anything will do.
        self._rotate_and_write(k[:, :1], k, v, inputs)

    def _rotate_and_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs
    ) -> torch.Tensor:
        """Write the KV cache -> the rotated queries."""
        rotated: torch.Tensor = self._rope_and_cache(
            inputs.positions,
            q,
            k,
            v,
            inputs.rotary.cos_sin,
            inputs.rotary.interleaved,
            self.kv_cache,
            inputs.metadata.slot_mapping,
            inputs.rotary.rope,
            self._write,
        )
        return rotated
