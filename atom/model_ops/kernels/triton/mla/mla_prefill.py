"""MLA attention for prefill: expands latents to keys and values of every head, in bounded rounds.

Whether expanding is cheaper depends on the sequence. Building a key and a value costs `rank * (nope
+ v)` products per head and cached token, shared by all queries; each query then saves `2 * rank -
nope - v` compared with the latent space. So a batch is cut into runs of short and of long sequences
(`absorb_limit`: 170 queries for DeepSeek-V3 and Kimi-K2). Short ones, such as decoding sequences
beside a prefill chunk, go to the absorbed kernel, whatever their context length; long ones are
expanded here.

Expansion goes in rounds, so its memory does not grow with the context: a kernel gathers the round's
latents from the paged cache, one dense product expands them to keys and values, and a causal
attention kernel runs over them. A query with keys in a later round keeps its running maximum, sum
and weighted values in memory. Where tiles of queries and heads do not fill the device, the keys
that a tile sees in a round are split over programs, each with sums of its own, which are joined at
the end.

All sizes follow from the lengths on the host; no device tensor is read there. Which sequences and
keys a launch is about is the same in every layer, so it is found and uploaded once a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import (
    MOST_EXPANDED_TOKENS,
    AttentionMetadata,
    LatentCacheTensor,
)
from atom.model_ops.kernels.torch.mla import absorb_limit
from atom.model_ops.kernels.triton.attention.flash import (
    LOG2_E,
    load_rows,
    nothing_seen,
    padded,
    soften,
)
from atom.model_ops.kernels.triton.attention.paged_attention import join_parts
from atom.model_ops.kernels.triton.attention.prefill_attention import num_splits
from atom.model_ops.kernels.triton.mla.mla_decode import attend_absorbed
from atom.model_ops.kernels.triton.splits import compute_units, side_by_side
from atom.model_ops.upload import upload
from atom.platform import current_platform

# In which rounds `mla_prefill` expands the contexts of a batch.

PIECE_FIELDS = 4


def plan_rounds(contexts: Sequence[int], room: int) -> list[list[tuple[int, int, int, int]]]:
    """Split contexts into rounds of at most `room` tokens: lists of (sequence, first key, end,
    row).

    A sequence has at most one piece per round, in ascending order; `row` is the position of the
    piece's first key in the round.
    """
    rounds: list[list[tuple[int, int, int, int]]] = [[]]
    row = 0
    for sequence, context in enumerate(contexts):
        first = 0
        while first < context:
            if row == room:
                rounds.append([])
                row = 0
            end = min(context, first + room - row)
            rounds[-1].append((sequence, first, end, row))
            row += end - first
            first = end
    return rounds


@dataclass(frozen=True)
class Round:
    """Attributes:
    pieces: [P, 4] int32, as `plan_rounds` has them.
    used: tokens of all pieces.
    longest: tokens of the longest.
    """

    pieces: torch.Tensor
    used: int
    longest: int


def expansion_rounds(metadata: AttentionMetadata, room: int) -> list[Round]:
    """The rounds of at most `room` tokens, in one copy to the device."""
    contexts = metadata.context_lens_cpu
    if contexts is None:
        contexts = (metadata.max_context_len,) * len(metadata.query_lens_cpu)
    plan = plan_rounds(contexts, room)
    flat = torch.tensor([piece for pieces in plan for piece in pieces], dtype=torch.int32)
    there = upload(flat, metadata.block_tables.device)
    parts = torch.split_with_sizes(there, [len(pieces) for pieces in plan])
    lens = [[end - first for _, first, end, _ in pieces] for pieces in plan]
    return [Round(part, sum(own), max(own)) for part, own in zip(parts, lens, strict=True)]


# Keys and values of one round of `MOST_EXPANDED_TOKENS` at most: 128 MiB in 16-bit types.
_ROUND_ELEMENTS = 1 << 26
_GATHERED_TOKENS = 16
# Programs of the attention kernel that a unit runs side by side.
_RESIDENT = 1
# On ROCm every warp holds whole tiles of keys and values, and those of 8 warps do not fit.
_WARPS = 4 if current_platform().kind == "rocm" else 8
_SLICES = ["pieces_ptr", "tables_ptr", "contexts_ptr", "starts_ptr", "q_ptr", "out_ptr"]


def mla_prefill(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Causal attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    The last query of a sequence sits at the last position of its context. Any lengths.
    """
    heads, up_rows, rank = up_proj.shape
    nope = q.shape[-1] - (kv_cache.latent.shape[-1] - rank)
    out = q.new_empty(q.shape[0], heads, up_rows - nope)
    for short, tokens, run in _runs(metadata, absorb_limit(rank, up_rows)):
        attend = attend_absorbed if short else _attend_expanded
        attend(q[tokens], kv_cache, up_proj, run, scale, out[tokens])
    return out


