"""Latent attention of prompts with aiter's flash attention, over keys and values built of latents.

They are built of at most `MOST_EXPANDED_TOKENS` cached tokens at once, or of as many as the longest
prompt has new ones, so memory does not grow with what sequences have cached. Sequences whose
contexts fit together are one call; a longer context is cut into pieces, of which the last has all
queries, and their results are joined by the logarithms of their sums. See `kernels.torch.mla`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from atom.model_ops.attention.metadata import (
    MOST_EXPANDED_TOKENS,
    AttentionMetadata,
    LatentCacheTensor,
)
from atom.model_ops.kernels.aiter.attention import known_context_lens
from atom.model_ops.kernels.aiter.sequences import token_starts
from atom.model_ops.kernels.aiter.support import refuses_storage, requires
from atom.model_ops.kernels.packed_cache import FLASH_ATTENTION
from atom.model_ops.kernels.probe import function
from atom.model_ops.kernels.torch.fp8 import bits, dequantise
from atom.model_ops.kernels.triton.attention.list_slots import list_slots
from atom.model_ops.registry import OpQuery

_MAX_V_HEAD_DIM = 256


def _refuses_values(query: OpQuery) -> str | None:
    if query.shape["v_head_dim"] > _MAX_V_HEAD_DIM:
        return f"v_head_dim={query.shape['v_head_dim']} is above {_MAX_V_HEAD_DIM}"
    return refuses_storage(query)


refuses = requires(FLASH_ATTENTION, also=_refuses_values)


@dataclass(frozen=True)
class _Piece:
    """Keys of sequences side by side, for all their queries.

    Attributes:
        block_tables: [N, width] int32, from the block of the first key on.
        skipped: tokens of that block before the first key; 0 for more than one sequence.
        lens: [N] int32, keys of each sequence and what is skipped.
        starts: [N + 1] int32, where each sequence's keys begin.
        total, longest: of the lens.
        is_last: the queries' own keys are among them.
    """

    block_tables: torch.Tensor
    skipped: int
    lens: torch.Tensor
    starts: torch.Tensor
    total: int
    longest: int
    is_last: bool


@dataclass(frozen=True)
class _Group:
    """Sequences side by side whose keys and values are built together.

    Attributes:
        rows: their queries.
        query_starts: [N + 1] int32, offsets of each sequence's queries.
        max_queries: of a sequence.
        pieces: several of one sequence only.
    """

    rows: slice
    query_starts: torch.Tensor
    max_queries: int
    pieces: Sequence[_Piece]


def mla_prefill(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Causal attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    Assumes that values may be narrower than keys.

    Raises:
        ValueError: when the context lengths are unknown on the host.
    """
    lens = known_context_lens(metadata)
    room = max(MOST_EXPANDED_TOKENS, metadata.max_seqlen_q)
    groups = metadata.derive(
        ("expanded groups", room, kv_cache.block_size),
        lambda: list(_groups(metadata, lens, kv_cache.block_size, room)),
    )
    if len(groups) == 1 and len(groups[0].pieces) == 1:
        return _attend(q, kv_cache, up_proj, groups[0], scale)
    heads, rows, rank = up_proj.shape
    nope = q.shape[2] - (kv_cache.latent.shape[2] - rank)
    out = q.new_empty(q.shape[0], heads, rows - nope)
    for group in groups:
        out[group.rows] = _attend(q[group.rows], kv_cache, up_proj, group, scale)
    return out


def _groups(
    metadata: AttentionMetadata, lens: Sequence[int], block_size: int, room: int
) -> Iterator[_Group]:
    """Groups of at most `room` keys a piece, in order."""
    edges = [0, *accumulate(metadata.query_lens_cpu)]
    first = 0
    while first < len(lens):
        end, total = first + 1, lens[first]
        while end < len(lens) and total + lens[end] <= room:
            total += lens[end]
            end += 1
        pieces = (
            [_together(metadata, lens, first, end)]
            if total <= room
            else [_piece(metadata, first, *span, block_size) for span in _spans(total, room)]
        )
        starts = metadata.cu_seqlens_q[first : end + 1]
        yield _Group(
            slice(edges[first], edges[end]),
            starts - edges[first] if first else starts,
            max(metadata.query_lens_cpu[first:end]),
            pieces,
        )
        first = end


