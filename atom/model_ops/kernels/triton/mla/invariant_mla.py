"""Latent attention whose queries have the same bits in every batch, for `--batch-invariant`.

All queries, of prompts too, are absorbed: projected into the latent space, as in `mla_decode`, and
attended to in fixed splits of the keys. Both projections are products of `linear`. So long prompts
take up to some four times the operations of `mla_prefill`.
"""

from __future__ import annotations

from functools import partial

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.triton.attention.fixed_splits import in_rounds, num_splits
from atom.model_ops.kernels.triton.mla.mla_decode import attend_fixed_splits
from atom.model_ops.kernels.triton.products.linear import matrix_products
from atom.platform import current_platform


def _attend(
    causal: bool,
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    The last query of a sequence sits at the last position of its context. Any lengths.

    Args:
        causal: else queries see the keys after them, too.
    """
    return attend(current_platform().kind, q, kv_cache, up_proj, metadata, scale, causal)


mla_decode = partial(_attend, True)
# Apart from it, so that long sequences do not size the grid of short ones.
mla_prefill = partial(_attend, True)
mla_block_attention = partial(_attend, False)


def attend(
    kind: str,
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    causal: bool = True,
) -> torch.Tensor:
    """The same with the products' tiles of a platform `kind`."""
    tokens = q.shape[0]
    heads, up_rows, rank = up_proj.shape
    nope = q.shape[-1] - (kv_cache.latent.shape[-1] - rank)
    carried = q.new_empty(heads, tokens, rank)
    by_head = q[..., :nope].transpose(0, 1)
    matrix_products(kind, by_head, up_proj[:, :nope].transpose(1, 2), carried)
    visit = partial(
        attend_fixed_splits,
        carried=carried,
        q_rope=q[..., nope:],
        kv_cache=kv_cache,
        metadata=metadata,
        scale=scale,
        causal=causal,
    )
    seen = in_rounds(visit, num_splits(metadata.max_context_len), q.new_empty(tokens, heads, rank))
    out = q.new_empty(tokens, heads, up_rows - nope)
    matrix_products(kind, seen.transpose(0, 1), up_proj[:, nope:], out.transpose(0, 1))
    return out
