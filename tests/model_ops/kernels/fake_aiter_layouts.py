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


def packed_int4(numbers: torch.Tensor) -> torch.Tensor:
    """int8 [n] of -8..7 -> int8 [n / 2]: byte j of four has numbers j and j + 4 of eight."""
    eights = numbers.view(-1, 8).to(torch.int32) % 16
    return (eights[:, :4] + 16 * eights[:, 4:]).flatten().to(torch.uint8).view(torch.int8)


def unpacked_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> int8 [2 n] of -8..7."""
    fours = packed.view(-1, 4).to(torch.int32)
    codes = torch.cat((fours % 16, fours // 16), dim=1).flatten()
    return torch.where(codes < 8, codes, codes - 16).to(torch.int8)


def paired_scale(scale: torch.Tensor) -> torch.Tensor:
    """[experts, groups, out] -> [experts, groups / 2, out, 2]: two groups of an output together."""
    return torch.stack((scale[:, ::2], scale[:, 1::2]), dim=-1)
