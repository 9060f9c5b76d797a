"""Attention metadata for the single-token steps of a draft chain."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom.model_ops.metadata import AttentionMetadata


def advance(
    metadata: AttentionMetadata,
    sequence_indices: Sequence[int],
    positions: Sequence[int],
    block_size: int,
) -> AttentionMetadata:
    """One token for each of S sequences of a batch; the batch's own metadata is untouched.

    Args:
        metadata: of the target's step; its block tables cover the draft positions.
        sequence_indices: places of the S sequences in the batch.
        positions: [S] where the new tokens sit. A position past a block table writes nothing:
            the scheduler never verifies a draft made there.
        block_size: tokens of a block.
    """
    device = metadata.block_tables.device
    tables = metadata.block_tables[list(sequence_indices)]
    counts = metadata.block_counts[list(sequence_indices)]
    capacity = counts.long() * block_size
    wanted = torch.tensor(positions, dtype=torch.int64, device=device)
    inside = wanted.minimum(capacity - 1)
    blocks = tables.long().gather(1, (inside // block_size)[:, None])[:, 0]
    slots = torch.where(wanted < capacity, blocks * block_size + inside % block_size, -1)
    context_lens = (inside + 1).int()
    contexts = tuple(context_lens.tolist())
    count = len(sequence_indices)
    return AttentionMetadata(
        slot_mapping=slots,
        block_tables=tables,
        block_counts=counts,
        context_lens=context_lens,
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=device),
        max_seqlen_q=1,
        max_context_len=max(contexts, default=0),
        query_lens_cpu=(1,) * count,
        context_lens_cpu=contexts,
    )