# Sequences side by side: whether they are short, their tokens, and their metadata.
_Run = tuple[bool, slice, AttentionMetadata]


def _runs(metadata: AttentionMetadata, limit: float) -> Sequence[_Run]:
    """Runs of sequences with at most `limit` queries, or with more."""
    lens = metadata.query_lens_cpu
    if metadata.max_seqlen_q <= limit or min(lens) > limit:
        return [(metadata.max_seqlen_q <= limit, slice(0, sum(lens)), metadata)]
    return metadata.derive(("latent runs", limit), lambda: list(_cut(metadata, limit)))


def _cut(metadata: AttentionMetadata, limit: float) -> Iterator[_Run]:
    lens = metadata.query_lens_cpu
    starts = [0, *accumulate(lens)]
    for short, group in groupby(range(len(lens)), lambda b: lens[b] <= limit):
        members = list(group)
        first, end = members[0], members[-1] + 1
        tokens = slice(starts[first], starts[end])
        yield short, tokens, _select(metadata, slice(first, end), tokens)


def _select(metadata: AttentionMetadata, rows: slice, tokens: slice) -> AttentionMetadata:
    """The metadata of some sequences of a batch."""
    known = metadata.context_lens_cpu
    lens = metadata.query_lens_cpu[rows]
    starts = metadata.cu_seqlens_q[rows.start : rows.stop + 1]
    return dataclasses.replace(
        metadata,
        slot_mapping=metadata.slot_mapping[tokens],
        block_tables=metadata.block_tables[rows],
        block_counts=metadata.block_counts[rows],
        context_lens=metadata.context_lens[rows],
        cu_seqlens_q=starts - tokens.start if tokens.start else starts,
        max_seqlen_q=max(lens),
        max_context_len=metadata.max_context_len if known is None else max(known[rows]),
        query_lens_cpu=lens,
        context_lens_cpu=None if known is None else known[rows],
    )


