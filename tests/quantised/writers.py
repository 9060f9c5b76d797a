"""Writes codes as checkpoints store them, bit by bit from the formats' descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

PLAIN = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


_seeds = count()


def generator() -> torch.Generator:
    """Another one for each matrix, so that matrices taken for each other show."""
    return torch.Generator().manual_seed(next(_seeds))


def random_codes(rows: int, columns: int, num_codes: int = 16) -> torch.Tensor:
    """int64 [rows, columns] of 0 to num_codes - 1, each of which occurs if there is room."""
    codes = torch.randint(0, num_codes, (rows * columns,), generator=generator())
    codes[:num_codes] = torch.arange(num_codes)[: len(codes)]
    return codes.view(rows, columns)


def pack_words(codes: torch.Tensor, order: Sequence[int] = PLAIN) -> torch.Tensor:
    """Codes [..., n] -> int32; bits of number i of a word hold its element `order[i]`."""
    bits = 32 // len(order)
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // len(order), dtype=torch.int64)
    for i, element in enumerate(order):
        words |= codes[..., element :: len(order)] << (bits * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., n] -> uint8 [..., n / 2], element 2j in the low bits of byte j."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def distinct(rows: int, columns: int) -> torch.Tensor:
    """float64 [rows, columns], about 1 / 32, exact in float16 and bfloat16; neighbours differ."""
    return (8 + (3 * torch.arange(rows)[:, None] + torch.arange(columns)) % 7).double() / 256


def exponents(rows: int, columns: int) -> torch.Tensor:
    """e8m0 bytes [rows, columns] about 1 / 16; neighbours differ."""
    return (121 + (3 * torch.arange(rows)[:, None] + torch.arange(columns)) % 5).to(torch.uint8)


def powers(stored: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes -> float64."""
    return torch.tensor([2.0 ** (int(b) - 127) for b in stored.flatten()]).double().view_as(stored)


def over_groups(scale: torch.Tensor, size: int, columns: int) -> torch.Tensor:
    """[..., groups] -> [..., columns]: column i gets the value of group i // size."""
    return scale[..., torch.arange(columns) // size]


def over_blocks(scale: torch.Tensor, rows: int, size: int, out: int, columns: int) -> torch.Tensor:
    """The number of each weight's block of `rows` outputs and `size` inputs, [out, columns]."""
    return over_groups(scale[torch.arange(out) // rows], size, columns)
