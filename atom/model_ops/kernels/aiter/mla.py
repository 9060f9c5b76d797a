"""Multi-head latent attention with aiter.

Decode is absorbed: a Triton kernel rotates queries, writes the cache and projects queries into the
latent space, and the assembly kernel reads one latent per token for all heads. Contexts are split
by a table, or where few sequences would leave compute units idle, by lists of work. Latents in 8
bits go to the kernel that multiplies them as bfloat16; those that multiply 8 bits with 8 bits also
round softmax's weights, and are not called. See `kernels.torch.mla`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atom.environment import op_override
from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.aiter.mla_work import MOST_QUERIES, WORK, list_work
from atom.model_ops.kernels.aiter.sequences import (
    equal_length,
    equal_queries,
    token_starts,
)
from atom.model_ops.kernels.aiter.support import (
    COMPUTE_UNITS,
    arch,
    refuses_storage,
    requires,
)
from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.kernels.torch.mla import Decode, RotateAndWrite
from atom.model_ops.kernels.triton.attention.list_slots import list_slots
from atom.model_ops.kernels.triton.mla.mla_absorb import NewLatents, absorb
from atom.model_ops.kernels.triton.mla.mla_decode import mla_decode as triton_decode
from atom.model_ops.kernels.triton.support import refuses_parts
from atom.model_ops.registry import OpQuery

# How aiter's latent decode splits contexts, and the device tables that tell it.

# Most splits of a context, and the fewest tokens of each that are worth one. aiter's kernel that
# joins them takes a sequence's queries and their splits one after another.
_MAX_SPLITS = 16
_SPLIT_TOKENS = 256
# Sequences of the first table of each number of splits.
_SEQUENCES = 1024


def num_splits(programs: int, max_context_len: int, compute_units: int) -> int:
    """The fewest splits that keep most of the device busy in every round of programs.

    Args:
        programs: their number without splits.
    """
    most = min(_MAX_SPLITS, max(1, max_context_len // _SPLIT_TOKENS))

    def busy(splits: int) -> float:
        split = programs * splits
        return split / (-(-split // compute_units) * compute_units)

    return max(range(1, most + 1), key=busy)


def leave_units_idle(programs: int, max_context_len: int, compute_units: int) -> bool:
    """Whether more splits than there may be would be worth it, and keep more units busy."""
    worth = max_context_len // _SPLIT_TOKENS
    return worth > _MAX_SPLITS and programs * _MAX_SPLITS < compute_units


class SplitTables:
    """Tables 0, n, 2n, ... int32 for n splits of each sequence.

    They are never freed, since captured graphs read them where they were at capture. A table is
    made at its first use: in a graph's warm-up run, not at its capture.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device], list[torch.Tensor]] = {}

    def table(self, sequences: int, splits: int, device: torch.device) -> torch.Tensor:
        """[sequences + 1]."""
        kept = self._kept.setdefault((splits, device), [])
        if not kept or len(kept[-1]) <= sequences:
            size = _SEQUENCES
            while size < sequences:
                size *= 2
            numbers = torch.arange(size + 1, dtype=torch.int32, device=device)
            kept.append(numbers * splits)
        return kept[-1][: sequences + 1]


SPLITS = SplitTables()


_DECODE = EntryPoint(
    "aiter.mla:mla_decode_fwd",
    "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q",
    "page_size nhead_kv sm_scale num_kv_splits num_kv_splits_indptr work_meta_data work_indptr "
    "work_info_set reduce_indptr reduce_final_map reduce_partial_map kv_scale",
)
# Head counts that the decode kernels are compiled for (bfloat16, without persistent work lists).
# Fewer heads are padded, which costs little: the latents are read once for all heads.
_HEADS = (16, 32, 64, 128)
# Rows (a head of a query) of a program.
_ROWS = {16: 128, 32: 64, 64: 64, 128: 128}
# Heads whose kernels all take lists of work where not all do: gfx942 runs others 16 at a time.
_LISTED_HEADS = 16
_RANK, _ROPE = 512, 64
# Most queries of a sequence that its latents are read for at once: a tile has 128 rows, and the
# kernels of 16 heads are made for 1, 4 and 8 queries. aiter tests up to 4.
_QUERIES = {16: 8}
_OTHER_QUERIES = 4
# Heads of the kernel for latents in 8 bits.
_HEADS_OF_8_BITS = 16
# A latent's place is a product of 32 bits in all kernels but a few of gfx950's.
_POOL_BYTES = 2**32 - 16
# Rows (a head of a query) of the largest tile of Triton's kernel.
_TRITON_ROWS = 64


