"""The parts of GGUF's blocks as the tensors of `quant.formats.gguf`, bit by bit.

Source of the layouts: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from atom.model_ops.quant.weights import pack_int6, pack_nibbles

# uint8 [rows, blocks, bytes of a block] -> [rows, blocks, n].
Part = Callable[[torch.Tensor], torch.Tensor]


def read_part(kind: str, name: str, raw: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """One tensor of a matrix.

    Args:
        kind: GGUF's name of the type.
        name: of the tensor.
        raw: uint8 [rows, bytes of a row].

    Returns:
        [rows, n], of the dtype that `stored_tensors` says.
    """
    part = _PARTS[kind][name](raw.view(raw.shape[0], -1, block_bytes))
    return part.reshape(raw.shape[0], -1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 number at byte `start`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _negative_half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return -_half(blocks, start)


def _signed_bytes(blocks: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return blocks[..., start:stop].contiguous().view(torch.int8)


def _nibbles(blocks: torch.Tensor, start: int, run: int) -> torch.Tensor:
    """Of runs of `run` bytes from `start` on: all low four bits, then all high ones."""
    packed = blocks[..., start:]
    packed = packed.reshape(*packed.shape[:-1], -1, run)
    return pack_nibbles(torch.cat((packed & 15, packed >> 4), dim=-1)).flatten(-2)


def _k_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Q4_K's eight scales of six bits: four in whole bytes, four in pieces."""
    packed = blocks[..., 4:16]
    first, last = packed[..., :4] & 63, (packed[..., 8:] & 15) | ((packed[..., :4] >> 6) << 4)
    return torch.cat((first, last), dim=-1).view(torch.int8)


def _k_mins(blocks: torch.Tensor) -> torch.Tensor:
    packed = blocks[..., 4:16]
    first, last = packed[..., 4:8] & 63, (packed[..., 8:] >> 4) | ((packed[..., 4:8] >> 6) << 4)
    return torch.cat((first, last), dim=-1).view(torch.int8)


def _q6_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Q6_K: 128 weights at a time, four of which share two bytes of low bits and one of high."""
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32)
    pairs = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return (torch.cat((low & 15, low >> 4), dim=-1) | (pairs << 4)).flatten(-2)


def _q6_low(blocks: torch.Tensor) -> torch.Tensor:
    return pack_int6(_q6_codes(blocks))[..., :128]


def _q6_high(blocks: torch.Tensor) -> torch.Tensor:
    return pack_int6(_q6_codes(blocks))[..., 128:]


_PARTS: Mapping[str, Mapping[str, Part]] = {
    "Q8_0": {
        "weight": partial(_signed_bytes, start=2, stop=34),
        "weight_scale": partial(_half, start=0),
    },
    "Q4_0": {
        "weight": partial(_nibbles, start=2, run=16),
        "weight_scale": partial(_half, start=0),
    },
    "Q4_1": {
        "weight": partial(_nibbles, start=4, run=16),
        "weight_scale": partial(_half, start=0),
        "weight_offset": partial(_half, start=2),
    },
    # Its minima are subtracted.
    "Q4_K": {
        "weight": partial(_nibbles, start=16, run=32),
        "weight_scale": _k_scales,
        "weight_offset": _k_mins,
        "weight_super_scale": partial(_half, start=0),
        "weight_super_offset": partial(_negative_half, start=2),
    },
    "Q6_K": {
        "weight": _q6_low,
        "weight_high": _q6_high,
        "weight_scale": partial(_signed_bytes, start=192, stop=208),
        "weight_super_scale": partial(_half, start=208),
    },
}
