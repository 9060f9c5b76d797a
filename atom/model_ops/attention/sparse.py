"""Sparse attention of DeepSeek-V3.2 (DSA): an indexer chooses what each query attends to.

What a query attends to is a page table of its own, with pages of one token: latent attention needs
nothing else to be sparse.

Source: DeepSeek-V3.2-Exp's report, section 2.1. Its fp8 scores, and the rotation of queries and
keys before them, which changes no product, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from atom.model_ops.attention.cached_attention import CachedAttention, StoredPart
from atom.model_ops.attention.metadata import AttentionMetadata, CacheTensor, LatentCacheTensor
from atom.model_ops.attention.mla import MLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import LayerNorm
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.quant.rounding import Rows, unrounded
from atom.model_ops.rotary import AttentionInputs


class SparseMLAAttention(MLAAttention):
    """Latent attention to chosen tokens."""

    def bind_kv_cache(self, cache: CacheTensor) -> None:
        super().bind_kv_cache(cache)
        rows = self.kv_cache.latent.flatten(0, 1)[:, None]
        self._by_token = LatentCacheTensor(rows, self.kv_cache.scale)
        self._sparse = self._resolve("mla_sparse", self._by_token)

    def attend_to(
        self,
        chosen: AttentionMetadata | None,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        up_proj: torch.Tensor,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """As `forward`, to the tokens that an `Indexer` has chosen."""
        if chosen is None:
            out: torch.Tensor = self(q, latent, k_rope, up_proj, inputs)
            return out
        q = self._rotate_and_write(q, latent, k_rope, inputs)
        out = self._sparse(q, self._by_token, up_proj, chosen, self.scale)
        return out.reshape(q.shape[0], self.num_heads * self.v_head_dim)


class BiasedLayerNorm(LayerNorm):
    """The norm of `x - mean(x)`, with a bias."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__(size, eps, context)
        self.bias = context.empty(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._norm(x, self.weight, self.eps, self.bias)
        return out


class HeadWeights(nn.Module):
    """What each head's products count, per token: a product whose sums stay in float32."""

    def __init__(self, hidden_size: int, num_heads: int, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(num_heads, hidden_size)
        self._logits = context.ops.resolve(
            "logits", context.dtype, in_features=hidden_size, out_features=num_heads
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, heads] float32."""
        out: torch.Tensor = self._logits(x, self.weight)
        return out


class Indexer(CachedAttention):
    """Chooses the `topk` tokens with the highest scores for each query; the same on all ranks.

    The score of a token is a sum over heads, each with one query and all with the token's one key,
    which the layer caches: in the model's dtype, whatever that of the latents is. Factors that all
    scores have in common are left out.

    Args:
        topk: tokens that a query attends to; all, if there are no more.
        num_heads, head_dim: of its own.
        interleaved: whether the first elements of its heads are rotated as pairs of neighbours.

    Attributes:
        kv_cache: bound before the first forward.
    """

    kv_cache: LatentCacheTensor
    _NORM_EPS: ClassVar[float] = 1e-6

    def __init__(
        self,
        topk: int,
        num_heads: int,
        head_dim: int,
        q_lora_rank: int,
        hidden_size: int,
        interleaved: bool,
        context: LayerContext,
        prefix: str,
    ) -> None:
        super().__init__()
        self.topk, self.num_heads, self.head_dim = topk, num_heads, head_dim
        self._interleaved = interleaved
        self._context = context
        self.wq_b = ReplicatedLinear(
            q_lora_rank, num_heads * head_dim, False, context, f"{prefix}.wq_b"
        )
        self.wk = ReplicatedLinear(hidden_size, head_dim, False, context, f"{prefix}.wk")
        self.k_norm = BiasedLayerNorm(head_dim, self._NORM_EPS, context)
        self.weights_proj = HeadWeights(hidden_size, num_heads, context)
        self._rope = context.ops.resolve("rope", context.dtype, head_dim=head_dim)
        # Where short contexts may take the dense way, which has other bits there. A CPU's way is
        # the same for all: its recorded steps do not know how long contexts will be.
        self._may_be_dense = context.ops.platform.is_gpu and not context.ops.batch_invariant

    def stored_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"index_key": (self.head_dim,)}

    def storage_of(self, storage: torch.dtype) -> torch.dtype:
        return self._context.dtype

    def stored_scales(self, storage: torch.dtype) -> torch.Tensor:
        raise NotImplementedError("index keys are not stored in FP8")

    def view_cache(self, parts: Mapping[str, StoredPart]) -> LatentCacheTensor:
        return LatentCacheTensor(parts["index_key"].tensor)

    def bind_kv_cache(self, cache: CacheTensor) -> None:
        if not isinstance(cache, LatentCacheTensor):
            raise TypeError(f"an indexer wants its keys, not {type(cache).__name__}")
        self.kv_cache = cache
        shape = {"block_size": cache.block_size, "num_blocks": cache.latent.shape[0]}
        dtypes = self._context.dtype, cache.latent.dtype
        sizes = {"index_n_heads": self.num_heads, "index_head_dim": self.head_dim}
        self._write = self._context.ops.resolve("index_cache_write", *dtypes, **shape, **sizes)
        self._choose = self._context.ops.resolve("index_topk", *dtypes, **shape, **sizes)

    def forward(
        self, x: Rows, low: torch.Tensor, inputs: AttentionInputs
    ) -> AttentionMetadata | None:
        """Write the keys of x [T, hidden], and choose what each token attends to.

        Args:
            low: [T, q_lora_rank], the normed low-rank queries.

        Returns:
            T sequences of one query, with the slots of the chosen tokens as blocks of one token;
            None where contexts are so short that all tokens are chosen.
        """
        metadata = inputs.metadata
        if self._may_be_dense and metadata.max_context_len <= self.topk:
            self.write(x, inputs)
            return None
        q = self.wq_b(low).view(len(inputs.positions), self.num_heads, self.head_dim)
        q = self._rotate_and_write(q, x, inputs)
        weights = self.weights_proj(unrounded(x))
        slots, counts, starts = self._choose(q, weights, self.kv_cache, metadata, self.topk)
        return AttentionMetadata(
            slot_mapping=metadata.slot_mapping,
            block_tables=slots,
            block_counts=counts,
            context_lens=counts,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            max_context_len=slots.shape[1],
            query_lens_cpu=(1,) * len(counts),
            context_lens_cpu=None,
        )

    def write(self, x: Rows, inputs: AttentionInputs) -> None:
        """Write the keys of x [T, hidden] alone."""
        self._rotate_and_write(None, x, inputs)

    def _rotate_and_write(
        self, q: torch.Tensor | None, x: Rows, inputs: AttentionInputs
    ) -> torch.Tensor:
        """Write the keys -> the rotated queries [T, heads, head_dim], if there are any."""
        key = self.k_norm(self.wk(unrounded(x)))[:, None]
        # The rotation takes queries, too.
        rotated: torch.Tensor
        rotated, key = self._rope(
            inputs.positions,
            key if q is None else q,
            key,
            inputs.rotary.cos_sin,
            self._interleaved,
        )
        half = self.head_dim // 2
        key = key[:, 0]
        self._write(key[:, :half], key[:, half:], self.kv_cache, inputs.metadata.slot_mapping)
        return rotated