@dataclass(frozen=True)
class _Pages:
    """The decode kernel's page arguments for N sequences; a page is one token.

    Attributes:
        queries: per sequence.
        query_starts, starts: [N + 1] int32, offsets of each sequence's queries and pages.
        indices: [C] int32, each page's slot; C may be more than there are pages.
        last_lens: [N] int32, tokens of the last page.
    """

    queries: int
    query_starts: torch.Tensor
    starts: torch.Tensor
    indices: torch.Tensor
    last_lens: torch.Tensor


def _refuses_latents(query: OpQuery) -> str | None:
    shape = query.shape
    if (shape["kv_lora_rank"], shape["qk_rope_head_dim"]) != (_RANK, _ROPE):
        given = f"{shape['kv_lora_rank']} + {shape['qk_rope_head_dim']}"
        return f"latents have {_RANK} + {_ROPE} elements, not {given}"
    if shape["num_heads"] > _HEADS[-1]:
        return f"num_heads={shape['num_heads']} is above {_HEADS[-1]}"
    return refuses_storage(query) or _refuses_pool(query) or _refuses_8_bits(query)


def _refuses_pool(query: OpQuery) -> str | None:
    slots = query.shape["num_blocks"] * query.shape["block_size"]
    storage = query.storage or query.dtype
    if (size := slots * (_RANK + _ROPE) * storage.itemsize) > _POOL_BYTES:
        return f"finds latents within 4 GiB, not in {size / 2**30:.1f} GiB of a layer"
    return None


def _refuses_8_bits(query: OpQuery) -> str | None:
    """Only one kernel for latents in 8 bits takes bfloat16 queries; it has 16 heads."""
    if query.storage == query.dtype:
        return None
    if (heads := query.shape["num_heads"]) > _HEADS_OF_8_BITS:
        return (
            f"reads an 8-bit cache for at most {_HEADS_OF_8_BITS} heads, not {heads}: kernels of "
            "more round queries and softmax's weights to 8 bits"
        )
    return None


refuses_decode = requires(
    _DECODE, COMPUTE_UNITS, *WORK, also=_refuses_latents, dtypes=(torch.bfloat16,)
)


def refuses_write_and_decode(query: OpQuery) -> str | None:
    """Why rotation, cache write and projection cannot be one kernel; None if they can."""
    if (wanted := op_override("mla_decode")) not in (None, "aiter"):
        return f"does the work of mla_decode, and ATOM_OP_MLA_DECODE={wanted}"
    one_kernel = refuses_parts("rope", "mla_cache_write", "mla_rope_and_cache")
    return one_kernel or refuses_decode(query)


def padded_heads(num_heads: int, queries: int) -> int:
    """The smallest number of heads, at least `num_heads`, with a kernel for so many queries.

    gfx942 has none for 64 heads and one query. gfx950's for 32 splits a context at multiples of 32
    tokens, and the kernel that joins the splits takes it for 16: of a context of less than 32
    tokens a split it would read what nobody wrote.
    """
    missing = {("gfx950", 32)} | ({("gfx942", 64)} if queries == 1 else set())
    return next(n for n in _HEADS if n >= num_heads and (arch(), n) not in missing)


