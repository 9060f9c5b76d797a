"""The parts of GGUF's blocks as the tensors of `quant.formats.gguf`, bit by bit.

Source of the layouts: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.quant.blocks import block_codes
from atom.model_ops.quant.weights import FP4_VALUES, INT6_ZERO, pack_int6, pack_nibbles
from atom.platform import current_platform

# What the codes of IQ4_NL and IQ4_XS stand for.
_IQ4_VALUES = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
)
_FP4_DOUBLED = torch.tensor(
    [int(sign * 2 * value) for sign in (1, -1) for value in FP4_VALUES],
    dtype=torch.int8,
)
_TABLES = {
    "IQ4_NL": _IQ4_VALUES,
    "IQ4_XS": _IQ4_VALUES,
    "MXFP4": (_FP4_DOUBLED + INT6_ZERO).view(torch.uint8),
}

# uint8 [rows, blocks, bytes of a block] -> [rows, blocks, n].
Part = Callable[[torch.Tensor], torch.Tensor]


def kernels_read_codes() -> bool:
    """Whether the C++ kernels are here: a machine with a GPU compiles none."""
    return not current_platform().is_gpu and native_build().library is not None


def read_part(
    kind: str, name: str, raw: torch.Tensor, block_bytes: int, *, by_kernels: bool = False
) -> torch.Tensor:
    """One tensor of a matrix.

    Args:
        kind: GGUF's name of the type.
        name: of the tensor.
        raw: uint8 [rows, bytes of a row].
        by_kernels: codes are read by the C++ kernels, many times as fast.

    Returns:
        [rows, n], of the dtype that `stored_tensors` says.
    """
    blocks = raw.view(raw.shape[0], -1, block_bytes)
    if by_kernels and kind != "Q8_0" and name in ("weight", "weight_high"):
        whole = kind in ("IQ4_NL", "IQ4_XS")
        part = "whole" if whole else "low_four" if name == "weight" else "high_two"
        return block_codes(kind, part, blocks, _TABLES.get(kind))
    return _PARTS[kind][name](blocks).reshape(raw.shape[0], -1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 number at byte `start`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _negative_half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return -_half(blocks, start)


def _signed_bytes(blocks: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return blocks[..., start:stop].contiguous().view(torch.int8)


def _runs(packed: torch.Tensor, size: int) -> torch.Tensor:
    """[..., n] -> [..., n / size, size]."""
    return packed.reshape(*packed.shape[:-1], -1, size)


def _nibbles(blocks: torch.Tensor, start: int, run: int) -> torch.Tensor:
    """Of runs of `run` bytes from `start` on: all low four bits, then all high ones."""
    packed = _runs(blocks[..., start:], run)
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


def _high_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Q5_0's and Q5_1's fifth bits of 32 weights, in four bytes."""
    packed = blocks[..., start : start + 4]
    return torch.stack([(packed >> shift) & 1 for shift in range(8)], dim=-1).flatten(-2)


def _q5_codes(blocks: torch.Tensor, start: int) -> torch.Tensor:
    low = blocks[..., start + 4 :]
    return torch.cat((low & 15, low >> 4), dim=-1) | (_high_bits(blocks, start) << 4)


def _q5_0_codes(blocks: torch.Tensor) -> torch.Tensor:
    """16 stands for zero, and 32 does in `int6`."""
    return _q5_codes(blocks, 2) + 16


