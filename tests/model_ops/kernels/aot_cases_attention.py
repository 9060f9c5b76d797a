"""Attention over a paged cache, and cache writes: Llama-3-8B, SmolLM2, Kimi-K2.5's draft at TP8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from aot_case import Case, decode_metadata, pool

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.registry import OpQuery

BLOCKS = 1024


@dataclass(frozen=True)
class Layer:
    """Query heads, KV heads and head size of one rank."""

    heads: int
    kv_heads: int
    head_dim: int

    def shape(self, block_size: int) -> dict[str, int]:
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "block_size": block_size,
            "num_blocks": BLOCKS,
        }

    def cache(self, query: OpQuery) -> KVCacheTensor:
        storage = query.storage or query.dtype
        shape = (2, BLOCKS, query.shape["block_size"], self.kv_heads, self.head_dim)
        key, value = pool(shape, storage)
        if storage.itemsize > 1:
            return KVCacheTensor(key, value)
        return KVCacheTensor(key, value, torch.empty(1), torch.empty(1))


LLAMA = Layer(32, 8, 128)
SMOLLM2 = Layer(9, 3, 64)
KIMI_DRAFT = Layer(8, 8, 128)
PHI = Layer(32, 32, 96)
GEMMA = Layer(8, 4, 256)
Storage = torch.dtype | str | None


def _attention(
    op: str,
    name: str,
    layer: Layer,
    num_seqs: int,
    queries: int,
    context: int,
    block_size: int,
    dtype: torch.dtype = torch.bfloat16,
    storage: Storage = None,
    window: int | None = None,
    *,
    padded: bool = False,
) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        q = torch.empty(num_seqs * queries, layer.heads, layer.head_dim, dtype=query.dtype)
        metadata = decode_metadata(num_seqs, queries, context, block_size, padded=padded)
        return q, layer.cache(query), metadata, layer.head_dim**-0.5, window

    what = f"{name} {num_seqs}x{queries} of {context} in {block_size}{' padded' * padded}"
    return Case(
        f"{op}/{what}",
        op,
        arguments,
        layer.shape(block_size),
        dtype=dtype,
        storage=storage or dtype,
        # Exact float32 products exist on AMD's matrix units only.
        matrix=("_attend",) if dtype.itemsize == 2 else (),
        split="_attend",
    )


def _write(
    name: str,
    layer: Layer,
    num_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    storage: Storage = None,
) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        qkv = torch.empty(
            num_tokens, layer.heads + 2 * layer.kv_heads, layer.head_dim, dtype=query.dtype
        )
        k, v = qkv[:, layer.heads :].chunk(2, dim=1)
        return k, v, layer.cache(query), torch.empty(num_tokens, dtype=torch.int64)

    return Case(
        f"kv_cache_write/{name}",
        "kv_cache_write",
        arguments,
        layer.shape(16),
        dtype=dtype,
        storage=storage or dtype,
    )


DECODE, PREFILL, BLOCK = "paged_attention", "prefill_attention", "block_attention"
FP32, FP16 = torch.float32, torch.float16
CASES: tuple[Case, ...] = (
    # One query of a long context, which is split; a verify window of a large batch, which is not.
    _attention(DECODE, "llama", LLAMA, 1, 1, 65536, 64),
    _attention(DECODE, "llama fp8", LLAMA, 1, 1, 65536, 64, storage="fp8"),
    _attention(DECODE, "llama", LLAMA, 256, 16, 8192, 64),
    _attention(DECODE, "llama", LLAMA, 256, 4, 8192, 64, padded=True),
    _attention(DECODE, "llama fp8", LLAMA, 1, 4, 65536, 64, storage="fp8", padded=True),
    _attention(DECODE, "llama window", LLAMA, 256, 4, 8192, 16, window=4096),
    _attention(DECODE, "smollm2", SMOLLM2, 512, 5, 2048, 16),
    _attention(DECODE, "smollm2 fp8", SMOLLM2, 512, 5, 2048, 64, storage="fp8"),
    _attention(DECODE, "smollm2 fp32", SMOLLM2, 64, 5, 2048, 16, FP32),
    _attention(DECODE, "kimi draft", KIMI_DRAFT, 256, 4, 8192, 16),
    _attention(DECODE, "kimi draft fp8", KIMI_DRAFT, 256, 4, 8192, 64, storage="fp8"),
    _attention(DECODE, "phi fp16", PHI, 64, 1, 4096, 16, FP16),
    _attention(DECODE, "gemma", GEMMA, 256, 8, 8192, 16),
    # Blocks of 16 and 8 drafted tokens; those of the first are split.
    _attention(BLOCK, "llama window fp8", LLAMA, 64, 16, 8192, 64, storage="fp8", window=2048),
    _attention(BLOCK, "llama", LLAMA, 64, 8, 8192, 16),
    # The last chunk of a long prompt, whose context is split; chunks that fill a device.
    _attention(PREFILL, "llama", LLAMA, 1, 256, 65536, 64),
    _attention(PREFILL, "llama", LLAMA, 4, 2048, 8192, 16),
    _attention(PREFILL, "llama fp8", LLAMA, 4, 2048, 8192, 64, storage="fp8"),
    _attention(PREFILL, "smollm2", SMOLLM2, 4, 512, 2048, 16),
    _attention(PREFILL, "smollm2 fp32", SMOLLM2, 4, 512, 2048, 16, FP32),
    _attention(PREFILL, "kimi draft", KIMI_DRAFT, 4, 2048, 8192, 64),
    _attention(PREFILL, "phi fp16", PHI, 4, 512, 4096, 16, FP16),
    _attention(PREFILL, "gemma window", GEMMA, 4, 512, 8192, 16, window=1024),
    _write("llama", LLAMA, 64),
    _write("llama fp8", LLAMA, 8192, storage="fp8"),
    _write("kimi draft fp16 to fp8", KIMI_DRAFT, 64, FP16, storage="fp8"),
)
