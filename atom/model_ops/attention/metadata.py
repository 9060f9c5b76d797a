"""Inputs and outputs of a forward pass, as frozen values that are passed as arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar, cast

import torch

_T = TypeVar("_T")

# `AttentionMetadata.leave` has `draft_choice` by this key.
DRAFT_CHOICE = "a draft's choice of tokens"


def changed(value: _T, **fields: Any) -> _T:
    """A frozen dataclass with other fields, for what is made anew in every step: `replace` reads
    each field and calls `__init__`, and takes about three times as long.

    Args:
        fields: by name; fields that are not given are shared, also those that `__init__` makes.
    """
    made = object.__new__(type(value))
    made.__dict__.update(value.__dict__, **fields)
    return made


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a batch are in the paged KV cache.

    There is no prefill or decode flag: attention ops decide from the lengths. The T tokens of B
    sequences are concatenated.

    Attributes:
        slot_mapping: [T] int64; slot `block_id * block_size + offset` of each token; -1 means no
            write (padding).
        block_tables: [B, max_blocks] int32; entries beyond `block_counts` are stale ids.
        block_counts: [B] int32; number of valid entries in each row of `block_tables`.
        context_lens: [B] int32; tokens in the cache after this step's writes.
        cu_seqlens_q: [B + 1] int32; sequence b has tokens cu_seqlens_q[b] .. cu_seqlens_q[b + 1].
        max_seqlen_q, max_context_len: the largest query length, and the largest context length or
            an upper bound of it.
        query_lens_cpu, context_lens_cpu: the lengths on the host. context_lens_cpu is None if they
            are unknown: in a graph, which is replayed with other lengths than at capture, in a
            draft's single-token steps, and where a sequence goes on with tokens that only the
            device knows. Then an op sizes its work by `max_context_len` and masks by
            `context_lens`.
        padding_lens: [B] int32; tokens at the end of each sequence's queries that only pad a graph:
            their slots, in its context, were not written and may hold another's NaN. Attention
            reads none of them, but for aiter's unified attention and FlashMLA, which cannot be
            told. None where there are none.
        most_context_cpu: upper bounds of the context lengths, those of sequences with more than
            `MAX_DECODE_QUERIES` queries exact; None if there are none.
        windowed: the same in the blocks of layers with a sliding window; None where they have no
            blocks of their own. What its tables say of blocks behind the window is anything.
        state_rows: [B] int64; the rows of the sequences in the pools of recurrent states. Padding
            has the spare row at their end. None in a draft's steps, which have no states.
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
    most_context_cpu: tuple[int, ...] | None = None
    padding_lens: torch.Tensor | None = None
    windowed: AttentionMetadata | None = None
    state_rows: torch.Tensor | None = None
    _derived: dict[Hashable, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def is_ragged(self) -> bool:
        """Whether query lengths differ."""
        return min(self.query_lens_cpu) != self.max_seqlen_q

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors."""
        tables = self.block_tables, self.block_counts
        optional = (t for t in (self.padding_lens, self.state_rows) if t is not None)
        return self.slot_mapping, *tables, self.context_lens, self.cu_seqlens_q, *optional

    @property
    def states(self) -> StateMetadata:
        """What layers with a recurrent state read.

        Raises:
            ValueError: when the batch has no rows of states.
        """
        if self.state_rows is None:
            raise ValueError("a layer with a recurrent state was called without rows of states")
        lens = self.context_lens, self.cu_seqlens_q, self.padding_lens, self.query_lens_cpu
        return StateMetadata(self.state_rows, *lens)

    def derive(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """The result of `compute`, which is called once per key and shared by all layers.

        Each forward pass, and each run of a capture, has its own metadata.
        """
        if key not in self._derived:
            self._derived[key] = compute()
        return cast(_T, self._derived[key])

    def leave(self, key: Hashable, value: object) -> None:
        """Let `derive` have this result in later layers, in the place of an older one."""
        self._derived[key] = value

    @property
    def draft_choice(self) -> AttentionMetadata | None:
        """Tokens that a draft's first pass chose to attend to, for those behind it; None if each
        chooses for itself, or all are attended to.
        """
        return self._derived.get(DRAFT_CHOICE)

    def of_queries(self, rows: torch.Tensor) -> AttentionMetadata:
        """Of R `rows` [R] int64 of a batch whose sequences have one query each."""
        return replace(
            self,
            block_tables=self.block_tables[rows],
            block_counts=self.block_counts[rows],
            context_lens=self.context_lens[rows],
            cu_seqlens_q=self.cu_seqlens_q[: len(rows) + 1],
            query_lens_cpu=self.query_lens_cpu[: len(rows)],
        )


@dataclass(frozen=True)
class StateMetadata:
    """Which recurrent states the T tokens of S sequences go on from.

    A pool of states is `[rows, versions, ...]`: what a sequence's state is after its token at
    position p is version p mod versions of its row. So a sequence whose first token here is at
    position s > 0 goes on from version (s - 1) mod versions, and one that starts at 0 from zeros,
    whatever its row holds. A sequence writes the versions of its last tokens, at most as many as
    there are; tokens that pad write nothing. Versions are one more than the most drafts that a step
    verifies, so whichever of them are accepted, the next step finds its version.

    Attributes:
        rows: [S] int64, of the pool; different, but for sequences of padding alone, which all have
            a spare row that nobody reads.
        context_lens: [S] int32; tokens of each sequence up to the end of its queries, padding
            included: its first query is at position `starts` = context_lens - query length.
        cu_seqlens_q: [S + 1] int32; sequence s has tokens cu_seqlens_q[s] .. cu_seqlens_q[s + 1].
        padding_lens: [S] int32; tokens at the end of each sequence's queries that only pad a graph.
            None where there are none.
        query_lens_cpu: the query lengths on the host, padding included.
    """

    rows: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    padding_lens: torch.Tensor | None
    query_lens_cpu: tuple[int, ...]

    @property
    def starts(self) -> torch.Tensor:
        """[S] int32, the position of each sequence's first query. Kernels compute it themselves."""
        return self.context_lens - (self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1])


