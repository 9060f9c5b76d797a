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


def scale_places(rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] int64: where each e8m0 scale lies, in tiles of 32 rows and 8 columns."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    tile = row // 32 * (columns // 8) + column // 8
    within = column % 4 * 16 + row % 16
    return ((tile * 64 + within) * 2 + column % 8 // 4) * 2 + row % 32 // 16


def shuffled_scale(scale: torch.Tensor) -> torch.Tensor:
    """[rows, columns] -> shuffled and padded to multiples of 256 and 8, with anything."""
    rows, columns = scale.shape
    padded = scale.new_full((-(-rows // 256) * 256, -(-columns // 8) * 8), 200)
    padded[:rows, :columns] = scale
    out = torch.empty_like(padded)
    out.flatten()[scale_places(*padded.shape).flatten()] = padded.flatten()
    return out


def unshuffled_scale(scale: torch.Tensor) -> torch.Tensor:
    """[rows, columns], padded: shuffled -> row-major."""
    return scale.flatten()[scale_places(*scale.shape)]
