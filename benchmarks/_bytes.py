"""The bytes that an operation must move at least: what it is given, once, and what it returns.

Ratios of achieved to possible bandwidth stand on these numbers, so each is a formula and all are
under test. Block tables, lengths and partial results are not counted: what a kernel moves beyond
the least there is counts against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atom.kv_cache.builders import attention_layers
from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.embedding import VocabParallelEmbedding
from atom.model_ops.moe import FusedMoE
from atom.model_ops.quant.weights import WeightFormat
from atom.model_ops.stacked import PreparedMatrix
from atom.models.base import CausalLM


@dataclass(frozen=True)
class Sizes:
    """Bytes of an element of activations and weights, and of the KV cache."""

    element: int
    cached: int


def paged_attention_bytes(
    context_lens: Sequence[int],
    queries: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sizes: Sizes,
) -> int:
    """Keys and values of every cached token, the queries and the results.

    `2 * sum(context) * kv_heads * d * cached + 2 * B * queries * heads * d * element`
    """
    cache = 2 * sum(context_lens) * num_kv_heads * head_dim * sizes.cached
    rows = len(context_lens) * queries
    return cache + 2 * rows * num_heads * head_dim * sizes.element


def mla_attention_bytes(
    context_lens: Sequence[int],
    queries: int,
    num_heads: int,
    rank: int,
    rope_dim: int,
    nope_dim: int,
    v_dim: int,
    sizes: Sizes,
) -> int:
    """The latent of every cached token, the up projection, the queries and the results.

    `sum(context) * (rank + rope) * cached
    + heads * (rank * (nope + v) + B * queries * (nope + rope + v)) * element`
    """
    cache = sum(context_lens) * (rank + rope_dim) * sizes.cached
    rows = len(context_lens) * queries
    per_head = rank * (nope_dim + v_dim) + rows * (nope_dim + rope_dim + v_dim)
    return cache + num_heads * per_head * sizes.element


def quantised_bytes(form: WeightFormat, outputs: int, inputs: int, scale: int) -> int:
    """Codes and scales of a matrix, a scale of `scale` bytes for each block.

    `outputs * inputs / codes per byte + blocks * scale`
    """
    blocks = math.ceil(outputs / form.rows) * math.ceil(inputs / form.columns)
    return int(outputs * inputs / form.codes_per_byte) + blocks * scale


def moe_experts_bytes(
    visited: int,
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    element: int,
    expert: int | None = None,
) -> int:
    """The three matrices of every expert that some token visits, the tokens before and after,
    and each visit's weight (4 bytes) and expert (8 bytes).

    `visited * 3 * hidden * inter * element + 2 * T * hidden * element + T * top_k * 12`

    Args:
        expert: bytes of one expert's matrices, if they are quantised.
    """
    each = 3 * hidden * intermediate * element if expert is None else expert
    return visited * each + 2 * tokens * hidden * element + tokens * top_k * 12


def linear_bytes(
    rows: int, inputs: int, outputs: int, element: int, matrix: int | None = None
) -> int:
    """The weights, the rows and the results.

    `(inputs * outputs + rows * (inputs + outputs)) * element`

    Args:
        matrix: bytes of the weights, if they are quantised.
    """
    weights = inputs * outputs * element if matrix is None else matrix
    return weights + rows * (inputs + outputs) * element


def choice_bytes(rows: int, vocab_size: int) -> int:
    """Every logit in float32, and each row's token in 8 bytes: `R * (V * 4 + 8)`"""
    return rows * (vocab_size * 4 + 8)


@dataclass(frozen=True)
class ModelBytes:
    """What a step reads of a model.

    Attributes:
        always: every weight, quantised ones as the op reads them, but embeddings and routed
            experts; a tied embedding is also the output head and belongs here.
        embedding_row: of one token.
        expert: of one routed expert, of each layer that has them.
        cached_token: keys and values, or latents, of one token in all layers.
    """

    always: int
    embedding_row: int
    expert: tuple[int, ...]
    cached_token: int

    def step(self, tokens: int, cached_tokens: int, visited: Sequence[int]) -> int:
        """Bytes of a decode step.

        `always + T * embedding_row + sum(visited * expert) + (cached + T) * cached_token`: new
        tokens are written to the cache, and all that are cached by then are read.

        Args:
            tokens: T, computed in this step.
            cached_tokens: the sum of the context lengths, the T tokens included.
            visited: experts that some token visits, of each layer that has them.
        """
        return sum(self.parts(tokens, cached_tokens, visited).values())

    def parts(self, tokens: int, cached_tokens: int, visited: Sequence[int]) -> dict[str, int]:
        """The same by the kernels that move them."""
        return {
            "products": self.always,
            "experts": sum(n * size for n, size in zip(visited, self.expert, strict=True)),
            "attention": (cached_tokens + tokens) * self.cached_token,
            "embedding": tokens * self.embedding_row,
        }


def model_bytes(model: CausalLM) -> ModelBytes:
    """The sizes of a model whose KV cache is bound."""
    layers = [m for m in model.modules() if isinstance(m, (PreparedMatrix, FusedMoE))]
    total = sum(_bytes(parameter) for parameter in model.parameters())
    total += sum(layer.quantised_bytes for layer in layers)
    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    experts = [layer for layer in layers if isinstance(layer, FusedMoE)]
    own_head = any(True for _ in model.output_head.parameters())
    left_out = sum(_matrix_bytes(e) for e in embeddings) if own_head else 0
    left_out += sum(_expert_bytes(layer) * layer.num_experts for layer in experts)
    return ModelBytes(
        always=total - left_out,
        embedding_row=_matrix_bytes(model.token_embedding) // model.token_embedding.out_features,
        expert=tuple(_expert_bytes(layer) for layer in experts),
        cached_token=_cached_token_bytes(model),
    )


def _matrix_bytes(matrix: PreparedMatrix) -> int:
    return sum(_bytes(parameter) for parameter in matrix.parameters()) + matrix.quantised_bytes


def _expert_bytes(layer: FusedMoE) -> int:
    plain = sum(_bytes(parameter) for parameter in layer.parameters())
    return (plain + layer.quantised_bytes) // layer.num_experts


def _cached_token_bytes(model: CausalLM) -> int:
    total = 0
    for layer in attention_layers(model).values():
        cache = layer.kv_cache
        if isinstance(cache, KVCacheTensor):
            total += _bytes(cache.key[0, 0]) + _bytes(cache.value[0, 0])
        else:
            total += _bytes(cache.latent[0, 0])
    return total


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