@dataclass(frozen=True)
class ImageRows:
    """Rows of a step that images fill.

    Attributes:
        places: [M] int64, which of the step's T rows they are.
        embeddings: [M, hidden], and behind these, [M, hidden] for each of the first layers, what is
            added to their outputs (deepstack).
    """

    places: torch.Tensor
    embeddings: torch.Tensor

    def fill(self, hidden: torch.Tensor) -> torch.Tensor:
        """The embedded tokens [T, hidden], with these rows overwritten."""
        return hidden.index_copy(0, self.places, self.embeddings[:, : hidden.shape[1]])

    def num_deep(self, size: int) -> int:
        """How many layers' outputs get something added, where hidden states have this size."""
        return self.embeddings.shape[1] // size - 1

    def deepen(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What a layer returns, [T, hidden], with what is added to it, if anything is."""
        size = hidden.shape[1]
        if layer >= self.num_deep(size):
            return hidden
        return hidden.index_add(0, self.places, self.embeddings.narrow(1, (layer + 1) * size, size))


@dataclass(frozen=True)
class ModelInput:
    """The input of a forward pass.

    Attributes:
        input_ids, positions: [T] int64.
        attention: where the T tokens are in the KV cache.
        output_rows: [R] int64, the rows whose hidden states after the final norm are read; a model
            may return those alone. None when all are.
        images: rows whose embedding is not that of their token, but an image's; None without any.
        next_images: rows whose next token is one of an image, for proposers that read these; None
            without any.
        mrope_shifts: [T, 3] int64, what must be added to a token's position for its time, row and
            column, by which it rotates: the same number thrice in text. None where all tokens
            rotate by their positions.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    output_rows: torch.Tensor | None = None
    images: ImageRows | None = None
    next_images: ImageRows | None = None
    mrope_shifts: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of text."""
        optional = (t for t in (self.output_rows, self.mrope_shifts) if t is not None)
        return self.input_ids, self.positions, *self.attention.tensors, *optional


@dataclass(frozen=True)
class ModelOutput:
    """Attributes:
    hidden_states: [T, hidden], after the final norm; [R, hidden] if they are those of
        `output_rows`.
    aux_hidden_states: one [T, hidden] tensor per requested layer; empty when none is requested.
    output_rows: as in `ModelInput`, if there are hidden states of these alone; else None.
    """

    hidden_states: torch.Tensor
    aux_hidden_states: tuple[torch.Tensor, ...] = ()
    output_rows: torch.Tensor | None = None

    def at(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, hidden], the hidden states of `rows` [R] int64.

        Raises:
            ValueError: for other rows than `output_rows`, if there are any.
        """
        if self.output_rows is None:
            return self.hidden_states[rows]
        if rows is not self.output_rows:
            raise ValueError("there are hidden states of other rows")
        return self.hidden_states


@dataclass(frozen=True)
class KVCacheTensor:
    """One attention layer's view of the KV pool.

    On a GPU there is a spare block at the end that no sequence owns: slot -1 is its last slot, so
    that rows without a slot can be written without a host sync.

    Attributes:
        key, value: [num_blocks, block_size, num_kv_heads, head_dim].
        key_scale, value_scale: [1] float32 for an FP8 cache, else None; value = stored number *
            scale.
        is_windowed: whether the blocks are those of `AttentionMetadata.windowed`.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    is_windowed: bool = False

    @property
    def block_size(self) -> int:
        return self.key.shape[1]


@dataclass(frozen=True)
class LatentCacheTensor:
    """One MLA layer's view of the KV pool; on a GPU with a spare block, as in `KVCacheTensor`.

    Attributes:
        latent: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]; per token the normalised
            latent, then the rotated part of the key.
        scale: [1] float32 for an FP8 cache, else None.
    """

    latent: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.latent.shape[1]


# Most queries per sequence in decode and verify ops: one token and 15 drafts.
MAX_DECODE_QUERIES = 16
# Most cached tokens whose keys and values a prefill op builds of latents at once, if the longest
# prompt has no more new ones. The memory profile has a step that reaches it.
MOST_EXPANDED_TOKENS = 1 << 15

CacheTensor: TypeAlias = KVCacheTensor | LatentCacheTensor


@dataclass(frozen=True)
class SamplingMetadata:
    """Sampling options of R rows of scores.

    A tensor is None when no row needs it, so a greedy batch does no sampling work.

    Attributes:
        temperature: [R] float32; 0 is greedy. None when every row is greedy.
        top_k: [R] int32; the vocabulary size when off.
        top_p, min_p: [R] float32.
        seeds: [R] int64.
        positions: [R] int64, of the token to sample.
    """

    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All options, in the order above."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions

    def select(self, rows: torch.Tensor | slice) -> SamplingMetadata:
        """The options of `rows`, [n] int64 or a slice."""
        return SamplingMetadata(*(None if t is None else t[rows] for t in self.tensors))
