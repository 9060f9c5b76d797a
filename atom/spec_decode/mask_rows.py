"""Rows of masks behind the newest token, from which several drafts are made in one pass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atom.model_ops.kernels.torch.speculation import place_blocks
from atom.model_ops.metadata import AttentionMetadata
from atom.spec_decode.base import VerifiedStep
from atom.spec_decode.chain import ChainStart

# The op `place_blocks`.
PlaceOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]


class MaskRows:
    """Says where such rows go.

    Args:
        block_size: of the cache.
    """

    def __init__(
        self,
        mask_token_id: int,
        block_size: int,
        max_model_len: int,
        place: PlaceOp = place_blocks,
    ) -> None:
        self._mask_token_id = mask_token_id
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._place = place

    def start(self, step: VerifiedStep, token_ids: torch.Tensor, num_rows: int) -> ChainStart:
        """Where rows behind the last rows of the sampled sequences begin.

        Args:
            token_ids: [S] int64, of the first rows.
        """
        metadata = step.model_input.attention
        tables, counts = metadata.block_tables, metadata.block_counts
        if step.sampled is not None:
            tables, counts = tables[step.sampled], counts[step.sampled]
        return ChainStart(
            token_ids,
            step.model_output.hidden_states.new_empty((len(token_ids), 0)),
            step.model_input.positions[step.last_rows],
            tables,
            counts,
            min(metadata.max_context_len + num_rows, self._max_model_len),
            step.race,
            step.guide,
        )

    def place(
        self, start: ChainStart, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Token ids and positions [S * num_rows] of the rows, and where they are in the cache.

        Rows without a slot, where a sequence is about to end, are seen by none.
        """
        tables = start.block_tables
        token_ids, positions, slots, context_lens, starts = self._place(
            start.token_ids,
            start.positions,
            tables,
            start.block_counts,
            num_rows,
            self._mask_token_id,
            self._block_size,
            self._max_model_len,
        )
        capacity = tables.shape[1] * self._block_size
        metadata = AttentionMetadata(
            slot_mapping=slots,
            block_tables=tables,
            block_counts=start.block_counts,
            context_lens=context_lens,
            cu_seqlens_q=starts,
            max_seqlen_q=num_rows,
            max_context_len=min(start.max_context_len, capacity),
            query_lens_cpu=(num_rows,) * tables.shape[0],
            context_lens_cpu=None,
        )
        return token_ids, positions, metadata


def by_draft(states: torch.Tensor, count: int) -> torch.Tensor:
    """[S * rows, hidden] of S = `count` sequences -> [rows, S, hidden]."""
    return states.view(count, -1, states.shape[-1]).transpose(0, 1).contiguous()
