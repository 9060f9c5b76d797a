"""Paged attention whose queries have the same bits in every batch, for `--batch-invariant`.

A query of a prompt, of a verified draft and of a decoding sequence goes through the same kernels
(`fixed_splits`). It is one op for all lengths by its arithmetic, but two functions: of a step with
both kinds, sequences of few and of many queries are launched apart, so that a few long ones do not
size the grid of all.
"""

from __future__ import annotations

from functools import partial

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.triton.attention.fixed_splits import in_rounds, num_seen_splits
from atom.model_ops.kernels.triton.attention.paged_attention import attend_fixed_splits


def _attend(
    causal: bool,
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [T, heads, d] over the paged cache -> [T, heads, d], any lengths.

    The last query of a sequence sits at the last position of its context; the result of a query
    without visible keys is zero.

    Args:
        causal: else queries see the keys after them, too.

    Raises:
        ValueError: when the tensors do not fit together.
    """
    visit = partial(
        attend_fixed_splits,
        q=q,
        kv_cache=kv_cache,
        metadata=metadata,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        causal=causal,
    )
    splits = num_seen_splits(metadata.max_context_len, sliding_window, metadata.max_seqlen_q)
    return in_rounds(visit, splits, q.new_empty(q.shape), sinks)


paged_attention = partial(_attend, True)
prefill_attention = partial(_attend, True)
block_attention = partial(_attend, False)
