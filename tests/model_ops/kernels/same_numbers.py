"""Compares two implementations of an op on integers and copies: to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def random(seed: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    return integers


def check(ours: Any, theirs: Any, device: torch.device, *given: Any) -> None:
    """The same numbers of the same types, in what is returned and in what is written, which is
    contiguous.
    """
    results = []
    for op in (ours, theirs):
        own = [_copy(t).to(device) if isinstance(t, torch.Tensor) else t for t in given]
        out = op(*own)
        every = list(out) if isinstance(out, tuple) else [out]
        results.append(every + [t for t in own if isinstance(t, torch.Tensor)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with gaps as it is, since a copy has none."""
    return tensor.clone() if tensor.is_contiguous() else tensor
