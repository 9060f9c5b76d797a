"""Tiles of latent attention in the latent space, by architecture, and how many programs fit.

The compile lane compares the numbers of programs with compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from atom.model_ops.metadata import LatentCacheTensor
from atom.platform import Platform

LARGEST_ROW_TILE = 64
_SMALLEST_ROW_TILE = 16


@dataclass(frozen=True)
class DecodeTiles:
    """Launch parameters of `mla_decode`.

    Attributes:
        rows: (query, head) pairs per program.
        keys: cached tokens per iteration.
        latents_first: multiply latents by queries, not queries by latents. Hopper's warp group
            instruction has at least 64 rows; with latents as its rows, few pairs use it, too.
        hoist: compute before the loop over keys what is the same in every turn. On Hopper these
            are also the descriptors of operands, for which registers may not suffice.
        resident: programs that a unit runs side by side.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    latents_first: bool = False
    hoist: bool = True
    resident: int = 1


def decode_tiles(
    platform: Platform, rows: int, dtype: torch.dtype, cache: LatentCacheTensor
) -> DecodeTiles:
    """For so many pairs of a sequence, and products of type `dtype`.

    For a latent of 512 in 16 bits, a tile of 32 keys takes 36 KiB of gfx942's 64 KiB of LDS.
    """
    rows = min(max(int(triton.next_power_of_2(rows)), _SMALLEST_ROW_TILE), LARGEST_ROW_TILE)
    if platform.kind == "rocm":
        return _amd(platform.arch, rows, dtype, cache.latent.dtype)
    if dtype is torch.float32:
        return DecodeTiles(16, 16, 4, 3, resident=2)
    if platform.arch == "sm90":
        return _hopper(rows, cache)
    few = rows == _SMALLEST_ROW_TILE
    return DecodeTiles(rows, 32, 4 if few else 8, 3, resident=2 if few else 1)


def _amd(arch: str, rows: int, dtype: torch.dtype, storage: torch.dtype) -> DecodeTiles:
    # Three stages have two tiles of keys in shared memory, of which others have room for one.
    stages = 3 if arch == "gfx950" else 2
    if dtype is torch.float32:
        return DecodeTiles(16, 16, 4, stages)
    # What more than 16 rows or FP8 need of registers leaves no room for a second program.
    few = rows == 16 and storage.itemsize == 2 and arch == "gfx950"
    return DecodeTiles(rows, 32, 4, stages, resident=2 if few else 1)


def _hopper(rows: int, cache: LatentCacheTensor) -> DecodeTiles:
    # Of smaller blocks, every latent's place takes registers, and so do latents to be converted.
    in_one_block = cache.block_size % 64 == 0
    if in_one_block and cache.latent.itemsize == 2 and rows < LARGEST_ROW_TILE:
        return DecodeTiles(rows, 64, 4, 2, latents_first=True)
    if rows == _SMALLEST_ROW_TILE:
        return DecodeTiles(rows, 32, 4, 3, resident=2)
    if in_one_block:
        # Half of the rows may be empty: of 32 in FP8 a tile of 32 took 1.5 times as long.
        return DecodeTiles(LARGEST_ROW_TILE, 64, 8, 2, hoist=False)
    return (
        DecodeTiles(rows, 32, 8, 3, hoist=False)
        if rows == LARGEST_ROW_TILE
        else DecodeTiles(rows, 16, 8, 3)
    )
