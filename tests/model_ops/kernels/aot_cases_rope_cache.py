"""Rotation and cache write as one kernel: Llama-3-8B, SmolLM2, Kimi-K2.5 and its draft at TP8."""

from __future__ import annotations

import torch
from aot_case import Case
from aot_cases_attention import KIMI_DRAFT, LLAMA, SMOLLM2, Layer, Storage
from aot_cases_mla import NOPE, RANK, ROPE, latent_cache, latent_shape

from atom.model_ops.registry import PACKED, PLAIN, OpQuery

BF16, FP32 = torch.bfloat16, torch.float32


def _integers(tokens: int) -> torch.Tensor:
    return torch.empty(tokens, dtype=torch.int64)


def _heads(
    name: str,
    layer: Layer,
    tokens: int,
    dtype: torch.dtype = BF16,
    storage: Storage = None,
    layout: str = PLAIN,
) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        heads = layer.heads, layer.kv_heads, layer.kv_heads
        qkv = torch.empty(tokens, sum(heads), layer.head_dim, dtype=query.dtype)
        q, k, v = qkv.split_with_sizes(heads, 1)
        rows = _integers(tokens), q, k, v, torch.empty(8192, layer.head_dim), False
        return *rows, layer.cache(query), _integers(tokens), None, None

    return Case(
        f"rope_and_cache/{name}",
        "rope_and_cache",
        arguments,
        layer.shape(16) | {"sliding_window": 0},
        dtype=dtype,
        storage=storage or dtype,
        layout=layout,
    )


def _latents(heads: int, tokens: int, storage: torch.dtype | str) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        q = torch.empty(tokens, heads, NOPE + ROPE, dtype=query.dtype)
        latent = torch.empty(tokens, RANK, dtype=query.dtype)
        k_rope = torch.empty(tokens, 1536 + RANK + ROPE, dtype=query.dtype)[:, -ROPE:]
        rows = _integers(tokens), q, latent, k_rope, torch.empty(8192, ROPE), True
        return *rows, latent_cache(query), _integers(tokens), None, None

    name = storage if isinstance(storage, str) else str(storage).removeprefix("torch.")
    return Case(
        f"mla_rope_and_cache/{heads} heads {name}",
        "mla_rope_and_cache",
        arguments,
        latent_shape(heads, 64),
        storage=storage,
    )


def _latent_norms(query: OpQuery) -> tuple[object, ...]:
    """Both latents, beside the rotated part of the key."""
    x = torch.empty(64, 1536 + 512 + 64, dtype=query.dtype)
    weights = (torch.empty(size, dtype=query.dtype) for size in (1536, 512))
    return x, *weights, 1e-6, None


CASES: tuple[Case, ...] = (
    _heads("llama", LLAMA, 64),
    _heads("llama fp8", LLAMA, 8192, storage="fp8"),
    _heads("smollm2 fp32", SMOLLM2, 64, FP32),
    _heads("kimi draft packed", KIMI_DRAFT, 64, layout=PACKED),
    _heads("kimi draft packed fp8", KIMI_DRAFT, 64, storage="fp8", layout=PACKED),
    _latents(8, 64, BF16),
    _latents(8, 64, "fp8"),
    _latents(128, 64, BF16),
    Case("rms_norm_pair/kimi", "rms_norm_pair", _latent_norms, {"size": 1536}),
)
