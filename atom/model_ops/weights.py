"""Copies checkpoint tensors into parameters, with checks."""

from __future__ import annotations

import torch

# Types of bare bits, and what may be meant by them.
_SAME_BITS = {
    torch.uint32: (torch.int32, torch.uint32),
    torch.float8_e8m0fnu: (torch.uint8,),
}


def copy_weight(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, converting between floating-point dtypes by value.

    On a meta device target only the checks run.

    Raises:
        ValueError: when shapes differ, an integer meets a float, or a finite value would become
            infinite.
    """
    if target.shape != source.shape:
        raise ValueError(
            f"the checkpoint holds shape {list(source.shape)}, the model wants {list(target.shape)}"
        )
    if target.is_floating_point() != source.is_floating_point():
        raise ValueError(f"the checkpoint holds {source.dtype}, the model wants {target.dtype}")
    if target.is_meta:  # a model on the meta device, built to compare shapes
        return
    target.copy_(source)
    narrows = target.dtype == torch.float16 and source.dtype != torch.float16
    if narrows and bool((target.isinf() & source.isfinite().to(target.device)).any()):
        raise ValueError(f"values up to {source.abs().max().item():g} do not fit float16")


def copy_codes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target` bit by bit; both have elements of the same size.

    On a meta device target only the checks run.

    Raises:
        ValueError: when shapes differ, or dtypes other than by a sign or the name of 8 bits.
    """
    if target.shape != source.shape:
        raise ValueError(
            f"the checkpoint holds shape {list(source.shape)}, the model wants {list(target.shape)}"
        )
    if target.dtype not in _SAME_BITS.get(source.dtype, (source.dtype,)):
        raise ValueError(f"the checkpoint holds {source.dtype}, the model wants {target.dtype}")
    if not target.is_meta:
        target.copy_(source.view(target.dtype))
