"""Batches of decode rows beside prefill chunks, split so that each gets the op made for it.

A prefill op would walk the long context of a decode row without splitting it, or, for latents,
expand it into keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES, AttentionMetadata
from atom.model_ops.upload import upload

# Calls an attention op: (op, q, metadata) -> out, both with a row per token.
Attend = Callable[[Any, torch.Tensor, AttentionMetadata], torch.Tensor]
_Index = slice | torch.Tensor


@dataclass(frozen=True)
class BatchPart:
    """Some sequences of a batch.

    Attributes:
        rows: their tokens in the batch: a slice, or indices [t] int64.
        metadata: of these sequences alone.
    """

    rows: _Index
    metadata: AttentionMetadata


def attend_by_length(
    decode: Any, prefill: Any, attend: Attend, q: torch.Tensor, metadata: AttentionMetadata
) -> torch.Tensor:
    """`decode` for sequences of at most `MAX_DECODE_QUERIES` queries, `prefill` for the others, of
    which there is one at least.
    """
    if decode is prefill or min(metadata.query_lens_cpu) > MAX_DECODE_QUERIES:
        return attend(prefill, q, metadata)
    short, long = metadata.derive("short and long queries", lambda: split(metadata))
    first = attend(decode, q[short.rows], short.metadata)
    out = first.new_empty(q.shape[0], *first.shape[1:])
    out[short.rows] = first
    out[long.rows] = attend(prefill, q[long.rows], long.metadata)
    return out


def split(metadata: AttentionMetadata) -> tuple[BatchPart, BatchPart]:
    """The sequences of at most `MAX_DECODE_QUERIES` queries, and the others; both must exist."""
    lens = metadata.query_lens_cpu
    short = [i for i, n in enumerate(lens) if n <= MAX_DECODE_QUERIES]
    long = [i for i, n in enumerate(lens) if n > MAX_DECODE_QUERIES]
    # Those of long ones are always known.
    known = metadata.context_lens_cpu or metadata.most_context_cpu
    return _part(metadata, short, metadata.context_lens_cpu), _part(metadata, long, known)


def _part(
    metadata: AttentionMetadata, which: list[int], contexts: tuple[int, ...] | None
) -> BatchPart:
    """Args:
    which: the sequences, ascending.
    contexts: context lengths of the batch, exact for these.
    """
    lens = tuple(metadata.query_lens_cpu[i] for i in which)
    known = None if contexts is None else tuple(contexts[i] for i in which)
    first, last = which[0], which[-1]
    sequences: _Index
    rows: _Index
    if last - first + 1 == len(which):
        sequences = slice(first, last + 1)
        begin = sum(metadata.query_lens_cpu[:first])
        rows = slice(begin, begin + sum(lens))
        starts = metadata.cu_seqlens_q[first : last + 2] - begin
    else:
        sequences = upload(torch.tensor(which), metadata.cu_seqlens_q.device)
        rows, starts = _gather(metadata.cu_seqlens_q, sequences, sum(lens))
    part = AttentionMetadata(
        slot_mapping=metadata.slot_mapping[rows],
        block_tables=metadata.block_tables[sequences],
        block_counts=metadata.block_counts[sequences],
        context_lens=metadata.context_lens[sequences],
        cu_seqlens_q=starts,
        max_seqlen_q=max(lens),
        max_context_len=metadata.max_context_len if known is None else max(known),
        query_lens_cpu=lens,
        context_lens_cpu=known,
    )
    return BatchPart(rows, part)


def _gather(
    cu_seqlens_q: torch.Tensor, sequences: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [total] int64 of `sequences`, and where each begins among them, int32."""
    begins = cu_seqlens_q[sequences]
    lens = cu_seqlens_q[sequences + 1] - begins
    starts = F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    shift = torch.repeat_interleave(begins - starts[:-1], lens, output_size=total)
    return torch.arange(total, device=shift.device) + shift, starts