def _q5_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Q5_K: of 32 bytes all low four bits, then all high ones; bit n of a byte of `high` belongs to
    the n-th 32 weights.
    """
    low = _runs(blocks[..., 48:], 32)
    high = blocks[..., 16:48]
    bits = torch.stack([(high >> shift) & 1 for shift in range(8)], dim=-2)
    return (torch.stack((low & 15, low >> 4), dim=-2).flatten(-3, -2) | (bits << 4)).flatten(-2)


def _crumbs(packed: torch.Tensor) -> torch.Tensor:
    """Two bits of 128 weights at a time, each 32 of them in the same bits of 32 bytes."""
    halves = _runs(packed, 32)
    return torch.stack([(halves >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)


def _q2_codes(blocks: torch.Tensor) -> torch.Tensor:
    return _crumbs(blocks[..., 16:80])


def _q2_scales(blocks: torch.Tensor) -> torch.Tensor:
    return (blocks[..., :16] & 15).view(torch.int8)


def _q2_mins(blocks: torch.Tensor) -> torch.Tensor:
    return (blocks[..., :16] >> 4).view(torch.int8)


def _q3_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Q3_K: a third bit that is not set stands for -4; codes are above 32, the zero of `int6`."""
    third = torch.stack([(blocks[..., :32] >> shift) & 1 for shift in range(8)], dim=-2)
    return _crumbs(blocks[..., 32:96]) + (third.flatten(-2) << 2) + 28


def _q3_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Six bits: four in halves of eight bytes, two in quarters of four; 32 stands for zero."""
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    pairs = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return (torch.cat((low & 15, low >> 4), dim=-1) | (pairs << 4)).view(torch.int8) - 32


def _looked_up(blocks: torch.Tensor, start: int, values: torch.Tensor) -> torch.Tensor:
    """Of runs of 16 bytes: numbers of the low four bits, then of the high ones."""
    packed = _runs(blocks[..., start:], 16)
    return values[torch.cat((packed & 15, packed >> 4), dim=-1).flatten(-2).long()]


def _iq4_scales(blocks: torch.Tensor) -> torch.Tensor:
    """IQ4_XS: four bits in halves of four bytes, two in quarters of two; 32 stands for zero."""
    low, high = blocks[..., 4:8], blocks[..., 2:4]
    pairs = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    halves = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    return (halves | (pairs << 4)).view(torch.int8) - 32


def _mxfp4_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Twice the numbers of e2m1, above the zero of `int6`."""
    return _looked_up(blocks, 1, _TABLES["MXFP4"])


def _mxfp4_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Half the power of two."""
    return torch.exp2(blocks[..., :1].double() - 128).to(torch.bfloat16)


def _int6(codes: Part) -> dict[str, Part]:
    """Both tensors of `int6` codes."""

    def low(blocks: torch.Tensor) -> torch.Tensor:
        return pack_nibbles(codes(blocks) & 15)

    def high(blocks: torch.Tensor) -> torch.Tensor:
        found = codes(blocks)
        return pack_int6(found)[..., found.shape[-1] // 2 :]

    return {"weight": low, "weight_high": high}


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
        **_int6(_q6_codes),
        "weight_scale": partial(_signed_bytes, start=192, stop=208),
        "weight_super_scale": partial(_half, start=208),
    },
    "Q5_0": {**_int6(_q5_0_codes), "weight_scale": partial(_half, start=0)},
    "Q5_1": {
        **_int6(partial(_q5_codes, start=4)),
        "weight_scale": partial(_half, start=0),
        "weight_offset": partial(_half, start=2),
    },
    "Q5_K": {
        **_int6(_q5_k_codes),
        "weight_scale": _k_scales,
        "weight_offset": _k_mins,
        "weight_super_scale": partial(_half, start=0),
        "weight_super_offset": partial(_negative_half, start=2),
    },
    "Q2_K": {
        **_int6(_q2_codes),
        "weight_scale": _q2_scales,
        "weight_offset": _q2_mins,
        "weight_super_scale": partial(_half, start=80),
        "weight_super_offset": partial(_negative_half, start=82),
    },
    "Q3_K": {
        **_int6(_q3_codes),
        "weight_scale": _q3_scales,
        "weight_super_scale": partial(_half, start=108),
    },
    "IQ4_NL": {
        "weight": partial(_looked_up, start=2, values=_IQ4_VALUES),
        "weight_scale": partial(_half, start=0),
    },
    "IQ4_XS": {
        "weight": partial(_looked_up, start=8, values=_IQ4_VALUES),
        "weight_scale": _iq4_scales,
        "weight_super_scale": partial(_half, start=0),
    },
    "MXFP4": {**_int6(_mxfp4_codes), "weight_scale": _mxfp4_scales},
}
