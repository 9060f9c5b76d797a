"""Batches for attention ops, without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atom.model_ops.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class Part:
    """One sequence: `num_tokens` behind `start` others, in the blocks of its table."""

    num_tokens: int
    start: int
    block_ids: Sequence[int]


def attention_metadata(
    parts: Sequence[Part], block_size: int, device: torch.device
) -> AttentionMetadata:
    """Where the tokens of `parts` sit in the KV cache."""
    positions = [(p, p.start + i) for p in parts for i in range(p.num_tokens)]
    slots = [p.block_ids[i // block_size] * block_size + i % block_size for p, i in positions]
    width = max(len(p.block_ids) for p in parts)
    tables = [[*p.block_ids, *[0] * (width - len(p.block_ids))] for p in parts]
    contexts = [p.start + p.num_tokens for p in parts]
    lens = [p.num_tokens for p in parts]

    def int32(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return AttentionMetadata(
        slot_mapping=torch.tensor(slots, device=device),
        block_tables=int32(tables),
        block_counts=int32([len(p.block_ids) for p in parts]),
        context_lens=int32(contexts),
        cu_seqlens_q=int32([sum(lens[:i]) for i in range(len(lens) + 1)]),
        max_seqlen_q=max(lens),
        max_context_len=max(contexts),
        query_lens_cpu=tuple(lens),
        context_lens_cpu=tuple(contexts),
    )
