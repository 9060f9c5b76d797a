"""Latent attention of Kimi-K2.5 and DeepSeek-V3: 8 heads of one rank of eight, and all 128.

So many, 8 of 64, has Kimi-K3's draft, too.
"""

from __future__ import annotations

import dataclasses

import torch
from aot_case import Case, decode_metadata, pool

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.torch.index_topk import QueryPlaces
from atom.model_ops.kernels.triton.attention.list_slots import list_slots
from atom.model_ops.kernels.triton.mla.index_topk import score
from atom.model_ops.kernels.triton.mla.mla_absorb import NewLatents, absorb
from atom.model_ops.registry import Implementation, OpQuery

RANK, ROPE, NOPE, _V = 512, 64, 128, 128
_NUM_BLOCKS = 80
_BF16 = torch.bfloat16


def latent_shape(heads: int, block_size: int) -> dict[str, int]:
    return {
        "num_heads": heads,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": _V,
        "block_size": block_size,
        "num_blocks": _NUM_BLOCKS,
    }


def latent_cache(query: OpQuery) -> LatentCacheTensor:
    shape = (_NUM_BLOCKS, query.shape["block_size"], RANK + ROPE)
    storage = query.storage or query.dtype
    scale = torch.empty(1) if storage.itemsize == 1 else None
    return LatentCacheTensor(pool(shape, storage), scale)


def latent_arguments(query: OpQuery, metadata: AttentionMetadata) -> tuple[object, ...]:
    heads, tokens = query.shape["num_heads"], metadata.slot_mapping.shape[0]
    q = torch.empty(tokens, heads, NOPE + ROPE, dtype=query.dtype)
    up_proj = torch.empty(heads, NOPE + _V, RANK, dtype=query.dtype)
    return q, latent_cache(query), up_proj, metadata, 0.1


def _prompt(context: int, block_size: int, tokens: int) -> AttentionMetadata:
    """The end of one prompt, as long as the host knows it to be."""
    metadata = decode_metadata(1, tokens, context, block_size)
    return dataclasses.replace(metadata, context_lens_cpu=(context,))


def _write(query: OpQuery) -> tuple[object, ...]:
    latent = torch.empty(48, RANK, dtype=query.dtype)
    k_rope = torch.empty(48, ROPE, dtype=query.dtype)
    return latent, k_rope, latent_cache(query), torch.empty(48, dtype=torch.int64)


def _decode_case(
    heads: int,
    block_size: int,
    storage: torch.dtype | str,
    seqs: int,
    queries: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    padded: bool = False,
    is_block: bool = False,
) -> Case:
    op = "mla_block_attention" if is_block else "mla_decode"
    name = storage if isinstance(storage, str) else str(storage).removeprefix("torch.")
    metadata = decode_metadata(seqs, queries, 8192, block_size, padded=padded)
    has_warp_groups = storage is _BF16 and block_size == 64
    return Case(
        f"{op}/{seqs}x{queries}-heads{heads}-block{block_size}-{name}{'-padded' if padded else ''}",
        op,
        lambda query: latent_arguments(query, metadata),
        latent_shape(heads, block_size),
        dtype=dtype,
        storage=storage,
        # Exact products of float32 are no matrix instructions on sm90.
        matrix=() if dtype is torch.float32 else ("_absorbed_kernel",),
        warp_groups=("_absorbed_kernel",) if has_warp_groups else (),
        split="_absorbed_kernel",
    )


def _prefill_case(
    heads: int, block_size: int, storage: torch.dtype | str, tokens: int, context: int
) -> Case:
    name = storage if isinstance(storage, str) else str(storage).removeprefix("torch.")
    return Case(
        f"mla_prefill/{tokens}of{context}-heads{heads}-block{block_size}-{name}",
        "mla_prefill",
        lambda query: latent_arguments(query, _prompt(context, block_size, tokens)),
        latent_shape(heads, block_size),
        storage=storage,
        matrix=("_visit_kernel",),
        warp_groups=("_visit_kernel",),
        split="_visit_kernel",
    )


def _write_case(storage: torch.dtype | str) -> Case:
    name = storage if isinstance(storage, str) else str(storage).removeprefix("torch.")
    return Case(
        f"mla_cache_write/{name}", "mla_cache_write", _write, latent_shape(8, 64), storage=storage
    )


@dataclasses.dataclass(frozen=True)
class _Slots(Case):
    """What an adapter launches before a library's kernel."""

    def entry(self) -> Implementation:
        return Implementation("triton", lambda _: None, lambda: list_slots)


