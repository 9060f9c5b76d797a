"""A batch's sequences in the forms that aiter's kernels need.

No host syncs, so a graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from atom.model_ops.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class Queries:
    """Sequences with equal query lengths.

    Attributes:
        length: queries of each.
        block_tables: [N, max_blocks] int32.
        context_lens: [N] int32; the last query is at the end of the context.
        padding_lens: [N] int32, tokens at the end of each context that were never written; None if
            there are none.
    """

    length: int
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    padding_lens: torch.Tensor | None


def equal_length(metadata: AttentionMetadata, longest: int) -> int:
    """The most queries, at most `longest`, that all sequences can be cut into."""
    lens = metadata.query_lens_cpu
    length = metadata.max_seqlen_q
    if any(n != length for n in lens):
        return 1
    return next(n for n in range(min(longest, length), 0, -1) if length % n == 0)


def equal_queries(metadata: AttentionMetadata, longest: int) -> Queries:
    """The batch itself if its query lengths are equal and at most `longest`.

    Otherwise sequences of `equal_length` queries, with the context that their last may see.
    """
    length = equal_length(metadata, longest)
    if length == metadata.max_seqlen_q:
        padding = metadata.padding_lens
        return Queries(length, metadata.block_tables, metadata.context_lens, padding)
    return metadata.derive(("queries each", length), lambda: _cut(metadata, length))


def _cut(metadata: AttentionMetadata, length: int) -> Queries:
    lens = metadata.query_lens_cpu
    starts, device = metadata.cu_seqlens_q, metadata.block_tables.device
    total = sum(lens) // length
    counts = (starts[1:] - starts[:-1]) // length
    owners = torch.repeat_interleave(
        torch.arange(len(lens), device=device), counts, output_size=total
    )
    ends = torch.arange(1, total + 1, device=device) * length
    following = starts[1:][owners] - ends
    context_lens = (metadata.context_lens[owners] - following).to(torch.int32)
    padding = metadata.padding_lens
    if padding is not None:
        padding = (padding[owners] - following).clamp(min=0).to(torch.int32)
    return Queries(length, metadata.block_tables[owners], context_lens, padding)


@dataclass(frozen=True)
class ContextTokens:
    """The cached tokens of several sequences, concatenated.

    Attributes:
        starts: [N + 1] int32; sequence b has tokens starts[b] .. starts[b + 1].
        slots: [C] int64, the slot of each. C is at least starts[N]; entries beyond are valid but
            arbitrary slots.
    """

    starts: torch.Tensor
    slots: torch.Tensor


def context_tokens(metadata: AttentionMetadata, block_size: int) -> ContextTokens:
    """The cached tokens of the batch's sequences, in a dozen torch ops: for prompts."""
    lens = metadata.context_lens_cpu
    bound = len(metadata.query_lens_cpu) * metadata.max_context_len
    return metadata.derive(
        ("context tokens", block_size),
        lambda: _list_tokens(
            metadata.block_tables,
            metadata.context_lens,
            block_size,
            bound if lens is None else sum(lens),
        ),
    )


def token_starts(context_lens: torch.Tensor) -> torch.Tensor:
    """Where each sequence's cached tokens begin, concatenated: [N + 1] int32."""
    return F.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0))


def _list_tokens(
    block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int, count: int
) -> ContextTokens:
    """Args:
    count: the total number of tokens, or an upper bound.
    """
    device = block_tables.device
    starts = token_starts(context_lens)
    tokens = torch.arange(count, dtype=torch.int32, device=device)
    owners = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=len(context_lens) - 1)
    offsets = tokens - starts[owners]
    blocks = (offsets // block_size).clamp_(max=block_tables.shape[1] - 1)
    slots = block_tables[owners, blocks.long()].long() * block_size + offsets % block_size
    return ContextTokens(starts, slots)
