"""Paged attention of layers without grouped queries: the Eagle3 draft of Kimi-K2.5, and others."""

from __future__ import annotations

import torch
from aot_case import Case, decode_metadata, pool

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.registry import OpQuery

BLOCKS = 1024


def _case(
    name: str,
    num_heads: int,
    head_dim: int,
    num_seqs: int,
    queries: int,
    context: int,
    block_size: int,
    dtype: torch.dtype = torch.bfloat16,
    storage: torch.dtype | str | None = None,
    window: int | None = None,
    *,
    padded: bool = False,
) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        cached = query.storage or query.dtype
        q = torch.empty(num_seqs * queries, num_heads, head_dim, dtype=query.dtype)
        key, value = pool((2, BLOCKS, block_size, num_heads, head_dim), cached)
        scales = [torch.empty(1), torch.empty(1)] if cached.itemsize == 1 else [None, None]
        cache = KVCacheTensor(key, value, *scales)
        metadata = decode_metadata(num_seqs, queries, context, block_size, padded=padded)
        return q, cache, metadata, head_dim**-0.5, window

    return Case(
        f"paged_attention/gluon {name} {num_seqs}x{queries} of {context} in {block_size}",
        "paged_attention",
        arguments,
        {
            "num_heads": num_heads,
            "num_kv_heads": num_heads,
            "head_dim": head_dim,
            "block_size": block_size,
            "num_blocks": BLOCKS,
            "sliding_window": window or 0,
        },
        implementation="gluon",
        dtype=dtype,
        storage=storage or dtype,
        matrix=("_attend",),
        split="_attend",
        refused={"sm90": "written for gfx942 and gfx950"},
    )


CASES = (
    _case("kimi draft", 8, 128, 1, 1, 65536, 16),
    _case("kimi draft", 8, 128, 256, 4, 8192, 16),
    _case("kimi draft", 8, 128, 256, 1, 8192, 64),
    _case("kimi draft padded", 8, 128, 256, 4, 8192, 16, padded=True),
    _case("kimi draft fp8", 8, 128, 256, 4, 8192, 64, storage="fp8"),
    _case("kimi draft fp8 split", 8, 128, 1, 1, 65536, 128, storage="fp8"),
    _case("mha fp16 window", 32, 128, 64, 16, 8192, 32, torch.float16, window=4096),
    _case("small heads", 16, 64, 64, 4, 8192, 64),
    _case("small heads fp8", 16, 64, 64, 4, 8192, 16, storage="fp8"),
    _case("small heads fp8", 16, 64, 64, 4, 8192, 64, storage="fp8"),
)