def _slots_case(sequences: int, context: int, *, padded: bool) -> Case:
    def arguments(_: OpQuery) -> tuple[object, ...]:
        metadata = decode_metadata(sequences, 4, context, 64)
        lens, padding = metadata.context_lens, torch.empty(sequences, dtype=torch.int32)
        where = metadata.block_tables, lens, metadata.cu_seqlens_q, 64, context
        return *where, sequences * context, padding if padded else None

    name = f"list_slots/{sequences} of {context}{' padded' if padded else ''}"
    return _Slots(name, "list_slots", arguments, {})


@dataclasses.dataclass(frozen=True)
class _Scores(Case):
    """What `index_topk` launches before the choice, which is PyTorch's."""

    def entry(self) -> Implementation:
        return Implementation("triton", lambda _: None, lambda: score)


def _scores_case(heads: int, queries: int, block_size: int) -> Case:
    def arguments(_: OpQuery) -> tuple[object, ...]:
        metadata = decode_metadata(4, queries, 8192, block_size)
        rows = 4 * queries
        at = torch.empty(rows, dtype=torch.int32)
        places = QueryPlaces(at.long(), at, torch.empty(rows + 1, dtype=torch.int32))
        keys = LatentCacheTensor(pool((_NUM_BLOCKS, block_size, 128), _BF16))
        q, weights = torch.empty(rows, heads, 128, dtype=_BF16), torch.empty(rows, heads)
        return q, weights, keys, metadata, places, 8192

    return _Scores(
        f"index_topk/{heads} heads, block{block_size}, {queries} queries",
        "index_topk",
        arguments,
        {},
        matrix=("_score_kernel",),
    )


@dataclasses.dataclass(frozen=True)
class _Absorb(Case):
    """What an adapter launches before a library's attention."""

    def entry(self) -> Implementation:
        return Implementation("triton", lambda _: None, lambda: absorb)


def _absorb_case(
    tokens: int,
    heads: int,
    num_heads: int,
    *,
    is_step: bool,
    storage: torch.dtype | str = _BF16,
) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        q = torch.empty(tokens, heads, NOPE + ROPE, dtype=query.dtype)
        up_proj = torch.empty(heads, NOPE + _V, RANK, dtype=query.dtype)
        integers = torch.empty(tokens, dtype=torch.int64)
        rows = torch.empty(tokens, RANK + ROPE, dtype=query.dtype)
        table = torch.empty(8192, ROPE)
        new = NewLatents(integers, integers, rows[:, :RANK], rows[:, RANK:], table, True)
        return q, up_proj, latent_cache(query), num_heads, new if is_step else None

    name = f"absorb/{tokens} of {heads} heads to {num_heads}{' in a step' if is_step else ''}"
    return _Absorb(
        name if storage == _BF16 else f"{name}, {storage}",
        "absorb",
        arguments,
        latent_shape(heads, 64),
        storage=storage,
        matrix=("_absorb",),
    )


CASES = (
    # Split over the context, in tiles of 16, 32 and 64 rows.
    _decode_case(8, 64, _BF16, 4, 1),
    _decode_case(8, 16, _BF16, 4, 1),
    _decode_case(8, 64, "fp8", 4, 1),
    _decode_case(8, 64, _BF16, 4, 4),
    _decode_case(8, 16, "fp8", 4, 4),
    _decode_case(8, 64, "fp8", 4, 4),
    _decode_case(8, 64, _BF16, 4, 4, padded=True),
    _decode_case(128, 64, _BF16, 4, 4, padded=True),
    _decode_case(128, 64, _BF16, 4, 1),
    _decode_case(128, 16, "fp8", 4, 1),
    _decode_case(128, 64, "fp8", 4, 1),
    _decode_case(8, 64, torch.float32, 4, 1, torch.float32),
    # A block of eight drafts.
    _decode_case(8, 64, _BF16, 4, 8, is_block=True),
    # So many programs that nothing is split.
    _decode_case(8, 64, _BF16, 500, 1),
    _prefill_case(8, 64, _BF16, 256, 8192),  # split
    _prefill_case(8, 16, _BF16, 256, 512),
    _prefill_case(8, 64, "fp8", 256, 512),
    _prefill_case(8, 64, _BF16, 256, 40960),  # split, and two rounds, the first of 32768 keys
    _prefill_case(128, 64, _BF16, 256, 2304),  # two rounds, the first of 2048 keys
    # Sparse attention: DeepSeek-V3.2's indexer and GLM-5's; latents in blocks of one token.
    _scores_case(64, 1, 64),
    _scores_case(64, 4, 16),
    _scores_case(32, 512, 64),
    _decode_case(128, 1, _BF16, 64, 1),
    _write_case(_BF16),
    _write_case("fp8"),
    _absorb_case(8, 64, 128, is_step=True),
    _absorb_case(256, 8, 16, is_step=True),
    _absorb_case(256, 8, 16, is_step=False),
    _absorb_case(256, 8, 16, is_step=True, storage="fp8"),
    _slots_case(256, 131072, padded=True),
    _slots_case(1, 512, padded=False),
)
