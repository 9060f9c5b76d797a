"""The layout of weights for aiter's matrix kernels, which read it whatever the weights look like.

Row-major weights give wrong numbers without an error, so weights are converted once after loading,
in place, and marked as aiter's other callers mark them.
"""

from __future__ import annotations

import torch

from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.kernels.torch.fp8 import bits
from atom.model_ops.quant.weights import QuantWeights, unpack_nibbles

SHUFFLE = EntryPoint("aiter.ops.shuffle:shuffle_weight", "x layout")
PACK_INT4 = EntryPoint("aiter.ops.shuffle:pack_int8_to_packed_int4", "x_shuf_i8")
SCALE_INT4 = EntryPoint("aiter.ops.shuffle:shuffle_scale_for_int4", "scale")

# Rows, and half of the columns, of a tile of the layout; columns of 4-bit weights are bytes.
_TILE = 16, 16
_ROWS, _COLUMNS = _TILE[0], 2 * _TILE[1]


def refuses_shuffle(rows: int, columns: int) -> str | None:
    """Why a matrix [rows, columns] cannot be shuffled; None if it can."""
    if rows % _ROWS or columns % _COLUMNS:
        return f"shuffles tiles of {_ROWS} x {_COLUMNS}, not weights of {rows} x {columns}"
    return None


def shuffle(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert weight [out, in] or [experts, out, in] in place -> the same memory, marked.

    Args:
        dtype: what the result is viewed as, of as many bytes.

    Raises:
        ValueError: for sizes that `refuses_shuffle` refuses.
    """
    if reason := refuses_shuffle(*weight.shape[-2:]):
        raise ValueError(f"aiter {reason}")
    stored = bits(weight)
    # Matrix by matrix, so that no second copy of all experts is needed.
    for matrix in stored if stored.dim() == 3 else (stored,):
        matrix.copy_(function(SHUFFLE)(matrix, _TILE))
    return _marked(weight if dtype is None else weight.view(dtype))


def shuffle_int4(weights: QuantWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """int4 codes [experts, out, in / 2] in place, and their scales [experts, out, groups].

    The codes become numbers from -8 to 7, shuffled as those of 8 bits, two to a byte. Scales lie
    group by group, in pairs, and are bfloat16 as the published ones: others are rounded to it.
    """
    assert weights.scale is not None
    for matrix in weights.codes:
        numbers = unpack_nibbles(matrix).view(torch.int8) - weights.format.zero
        packed = function(PACK_INT4)(shuffle(numbers))
        matrix.copy_(packed.view(torch.uint8).view(matrix.shape))
    by_group = weights.scale.to(torch.bfloat16).transpose(1, 2).contiguous()
    codes = weights.codes.view(torch.int4)  # type: ignore[attr-defined]
    return _marked(codes), function(SCALE_INT4)(by_group).flatten()


def _marked(weight: torch.Tensor) -> torch.Tensor:
    weight.is_shuffled = True  # type: ignore[attr-defined]
    return weight


def check_shuffled(*weights: torch.Tensor) -> None:
    """Raises:
    RuntimeError: for weights without the mark.
    """
    if not all(getattr(weight, "is_shuffled", False) for weight in weights):
        raise RuntimeError("aiter's experts need weights from `prepare`, which were shuffled")