def mla_decode(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Causal attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    As `_attend`, or by Triton where that reads the latents less often.
    """
    if _triton_reads_less(up_proj.shape[0], kv_cache, metadata):
        return triton_decode(q, kv_cache, up_proj, metadata, scale)
    return _attend(q, kv_cache, up_proj, metadata, scale, None)


def mla_write_and_decode(
    positions: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    rotate_and_write: RotateAndWrite,
    decode: Decode,
) -> torch.Tensor:
    """`mla_rope_and_cache`, then `mla_decode`, with one kernel before aiter's.

    Args:
        rotate_and_write, decode: called where aiter's does not run.
    """
    slots = metadata.slot_mapping
    if _triton_reads_less(up_proj.shape[0], kv_cache, metadata):
        q = rotate_and_write(positions, q, latent, k_rope, cos_sin, interleaved, kv_cache, slots)
        return decode(q, kv_cache, up_proj, metadata, scale)
    new = NewLatents(positions, slots, latent, k_rope, cos_sin, interleaved)
    return _attend(q, kv_cache, up_proj, metadata, scale, new)


def _attend(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    new: NewLatents | None,
) -> torch.Tensor:
    """`mla_decode`; with `new`, what it has is written first, and q is not rotated yet.

    The kernel needs equal query lengths, and few; others are cut into sequences of their own. A
    page is one token, so `kv_indices` are slots. Assumes that several queries of a sequence are
    masked causally, and that `kv_indices` is not read beyond the last of `kv_indptr`.
    """
    heads, rows, rank = up_proj.shape
    most = _most_queries(heads, kv_cache)
    pages = metadata.derive(
        ("latent pages", kv_cache.block_size, most),
        lambda: _pages(metadata, kv_cache.block_size, most),
    )
    carried = absorb(q, up_proj, kv_cache, padded_heads(heads, pages.queries), new)
    seen = q.new_empty(q.shape[0], carried.shape[1], rank)
    function(_DECODE)(
        carried,
        kv_cache.latent.view(-1, 1, 1, carried.shape[2]),
        seen,
        pages.query_starts,
        pages.starts,
        pages.indices,
        pages.last_lens,
        pages.queries,
        page_size=1,
        nhead_kv=1,
        sm_scale=scale,
        **_shares(pages, carried, kv_cache, metadata),
    )
    nope = q.shape[2] - (carried.shape[2] - rank)
    out = q.new_empty(q.shape[0], heads, rows - nope)
    values = up_proj[:, nope:].transpose(1, 2)
    torch.bmm(seen[:, :heads].transpose(0, 1), values, out=out.transpose(0, 1))
    return out


def _shares(
    pages: _Pages, q: torch.Tensor, kv_cache: LatentCacheTensor, metadata: AttentionMetadata
) -> dict[str, Any]:
    """The decode kernel's arguments that say which program reads what, and the scale of 8 bits.

    A split table is passed, since aiter would take it from a cache of 128 device tensors: graphs
    that were captured with one would read freed memory once it is evicted.
    """
    heads, dtypes = q.shape[1], (q.dtype, kv_cache.latent.dtype)
    context_len, count = metadata.max_context_len, len(pages.last_lens)
    if kv_cache.scale is None:
        units = function(COMPUTE_UNITS)()
        programs = count * -(-heads * pages.queries // _ROWS[heads])
        takes_lists = heads == _LISTED_HEADS or arch() != "gfx942"
        takes_lists = takes_lists and pages.queries <= MOST_QUERIES
        if not (takes_lists and leave_units_idle(programs, context_len, units)):
            splits = num_splits(programs, context_len, units)
            table = SPLITS.table(count, splits, q.device)
            return {"num_kv_splits": splits, "num_kv_splits_indptr": table}
    lists = metadata.derive(
        ("latent work", pages.queries, heads, dtypes),
        lambda: list_work(
            pages.query_starts,
            pages.starts,
            pages.last_lens,
            pages.queries,
            heads,
            context_len,
            dtypes,
        ),
    )
    return {**lists, "kv_scale": kv_cache.scale}


def _most_queries(num_heads: int, kv_cache: LatentCacheTensor) -> int:
    if kv_cache.scale is not None:
        return MOST_QUERIES
    heads = next(heads for heads in _HEADS if heads >= num_heads)
    return _QUERIES.get(heads, _OTHER_QUERIES)


def _triton_reads_less(
    num_heads: int, kv_cache: LatentCacheTensor, metadata: AttentionMetadata
) -> bool:
    """Whether Triton's kernel reads a sequence's latents less often: lengths that aiter's takes one
    by one, for which its tiles have several.
    """
    most = metadata.max_seqlen_q
    passes = most / equal_length(metadata, _most_queries(num_heads, kv_cache))
    return -(-most * num_heads // _TRITON_ROWS) < passes


def _pages(metadata: AttentionMetadata, block_size: int, most: int) -> _Pages:
    """Args:
    most: queries of a sequence.
    """
    queries = equal_queries(metadata, most)
    lens, count = metadata.context_lens_cpu, len(queries.context_lens)
    is_whole = queries.context_lens is metadata.context_lens
    longest = metadata.max_context_len
    bound = sum(lens) if lens is not None and is_whole else count * longest
    starts = token_starts(queries.context_lens)
    tables = queries.block_tables, queries.context_lens
    device = starts.device
    return _Pages(
        queries.length,
        torch.arange(count + 1, dtype=torch.int32, device=device) * queries.length,
        starts,
        list_slots(*tables, starts, block_size, longest, bound, queries.padding_lens),
        torch.ones(count, dtype=torch.int32, device=device),
    )
