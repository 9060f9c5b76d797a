"""The operations that an op must compute at least: those of its products, each multiplication and
addition counted.

Exponentials, norms and conversions are not counted: what a kernel computes beyond its products
counts against it.
"""

from __future__ import annotations

from collections.abc import Sequence


def linear_operations(rows: int, inputs: int, outputs: int) -> int:
    """`2 * rows * inputs * outputs`"""
    return 2 * rows * inputs * outputs


def moe_experts_operations(tokens: int, top_k: int, hidden: int, intermediate: int) -> int:
    """Three products of every visit: `6 * T * top_k * hidden * inter`"""
    return 3 * linear_operations(tokens * top_k, hidden, intermediate)


def _seen(context_lens: Sequence[int], queries: int) -> int:
    """Keys that all queries see together; the last query sees the whole context."""
    return sum(queries * context - queries * (queries - 1) // 2 for context in context_lens)


def paged_attention_operations(
    context_lens: Sequence[int], queries: int, num_heads: int, head_dim: int
) -> int:
    """Scores and weighted values: `4 * heads * d * keys seen`"""
    return 4 * num_heads * head_dim * _seen(context_lens, queries)


def mla_decode_operations(
    context_lens: Sequence[int],
    queries: int,
    num_heads: int,
    rank: int,
    rope_dim: int,
    nope_dim: int,
    v_dim: int,
) -> int:
    """Attention among latents, with queries and results projected to and from them:
    `2 * heads * ((2 * rank + rope) * keys seen + rows * rank * (nope + v))`
    """
    rows = len(context_lens) * queries
    attended = (2 * rank + rope_dim) * _seen(context_lens, queries)
    return 2 * num_heads * (attended + rows * rank * (nope_dim + v_dim))


def mla_prefill_operations(
    context_lens: Sequence[int],
    queries: int,
    num_heads: int,
    rank: int,
    rope_dim: int,
    nope_dim: int,
    v_dim: int,
) -> int:
    """Every context expanded into keys and values, and attention over these:
    `2 * heads * (sum(context) * rank * (nope + v) + (nope + rope + v) * keys seen)`
    """
    expanded = sum(context_lens) * rank * (nope_dim + v_dim)
    attended = (nope_dim + rope_dim + v_dim) * _seen(context_lens, queries)
    return 2 * num_heads * (expanded + attended)