def _attend_expanded(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`mla_prefill` into `out` [T, heads, v]."""
    heads, up_rows, rank = up_proj.shape
    room = min(max(_ROUND_ELEMENTS // (heads * up_rows), 1), MOST_EXPANDED_TOKENS)
    rounds = metadata.derive(("latent rounds", room), lambda: expansion_rounds(metadata, room))
    most = max(each.used for each in rounds)
    gathered = q.new_empty(most, kv_cache.latent.shape[-1])
    expanded = q.new_empty(most, heads, up_rows)
    sums = _sums(q, out, rounds, metadata)
    dense = up_proj.reshape(heads * up_rows, rank).t()
    for each in rounds:
        used = each.used
        _gather(kv_cache, metadata, each, gathered)
        torch.mm(gathered[:used, :rank], dense, out=expanded[:used].view(used, -1))
        _visit(q, gathered, expanded, metadata, each.pieces, scale, sums)
    if sums.lse is not None:
        join_parts(out, sums.out, sums.lse)


@dataclass(frozen=True)
class _Sums:
    """Where the attention kernel leaves its results.

    Attributes:
        out: [T, heads, splits, v] float32, or without splits the attention's own output.
        lse: [T, heads, splits] float32, None without splits.
        state: between rounds, weighted values, then their sum and maximum; [T, heads, splits,
            v + 2] float32, None with one round.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    state: torch.Tensor | None
    splits: int


def _sums(
    q: torch.Tensor, out: torch.Tensor, rounds: Sequence[Round], metadata: AttentionMetadata
) -> _Sums:
    heads, v_dim = out.shape[1:]
    pieces = max(len(each.pieces) for each in rounds)
    programs = triton.cdiv(metadata.max_seqlen_q, _tiles(q)[0]) * heads * pieces
    longest = max(each.longest for each in rounds)
    splits = num_splits(programs, longest, side_by_side(compute_units(), _RESIDENT))
    parts, lse, state = out, None, None
    if splits > 1:
        parts = q.new_empty(q.shape[0], heads, splits, v_dim, dtype=torch.float32)
        lse = q.new_empty(q.shape[0], heads, splits, dtype=torch.float32)
    if len(rounds) > 1:
        state = q.new_empty(q.shape[0], heads, splits, v_dim + 2, dtype=torch.float32)
    return _Sums(parts, lse, state, splits)


def _tiles(q: torch.Tensor) -> tuple[int, int, int]:
    """Queries and keys of a tile, and warps."""
    return (64, 32, 4) if q.dtype is torch.float32 else (128, 64, _WARPS)


def _gather(
    kv_cache: LatentCacheTensor,
    metadata: AttentionMetadata,
    plan: Round,
    gathered: torch.Tensor,
) -> None:
    """Copy a round's latents and rotated key parts to rows of `gathered`."""
    latent = kv_cache.latent
    _gather_kernel[(triton.cdiv(plan.longest, _GATHERED_TOKENS), len(plan.pieces))](
        latent, kv_cache.scale,
        metadata.block_tables, metadata.context_lens, plan.pieces, gathered,
        latent.stride(0), latent.stride(1), metadata.block_tables.stride(0),
        WIDTH=latent.shape[2], PADDED=padded(latent.shape[2]), BLOCK_SIZE=kv_cache.block_size,
        TOKENS=_GATHERED_TOKENS, FIELDS=PIECE_FIELDS, num_warps=4,
    )  # fmt: skip


def _visit(
    q: torch.Tensor,
    gathered: torch.Tensor,
    expanded: torch.Tensor,
    metadata: AttentionMetadata,
    pieces: torch.Tensor,
    scale: float,
    sums: _Sums,
) -> None:
    """Attend from all queries to a round's keys."""
    heads, v_dim = q.shape[1], sums.out.shape[-1]
    nope = expanded.shape[2] - v_dim
    rope = q.shape[2] - nope
    rows, keys, warps = _tiles(q)
    grid = (triton.cdiv(metadata.max_seqlen_q, rows), heads, len(pieces) * sums.splits)
    _visit_kernel[grid](
        q, gathered, expanded, pieces, metadata.context_lens, metadata.cu_seqlens_q,
        sums.out, sums.lse, sums.state, scale * LOG2_E,
        q.stride(0), q.stride(1), gathered.stride(0), expanded.stride(0), expanded.stride(1),
        sums.splits,
        HEADS=heads, RANK=gathered.shape[1] - rope, NOPE=nope, ROPE=rope, V=v_dim,
        NOPE_PADDED=padded(nope), ROPE_PADDED=padded(rope), V_PADDED=padded(v_dim),
        ROWS=rows, KEYS=keys, FIELDS=PIECE_FIELDS,
        num_warps=warps, num_stages=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_SLICES)
def _gather_kernel(
    cache_ptr,
    scale_ptr,
    tables_ptr,
    contexts_ptr,
    pieces_ptr,
    gathered_ptr,
    cache_block_stride,
    cache_token_stride,
    table_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Grid: tiles of tokens, pieces."""
    piece_ptr = pieces_ptr + tl.program_id(1) * FIELDS
    sequence, first, row = tl.load(piece_ptr), tl.load(piece_ptr + 1), tl.load(piece_ptr + 3)
    end = tl.minimum(tl.load(piece_ptr + 2), tl.load(contexts_ptr + sequence))
    offsets = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    keys = first + offsets
    inside = keys < end
    columns = tl.arange(0, PADDED)
    # Block ids are int32, and the product with the stride can overflow.
    block = tl.load(
        tables_ptr + sequence.to(tl.int64) * table_stride + keys // BLOCK_SIZE,
        mask=inside,
        other=0,
    ).to(tl.int64)
    at = block * cache_block_stride + keys % BLOCK_SIZE * cache_token_stride
    mask = inside[:, None] & (columns < WIDTH)
    values = tl.load(cache_ptr + at[:, None] + columns, mask=mask)
    if scale_ptr is not None:
        values = values.to(tl.float32) * tl.load(scale_ptr)
    to = (row + offsets).to(tl.int64) * WIDTH
    tl.store(
        gathered_ptr + to[:, None] + columns, values.to(gathered_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def _see(
    state, q_nope, q_rope, positions, up_ptr, rope_ptr, up_stride, rope_stride,
    first, end, score_scale,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    NOPE_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Attend to the keys in rows first .. end of a round, where queries have `positions`.

    Without CAUSAL they are whole tiles and all visible.
    """
    acc, total, top = state
    for start in range(first, end, KEYS):
        rows = start + tl.arange(0, KEYS)
        stored = rows
        if CAUSAL:
            # The last key is read again: the weights of these are zero.
            stored = tl.minimum(rows, end - 1)
        up_at = up_ptr + (stored * up_stride)[:, None]
        k_nope = load_rows(up_at, NOPE, NOPE_PADDED)
        k_rope = load_rows(rope_ptr + (stored * rope_stride)[:, None], ROPE, ROPE_PADDED)
        scores = tl.dot(q_nope, tl.trans(k_nope), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee") * score_scale
        if CAUSAL:
            visible = (rows <= positions[:, None]) & (rows < end)
            scores = tl.where(visible, scores, float("-inf"))
        weights, decay, total, top = soften(scores, total, top)
        v = load_rows(up_at + NOPE, V, V_PADDED)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, total, top


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=_SLICES)
def _visit_kernel(
    q_ptr, gathered_ptr, expanded_ptr, pieces_ptr, contexts_ptr, starts_ptr,
    out_ptr, lse_ptr, state_ptr, score_scale,
    q_token_stride, q_head_stride, gathered_stride, up_stride, up_head_stride, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    NOPE_PADDED: tl.constexpr, ROPE_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of queries (the longest first), heads, pieces times splits.

    A tile's keys of a piece are split evenly. Without lse_ptr there is one split, and the outputs
    are out [T, heads, v]. With: out [T, heads, splits, v] float32, the mean value of each split,
    and lse [T, heads, splits], log2 of its weight. State: [T, heads, splits, v + 2] float32.
    """
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    split = tl.program_id(2) % splits
    piece_ptr = pieces_ptr + tl.program_id(2) // splits * FIELDS
    sequence, first, row = tl.load(piece_ptr), tl.load(piece_ptr + 1), tl.load(piece_ptr + 3)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start - tile * ROWS  # from the tile on
    context = tl.load(contexts_ptr + sequence)
    position = context - length  # of the tile's first query
    seen_end = tl.minimum(position + ROWS, context)
    if (length <= 0) | (first >= seen_end):
        return
    piece_end = tl.load(piece_ptr + 2)
    share = tl.cdiv(tl.minimum(piece_end, seen_end) - first, splits * KEYS) * KEYS
    begin = first + split * share
    end = tl.minimum(begin + share, tl.minimum(piece_end, seen_end))
    all_seen = tl.maximum(tl.minimum(position + 1, end) - begin, 0) // KEYS * KEYS + begin

    # Rows beyond the last query are copies of it, so that no load and no store needs a mask.
    token = (start + tile * ROWS).to(tl.int64)
    queries = tl.minimum(tl.arange(0, ROWS), length - 1)
    q_at = q_ptr + token * q_token_stride + head * q_head_stride
    q_at += (queries * q_token_stride)[:, None]
    q_nope, q_rope = load_rows(q_at, NOPE, NOPE_PADDED), load_rows(q_at + NOPE, ROPE, ROPE_PADDED)
    # Places of results, from that of the tile's first query on.
    place = (token * HEADS + head) * splits + split
    places = queries * (HEADS * splits)
    acc, total, top = nothing_seen(ROWS, V_PADDED)
    if state_ptr is not None:
        state_at = state_ptr + place * (V + 2) + places * (V + 2)
        if first > 0:
            acc = load_rows(state_at[:, None], V, V_PADDED)
            total = tl.load(state_at + V)
            top = tl.load(state_at + V + 1)

    shift = row - first  # from keys to rows of the round
    up_ptr, rope_ptr = expanded_ptr + head * up_head_stride, gathered_ptr + RANK
    positions = position + shift + queries
    state = _see(
        (acc, total, top), q_nope, q_rope, positions, up_ptr, rope_ptr, up_stride, gathered_stride,
        begin + shift, all_seen + shift, score_scale,
        NOPE, ROPE, V, NOPE_PADDED, ROPE_PADDED, V_PADDED, KEYS, False,
    )  # fmt: skip
    acc, total, top = _see(
        state, q_nope, q_rope, positions, up_ptr, rope_ptr, up_stride, gathered_stride,
        all_seen + shift, end + shift, score_scale,
        NOPE, ROPE, V, NOPE_PADDED, ROPE_PADDED, V_PADDED, KEYS, True,
    )  # fmt: skip
    if piece_end < seen_end:
        if state_ptr is not None:
            _store_rows(state_at, acc, V, V_PADDED)
            tl.store(state_at + V, total)
            tl.store(state_at + V + 1, top)
    else:
        total = tl.where(total > 0, total, 1.0)  # splits without keys
        if lse_ptr is not None:
            tl.store(lse_ptr + place + places, top + tl.log2(total))
        mean = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        _store_rows(out_ptr + place * V + places * V, mean, V, V_PADDED)


@triton.jit
def _store_rows(row_ptrs, rows, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The first SIZE of PADDED numbers of each row to row_ptrs [N]."""
    columns = tl.arange(0, PADDED)[None, :]
    if SIZE == PADDED:
        tl.store(row_ptrs[:, None] + columns, rows)
    else:
        tl.store(row_ptrs[:, None] + columns, rows, mask=columns < SIZE)
