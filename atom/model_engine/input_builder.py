"""From a scheduled batch to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from atom.batch import ScheduledBatch, ScheduledSequence
from atom.model_ops.metadata import AttentionMetadata, ModelInput


def build_model_input(batch: ScheduledBatch, block_size: int, device: torch.device) -> ModelInput:
    """Lay the sequences of `batch` one after another.

    Logits are asked for the last `num_drafts + 1` rows of every sequence that wants a sample.
    """
    sequences = batch.sequences
    token_ids: list[int] = []
    logits_indices: list[int] = []
    for s in sequences:
        token_ids += s.token_ids
        if s.wants_sample:
            logits_indices += range(len(token_ids) - s.num_drafts - 1, len(token_ids))
    starts = np.array([s.start for s in sequences], dtype=np.int64)
    lens = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    return ModelInput(
        input_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=_to(_positions(starts, lens), device),
        attention=build_attention_metadata(sequences, block_size, device),
        logits_indices=torch.tensor(logits_indices, dtype=torch.int64, device=device),
    )


def build_attention_metadata(
    sequences: Sequence[ScheduledSequence], block_size: int, device: torch.device
) -> AttentionMetadata:
    """Where the tokens of `sequences` sit in the KV cache."""
    starts = np.array([s.start for s in sequences], dtype=np.int64)
    lens = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    tables = np.zeros((len(sequences), max(len(s.block_ids) for s in sequences)), dtype=np.int32)
    for row, s in zip(tables, sequences, strict=True):
        row[: len(s.block_ids)] = s.block_ids
    positions = _positions(starts, lens)
    owner = np.repeat(np.arange(len(sequences)), lens)
    blocks = tables[owner, positions // block_size].astype(np.int64)
    contexts = starts + lens
    return AttentionMetadata(
        slot_mapping=_to(blocks * block_size + positions % block_size, device),
        block_tables=_to(tables, device),
        block_counts=_to(np.array([len(s.block_ids) for s in sequences], dtype=np.int32), device),
        context_lens=_to(contexts.astype(np.int32), device),
        cu_seqlens_q=_to(np.concatenate(([0], np.cumsum(lens))).astype(np.int32), device),
        max_seqlen_q=int(lens.max()),
        max_context_len=int(contexts.max()),
        query_lens_cpu=tuple(lens.tolist()),
        context_lens_cpu=tuple(contexts.tolist()),
    )


def _positions(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of every sequence, one after another."""
    offsets = np.cumsum(lens) - lens
    positions: np.ndarray = np.arange(lens.sum()) + np.repeat(starts - offsets, lens)
    return positions


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
