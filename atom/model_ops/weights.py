"""Copying a checkpoint tensor into a parameter, by value and never silently wrong."""

from __future__ import annotations

import torch


def copy_weight(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, converting between floating-point types by value.

    A target on the meta device takes no values; what does not fit is refused all the same.

    Raises:
        ValueError: when the shapes differ, an integer meets a float, or a finite value
            would become infinite.
    """
    if target.shape != source.shape:
        raise ValueError(
            f"the checkpoint holds shape {list(source.shape)}, the model wants {list(target.shape)}"
        )
    if target.is_floating_point() != source.is_floating_point():
        raise ValueError(f"the checkpoint holds {source.dtype}, the model wants {target.dtype}")
    if target.is_meta:  # a model without memory, built to compare shapes
        return
    target.copy_(source)
    narrows = target.dtype == torch.float16 and source.dtype != torch.float16
    if narrows and bool((target.isinf() & source.isfinite().to(target.device)).any()):
        raise ValueError(f"values up to {source.abs().max().item():g} do not fit float16")
