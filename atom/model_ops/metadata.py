"""The tensors that one forward pass takes and gives. All are frozen; none is global."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

import torch

_T = TypeVar("_T")


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a batch sit in the paged KV cache.

    There is no prefill or decode flag: an attention op decides from the lengths. T tokens of
    B sequences lie one sequence after another.

    Attributes:
        slot_mapping: [T] int64; token t is written to slot `block_id * block_size + offset`;
            -1 writes nothing (padding).
        block_tables: [B, max_blocks] int32, rows padded with 0.
        block_counts: [B] int32; how many entries of each row are the sequence's own.
        context_lens: [B] int32; tokens in the cache after this step's writes.
        cu_seqlens_q: [B + 1] int32; tokens of sequence b are cu_seqlens_q[b] .. cu_seqlens_q[b+1].
        max_seqlen_q, max_context_len: the largest query length, and the largest context length
            or an upper bound of it.
        query_lens_cpu, context_lens_cpu: the lengths on the host, for ops that group by them.
            context_lens_cpu is None where the host does not know: inside a graph, which is
            replayed for other lengths than it was captured with, and in a draft's single-token
            steps. Then `context_lens` alone says how far each sequence reaches; an op sizes its
            work by `max_context_len` and masks.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    block_counts: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    max_context_len: int
    query_lens_cpu: tuple[int, ...]
    context_lens_cpu: tuple[int, ...] | None
    _derived: dict[Hashable, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def derive(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """What `compute` makes of this metadata; made by the first layer, shared by all others.

        Every pass, and every run of a capture, has metadata of its own, and so has what is derived.
        """
        if key not in self._derived:
            self._derived[key] = compute()
        return cast(_T, self._derived[key])


@dataclass(frozen=True)
class ModelInput:
    """One batch for a model.

    Attributes:
        input_ids, positions: [T] int64.
        attention: where the T tokens sit in the KV cache.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata


@dataclass(frozen=True)
class ModelOutput:
    """Attributes:
    hidden_states: [T, hidden], after the final norm.
    aux_hidden_states: one [T, hidden] tensor per requested layer; empty when nobody asked.
    """

    hidden_states: torch.Tensor
    aux_hidden_states: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class KVCacheTensor:
    """One attention layer's share of the paged pool.

    On a GPU one block more lies at the end, which no sequence owns: slot -1 is its last slot, so
    that rows without a slot can be written without asking which they are.

    Attributes:
        key, value: [num_blocks, block_size, num_kv_heads, head_dim].
        key_scale, value_scale: [1] float32 where the cache is stored in 8 bits, else None; what
            is stored times the scale is the real number.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.key.shape[1]


@dataclass(frozen=True)
class LatentCacheTensor:
    """One latent attention layer's share of the paged pool; on a GPU with that spare block too.

    Attributes:
        latent: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]; per token the
            normalised latent, then the rotated part of the key.
        scale: [1] float32 where the cache is stored in 8 bits, else None.
    """

    latent: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.latent.shape[1]


# The most queries of a sequence that an op for decoding and verifying takes: a token and 15 drafts.
MAX_DECODE_QUERIES = 16

CacheTensor: TypeAlias = KVCacheTensor | LatentCacheTensor


@dataclass(frozen=True)
class SamplingMetadata:
    """How a token is chosen for each of R rows of scores.

    An optional tensor is None when no row needs it, so a greedy batch does no sampling work.

    Attributes:
        temperature: [R] float32; 0 is greedy. None when every row is greedy.
        top_k: [R] int32, vocabulary size when off. top_p, min_p: [R] float32.
        seeds: [R] int64. positions: [R] int64, the position that the sampled token will take.
    """

    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def select(self, rows: torch.Tensor) -> SamplingMetadata:
        """The same of `rows` [n] int64."""
        fields = (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions)
        return SamplingMetadata(*(None if f is None else f[rows] for f in fields))
