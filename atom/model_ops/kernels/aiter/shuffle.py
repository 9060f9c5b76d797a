"""The layout of weights for aiter's matrix kernels, which read it whatever the weights look like.

Row-major weights give wrong numbers without an error, so weights are converted once after loading,
in place, and marked as aiter's other callers mark them.
"""

from __future__ import annotations

import torch

from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.kernels.torch.fp8 import bits

SHUFFLE = EntryPoint("aiter.ops.shuffle:shuffle_weight", "x layout")

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
    out = weight if dtype is None else weight.view(dtype)
    out.is_shuffled = True  # type: ignore[attr-defined]
    return out


def check_shuffled(*weights: torch.Tensor) -> None:
    """Raises:
    RuntimeError: for weights without the mark.
    """
    if not all(getattr(weight, "is_shuffled", False) for weight in weights):
        raise RuntimeError("aiter's experts need weights from `prepare`, which were shuffled")
