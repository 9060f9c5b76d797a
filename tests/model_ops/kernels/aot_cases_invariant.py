"""What `--batch-invariant` runs: one kernel for few rows and for many, decoding and prefill."""

from __future__ import annotations

from collections.abc import Callable

import torch
from aot_case import Case, decode_metadata
from aot_cases_attention import LLAMA
from aot_cases_mla import latent_arguments, latent_shape

from atom.model_ops.registry import OpQuery

Arguments = Callable[[OpQuery], tuple[object, ...]]


def _linear(rows: int, inputs: int, dtype: torch.dtype) -> Case:
    def of(tokens: int) -> Arguments:
        return lambda query: (
            torch.empty(tokens, inputs, dtype=query.dtype),
            torch.empty(rows, inputs, dtype=query.dtype),
            None,
        )

    return Case(
        f"linear/{rows}x{inputs} {dtype}",
        "linear",
        of(1),
        {"in_features": inputs, "out_features": rows},
        dtype=dtype,
        matrix=("_product",) if dtype.itemsize == 2 else (),
        hands_over=("_product",) if rows == 384 else (),
        batches=(of(17), of(2048)),
    )


def _heads(window: int | None) -> Case:
    def of(num_seqs: int, queries: int, context: int) -> Arguments:
        def arguments(query: OpQuery) -> tuple[object, ...]:
            q = torch.empty(num_seqs * queries, LLAMA.heads, LLAMA.head_dim, dtype=query.dtype)
            metadata = decode_metadata(num_seqs, queries, context, 16)
            return q, LLAMA.cache(query), metadata, 0.1, window

        return arguments

    return Case(
        f"paged_attention/invariant window {window}",
        "paged_attention",
        of(1, 1, 65536),
        LLAMA.shape(16),
        storage=torch.bfloat16,
        matrix=("_attend",),
        batches=(of(256, 4, 8192), of(2, 1024, 2048)),
    )


def _latents(heads: int) -> Case:
    def of(num_seqs: int, queries: int, context: int) -> Arguments:
        return lambda query: latent_arguments(
            query, decode_metadata(num_seqs, queries, context, 64)
        )

    return Case(
        f"mla_decode/invariant heads{heads}",
        "mla_decode",
        of(1, 1, 65536),
        latent_shape(heads, 64),
        storage=torch.bfloat16,
        matrix=("_absorbed_kernel",),
        batches=(of(64, 4, 8192), of(1, 512, 2048)),
    )


CASES = (
    _linear(384, 7168, torch.float32),  # a router, with splits of the inputs
    _linear(28672, 4096, torch.bfloat16),
    _heads(None),
    _heads(4096),
    _latents(8),
)
