"""Layers with recurrent states, of Qwen3-Next, Kimi-Linear and, at TP8, Kimi-K3."""

from __future__ import annotations

from collections.abc import Callable

import torch
from aot_case import Case, pool

from atom.model_ops.attention.metadata import StateMetadata
from atom.model_ops.registry import OpQuery

Arguments = Callable[[OpQuery], tuple[object, ...]]
BF16, FP32 = torch.bfloat16, torch.float32
# Sequences and the tokens of each: a decode step, verification, one prompt.
BATCHES = (64, 1), (17, 4), (1, 4000)


def _metadata(sequences: int, queries: int, padded: bool = False) -> StateMetadata:
    def integers(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32)

    return StateMetadata(
        rows=torch.empty(sequences, dtype=torch.int64),
        context_lens=integers(sequences),
        cu_seqlens_q=integers(sequences + 1),
        padding_lens=integers(sequences) if padded else None,
        query_lens_cpu=(queries,) * sequences,
    )


def _conv(channels: int, padded: bool) -> Case:
    def of(sequences: int, queries: int) -> Arguments:
        def arguments(query: OpQuery) -> tuple[object, ...]:
            x = torch.empty(sequences * queries, channels, dtype=query.dtype)
            weight = torch.empty(channels, 4, dtype=query.dtype)
            ring = torch.empty(65, 8, channels, dtype=query.dtype)
            return x, weight, ring, _metadata(sequences, queries, padded)

        return arguments

    name = f"causal_conv/{channels}{' padded' if padded else ''}"
    first, second, prompt = (of(*batch) for batch in BATCHES)
    if padded:
        return Case(name, "causal_conv", first, {"taps": 4}, batches=(second,))
    return Case(name, "causal_conv", prompt, {"taps": 4})


def _delta(
    heads: tuple[int, int],
    decays: int,
    padded: bool = False,
    stored: torch.dtype = FP32,
    by_chunks: bool = False,
) -> Case:
    key_heads, value_heads = heads

    def of(sequences: int, queries: int) -> Arguments:
        def arguments(query: OpQuery) -> tuple[object, ...]:
            tokens = sequences * queries
            both = torch.empty(tokens, (2 * key_heads + value_heads) * 128, dtype=query.dtype)
            q, k, v = both.split([key_heads * 128, key_heads * 128, value_heads * 128], dim=1)
            by_key = tokens, key_heads, 128
            decay, beta = torch.empty(tokens, value_heads, decays), torch.empty(tokens, value_heads)
            states = pool((65, 4, value_heads, 128, 128), stored)
            v = v.view(tokens, value_heads, 128)
            metadata = _metadata(sequences, queries, padded)
            return q.view(by_key), k.view(by_key), v, decay, beta, states, metadata

        return arguments

    shape = {"num_key_heads": key_heads, "num_heads": value_heads}
    shape |= {"key_dim": 128, "value_dim": 128}
    name = f"delta_rule/{key_heads} {value_heads} {decays}{' padded' if padded else ''}"
    name += f" {stored}" if stored is not FP32 else ""
    first, *others = (of(*batch) for batch in BATCHES)
    if by_chunks:
        matrix = "_relate", "_walk_chunks"
        return Case(f"{name} by chunks", "delta_rule", others[-1], shape, matrix=matrix)
    return Case(name, "delta_rule", first, shape, batches=tuple(others))


def _gates(heads: int, decays: int) -> Case:
    def of(tokens: int) -> Arguments:
        def arguments(query: OpQuery) -> tuple[object, ...]:
            decay = torch.empty(tokens, heads, decays, dtype=query.dtype)
            beta = torch.empty(tokens, heads, dtype=query.dtype)
            bound = -5.0 if heads == 12 else None
            return decay, beta, torch.empty(heads), torch.empty(heads, decays), bound

        return arguments

    name, shape = f"delta_gates/{heads} {decays}", {"num_heads": heads, "key_dim": 128}
    return Case(name, "delta_gates", of(64), shape, batches=(of(1), of(4000)))


def _norm(heads: int, activation: str) -> Case:
    def of(tokens: int) -> Arguments:
        def arguments(query: OpQuery) -> tuple[object, ...]:
            x = torch.empty(tokens, heads, 128, dtype=query.dtype)
            gate = torch.empty(tokens, 3 * heads, 128, dtype=query.dtype)[:, heads : 2 * heads]
            return x, gate, torch.empty(128, dtype=query.dtype), 1e-6, activation

        return arguments

    name, shape = f"gated_rms_norm/{heads} {activation}", {"size": 128}
    return Case(name, "gated_rms_norm", of(64), shape, batches=(of(1), of(4000)))


CASES: tuple[Case, ...] = (
    _conv(8192, False),
    _conv(8192, True),
    _delta((16, 32), 1),
    _delta((32, 32), 128),
    _delta((12, 12), 128, padded=True),
    _delta((16, 32), 1, stored=BF16),
    _delta((32, 32), 128, by_chunks=True),
    _delta((16, 32), 1, by_chunks=True),
    _delta((12, 12), 128, padded=True, stored=BF16, by_chunks=True),
    _gates(32, 1),
    _gates(32, 128),
    _gates(12, 128),
    _norm(32, "silu"),
    _norm(32, "sigmoid"),
)
