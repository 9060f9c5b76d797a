"""Integers in the 32-bit words of AWQ, GPTQ and Quark, and the groups that share a scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from atom.config import ConfigError
from atom.model_ops.quant.base import Axis, read_size
from atom.model_ops.quant.names import read_flag
from atom.model_ops.quant.weights import pack_nibbles, unpack_nibbles

PER_WORD = 8
# In the order that AWQ's kernels read, four bits number i hold element [0, 2, 4, 6, 1, 3, 5, 7][i];
# this is its inverse.
_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 4n], the lowest bits first."""
    # A copy, since a dimension of size 1 may have any stride.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unpack_words(words: torch.Tensor, reordered: bool) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 8n] of values 0..15.

    Args:
        reordered: in AWQ's order; else element i is in bits 4i to 4i + 3.
    """
    codes = unpack_nibbles(as_bytes(words))
    if not reordered:
        return codes
    words_apart = codes.view(*codes.shape[:-1], -1, PER_WORD)
    return words_apart[..., list(_POSITIONS)].flatten(-2)


def repack_words(words: torch.Tensor, reordered: bool) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 4n], two codes to a byte, the first in the low four bits."""
    if not reordered:
        return as_bytes(words)
    if words.dim() > 2:  # one at a time, since unpacked codes take twice the memory
        return torch.stack([repack_words(matrix, reordered) for matrix in words])
    return pack_nibbles(unpack_words(words, reordered))


def transpose_words(words: torch.Tensor, reordered: bool) -> torch.Tensor:
    """int32 [..., in, out / 8] -> uint8 [..., out, in / 2], two codes to a byte."""
    if words.dim() > 2:
        return torch.stack([transpose_words(matrix, reordered) for matrix in words])
    return pack_nibbles(unpack_words(words, reordered).T)


def take_columns(codes: torch.Tensor, order: torch.Tensor, bits: int) -> torch.Tensor:
    """The inputs in another order: codes [..., in] of 8 bits, or [..., in / 2] bytes of two."""
    if bits == 8:
        return codes[..., order]
    return pack_nibbles(unpack_nibbles(codes)[..., order])


def signed(codes: torch.Tensor) -> torch.Tensor:
    """uint8 with an offset of 128 -> int8."""
    return (codes ^ 0x80).view(torch.int8)


_WHOLE_ROW_COLUMNS = 128


@dataclass(frozen=True)
class Groups:
    """Inputs that share a scale; `size` is None when all of them do.

    Those get a scale for each 128 inputs instead, the same for all, as ops want groups of a fixed
    size.
    """

    size: int | None

    @property
    def columns(self) -> int:
        return self.size or _WHOLE_ROW_COLUMNS

    @property
    def axis(self) -> Axis:
        """Of the checkpoint's scales along the inputs."""
        return Axis("all", 1) if self.size is None else Axis("in", self.size)

    def spread(self, values: torch.Tensor, columns: int) -> torch.Tensor:
        """Stored values [..., out, groups] -> [..., out, ceil(columns / self.columns)]."""
        if self.size is None:
            values = values.expand(*values.shape[:-1], math.ceil(columns / self.columns))
        return values.contiguous()


def read_group_size(value: object) -> int | None:
    """`group_size`; None for -1, which stands for all inputs.

    Raises:
        ConfigError: when it is no size.
    """
    if value == -1:
        return None
    return read_size("quantization_config", "group_size", value)


def read_layout(config: Mapping[str, object], keys: Sequence[str], supported: Sequence[str]) -> str:
    """What any of several keys says of the layout; the first supported one if none does.

    Raises:
        ConfigError: when it is not supported, or two keys differ.
    """
    stated = {key: str(config[key]).lower() for key in keys if config.get(key) is not None}
    layouts = {key: read_flag(stated, key, supported, "") for key in stated}
    if len(set(layouts.values())) > 1:
        listed = " and ".join(f"{key}={layout!r}" for key, layout in layouts.items())
        raise ConfigError(f"quantization_config: {listed} differ")
    return next(iter(layouts.values()), supported[0])


def check_no_zeros(zeros: torch.Tensor) -> None:
    """Refuse zero points other than 0.

    Raises:
        ValueError: with their number.
    """
    if count := int(zeros.count_nonzero()):
        raise ValueError(
            f"{count} of {zeros.numel()} zero points are not 0, and the weights are symmetric"
        )