def _spans(context: int, room: int) -> list[tuple[int, int]]:
    """Where pieces of a context begin and end; only the first may be of less than `room` keys."""
    ends = list(range(context, 0, -room))[::-1]
    return [(max(end - room, 0), end) for end in ends]


def _together(metadata: AttentionMetadata, lens: Sequence[int], first: int, end: int) -> _Piece:
    """Whole contexts."""
    own = metadata.context_lens[first:end]
    tables = metadata.block_tables[first:end]
    total, longest = sum(lens[first:end]), max(lens[first:end])
    return _Piece(tables, 0, own, token_starts(own), total, longest, True)


def _piece(
    metadata: AttentionMetadata, sequence: int, first: int, end: int, block_size: int
) -> _Piece:
    """Keys `first` to `end` of one sequence."""
    block, skipped = divmod(first, block_size)
    count = end - first + skipped
    own = metadata.context_lens.new_full((1,), count)
    tables = metadata.block_tables[sequence : sequence + 1, block:]
    is_last = end == known_context_lens(metadata)[sequence]
    return _Piece(tables, skipped, own, token_starts(own - skipped), count, count, is_last)


def _attend(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    group: _Group,
    scale: float,
) -> torch.Tensor:
    """`mla_prefill` of a group's queries."""
    q = q.contiguous()
    if len(group.pieces) == 1:
        return _visit(q, kv_cache, up_proj, group, group.pieces[0], scale)[0]
    first, *others = group.pieces
    part, top = _visit(q, kv_cache, up_proj, group, first, scale)
    out = part.float()
    for piece in others:
        part, lse = _visit(q, kv_cache, up_proj, group, piece, scale)
        # Of both parts' weights, the share of the new one.
        out.lerp_(part.float(), torch.sigmoid(lse - top).t()[:, :, None])
        top = torch.logaddexp(top, lse)
    return out.to(q.dtype)


def _visit(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    group: _Group,
    piece: _Piece,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a group's queries over a piece's keys -> [T, heads, v], and the natural
    logarithms of the sums of weights [heads, T], if there are several pieces.

    The causal mask aligns the last query with the last key.
    """
    key, value = _expand(_latents(kv_cache, piece, q.dtype), q, up_proj)
    needs_sums = len(group.pieces) > 1
    found = function(FLASH_ATTENTION)(
        q,
        key,
        value,
        group.query_starts,
        piece.starts,
        group.max_queries,
        piece.longest - piece.skipped,
        softmax_scale=scale,
        causal=piece.is_last,
        return_lse=needs_sums,
    )
    return found if needs_sums else (found, q.new_empty(0))


def _latents(kv_cache: LatentCacheTensor, piece: _Piece, dtype: torch.dtype) -> torch.Tensor:
    """[C, rank + rope] of a piece's keys."""
    where = piece.block_tables, piece.lens, piece.starts
    slots = list_slots(*where, kv_cache.block_size, piece.longest, piece.total)
    latent = bits(kv_cache.latent).flatten(0, 1)[slots[piece.skipped :]]
    latent = latent.view(kv_cache.latent.dtype)
    return latent if kv_cache.scale is None else dequantise(latent, kv_cache.scale, dtype)


def _expand(
    latents: torch.Tensor, q: torch.Tensor, up_proj: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """latents [C, rank + rope] -> keys [C, heads, nope + rope], values [C, heads, v]."""
    heads, rows, rank = up_proj.shape
    nope = q.shape[2] - (latents.shape[1] - rank)
    both = F.linear(latents[:, :rank], up_proj.reshape(heads * rows, rank))
    built, value = torch.split_with_sizes(both.view(-1, heads, rows), [nope, rows - nope], dim=2)
    shared = latents[:, None, rank:].expand(-1, heads, -1)
    return torch.cat((built, shared), dim=2), value.contiguous()
