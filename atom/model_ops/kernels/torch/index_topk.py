"""The indexer of sparse attention in plain torch: scores, the choice by them, and attention to it.

Source: DeepSeek-V3.2-Exp's report, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.torch.mla import mla_attention
from atom.model_ops.kernels.torch.paged import by_query_length, gather_blocks, longest_context

# Products of queries and keys, or gathered numbers, that are in memory together, unless one query
# has more.
_MOST_NUMBERS = 1 << 26
_NONE = torch.iinfo(torch.int64).min


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: LatentCacheTensor,
    metadata: AttentionMetadata,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `topk` tokens of each query's context with the highest scores, all if they are fewer.

    Token s has the score `sum over h of weights[t, h] * relu(q[t, h] . key[s])`, in float32; of
    equal scores, earlier tokens have the higher ones. They are listed by position.

    Args:
        q: [T, heads, size], rotated.
        weights: [T, heads] float32.
        kv_cache: keys [num_blocks, block_size, size].

    Returns:
        Their slots [T, topk] int32, or fewer columns where no context has so many tokens, and -1
        behind the last; how many they are [T] int32; and 0 to T [T + 1] int32, but no more than
        there are tokens of sequences.
    """
    places = QueryPlaces.of(metadata, q.shape[0])
    longest = longest_context(metadata, list(range(len(metadata.query_lens_cpu))))
    slots = weights.new_full((q.shape[0], min(topk, longest)), -1, dtype=torch.int32)
    for length, rows, tokens in by_query_length(metadata, q.device):
        which = slice(0, len(rows) * length) if tokens is None else tokens
        width = longest_context(metadata, rows)
        own = places.select(which)
        if width <= topk:
            positions = torch.arange(width, device=q.device).expand(len(own.seen), -1)
        else:
            keys = gather_blocks(kv_cache.latent, None, metadata, rows, width, torch.float32)
            by_sequence = len(rows), length
            scores = _scores(
                q[which].view(*by_sequence, *q.shape[1:]),
                weights[which].view(*by_sequence, -1),
                keys,
            )
            positions = choose(scores.flatten(0, 1), own.seen, topk)
        slots[which, : positions.shape[1]] = own.slots(positions, metadata, kv_cache.block_size)
    return slots, places.seen.clamp(max=topk), places.starts


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [b, L, heads, size], weights [b, L, heads], keys [b, C, size] float32 -> [b, L, C]."""
    count, length, heads = weights.shape
    at_once = max(1, _MOST_NUMBERS // (count * heads * keys.shape[1]))
    found = []
    for first in range(0, length, at_once):
        some = slice(first, first + at_once)
        products = torch.einsum("blhd,bcd->blhc", q[:, some].float(), keys).relu_()
        found.append(torch.einsum("blhc,blh->blc", products, weights[:, some]))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def choose(scores: torch.Tensor, seen: torch.Tensor, topk: int) -> torch.Tensor:
    """The positions [R, topk] of the highest of the first `seen` [R] scores [R, C], ascending.

    Of equal scores, the first are higher, and NaN is lower than all. Where fewer are seen, what
    follows them is not less than `seen`.
    """
    width = scores.shape[1]
    at = torch.arange(width, device=scores.device)
    bits = (scores + 0.0).view(torch.int32)  # of -0, too
    # As integers that have the same order, above the places, the first of which count most.
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    order = order.masked_fill_(scores.isnan(), torch.iinfo(torch.int32).min + 1)
    unique = (order << 32) | (width - 1 - at)
    unique = unique.masked_fill_(at >= seen[:, None], _NONE)
    found = unique.topk(topk, sorted=False).indices
    return found.masked_fill_(found >= seen[:, None], width).sort(-1).values


@dataclass(frozen=True)
class QueryPlaces:
    """Where T queries are.

    Attributes:
        sequence: [T] int64, of each.
        seen: [T] int32, tokens that each sees; 0 behind the last sequence.
        starts: [T + 1] int32, as `index_topk` returns them.
    """

    sequence: torch.Tensor
    seen: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, metadata: AttentionMetadata, num_tokens: int) -> QueryPlaces:
        ends, contexts = metadata.cu_seqlens_q[1:], metadata.context_lens
        at = torch.arange(num_tokens + 1, dtype=torch.int32, device=ends.device)
        rows = at[:-1]
        sequence = torch.searchsorted(ends, rows, right=True).clamp_(max=len(contexts) - 1)
        own = contexts[sequence]
        seen = own - (ends[sequence] - rows) + 1
        if metadata.padding_lens is not None:
            seen = torch.minimum(seen, own - metadata.padding_lens[sequence])
        seen = seen.masked_fill(rows >= ends[-1], 0)
        return cls(sequence, seen, torch.minimum(at, ends[-1]))

    def select(self, rows: slice | torch.Tensor) -> QueryPlaces:
        """Some queries; `starts` stay."""
        return QueryPlaces(self.sequence[rows], self.seen[rows], self.starts)

    def slots(
        self, positions: torch.Tensor, metadata: AttentionMetadata, block_size: int
    ) -> torch.Tensor:
        """Those of `positions` [T, n], int32; -1 where they are not seen."""
        is_seen = positions < self.seen[:, None]
        # Whatever is not seen has an entry, too.
        blocks = (positions // block_size).clamp(max=metadata.block_tables.shape[1] - 1)
        block_ids = metadata.block_tables[self.sequence[:, None], blocks]
        found = block_ids * block_size + positions % block_size
        return found.int().masked_fill_(~is_seen, -1)


def mla_sparse(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """`mla_attention` of one query per sequence, of some at a time, since it copies what they see.

    Args:
        kv_cache: latents in blocks of one token.
    """
    tokens, width = q.shape[0], metadata.block_tables.shape[1]
    at_once = max(1, _MOST_NUMBERS // (width * kv_cache.latent.shape[2]))
    if tokens <= at_once:
        return mla_attention(q, kv_cache, up_proj, metadata, scale)
    parts = []
    for first in range(0, tokens, at_once):
        some = slice(first, first + at_once)
        count = len(q[some])
        part = replace(
            metadata,
            block_tables=metadata.block_tables[some],
            block_counts=metadata.block_counts[some],
            context_lens=metadata.context_lens[some],
            query_lens_cpu=(1,) * count,
        )
        parts.append(mla_attention(q[some], kv_cache, up_proj, part, scale))
    return torch.cat(parts)
