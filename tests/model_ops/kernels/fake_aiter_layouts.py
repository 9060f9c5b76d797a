"""The weight layouts of aiter, told by where each element lies."""

from __future__ import annotations

import torch

# A tile has 16 rows and 32 columns; a row's 16 bytes lie together.
_ROWS, _COLUMNS, _VECTOR_BYTES = 16, 32, 16


def weight_places(rows: int, columns: int, itemsize: int) -> torch.Tensor:
    """[rows, columns] int64: where each element of a shuffled matrix lies."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    vector = _VECTOR_BYTES // itemsize
    tile = row // _ROWS * (columns // _COLUMNS) + column // _COLUMNS
    within = column % _COLUMNS // vector * _ROWS + row % _ROWS
    return tile * _ROWS * _COLUMNS + within * vector + column % vector


def shuffled_weight(weight: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns], row-major -> shuffled."""
    places = weight_places(*weight.shape[-2:], weight.dtype.itemsize)
    out = torch.empty_like(weight)
    out.flatten(-2)[..., places.flatten()] = weight.flatten(-2)
    return out


def unshuffled_weight(weight: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns], shuffled -> row-major."""
    places = weight_places(*weight.shape[-2:], weight.dtype.itemsize)
    return weight.flatten(-2)[..., places]
