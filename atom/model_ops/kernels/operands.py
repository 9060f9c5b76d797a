"""What kernels say of operands that do not fit together."""

from __future__ import annotations

import torch


def mismatch(op: str, **tensors: torch.Tensor) -> ValueError:
    """The error for operands that do not match, with their shapes and dtypes."""
    given = ", ".join(
        f"{name} {list(t.shape)} {t.dtype}{'' if t.is_contiguous() else ' (strided)'}"
        for name, t in tensors.items()
    )
    return ValueError(f"the operands of {op} do not fit together: {given}")
