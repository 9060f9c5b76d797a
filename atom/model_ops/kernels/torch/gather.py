"""Rows of tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """input_ids [T] int64, weight [V, hidden] -> [T, hidden]."""
    return F.embedding(input_ids, weight)


def sampling_options(
    options: torch.Tensor, seeds: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """options [kinds, N] float32 and seeds [N] int64 of rows [R] int64: [kinds, R] and [R]."""
    return options.index_select(1, rows), seeds.index_select(0, rows)
