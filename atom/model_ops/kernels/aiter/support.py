"""What the `aiter` entries of the op table share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from atom.model_ops.kernels.aiter import probe
from atom.model_ops.registry import PLAIN, Implementation, OpQuery

HALF = (torch.bfloat16, torch.float16)


def implementation(
    load: Callable[[], Any],
    *entry_points: str,
    refuses: Callable[[OpQuery], str | None] = lambda _: None,
    dtypes: tuple[torch.dtype, ...] = HALF,
    layout: str = PLAIN,
) -> Implementation:
    """An `aiter` entry of the op table.

    Args:
        entry_points: what `load` asks for.
        refuses: judges shape and storage.
        dtypes: of the activations.
    """

    def supports(query: OpQuery) -> str | None:
        if reason := probe.refusal(*entry_points):
            return reason
        if query.dtype not in dtypes and query.dtype not in probe.extra_dtypes():
            return f"computes in {_listed(dtypes)}, not {_short(query.dtype)}"
        return refuses(query)

    return Implementation("aiter", supports, load, layout)


def refuses_storage(query: OpQuery) -> str | None:
    """A cache is kept in the model's type or in the 8 bits that the arch multiplies."""
    if query.storage in (query.dtype, query.platform.fp8_dtype):
        return None
    known = _listed((query.dtype, query.platform.fp8_dtype))
    return f"keeps a cache in {known}, not {_short(query.storage)}"


def storage_name(scale: torch.Tensor | None) -> str:
    """How aiter's cache writers call the type of the cache that has this scale."""
    return "auto" if scale is None else "fp8"


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...] with each row contiguous; the rows may lie apart."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(dict.fromkeys(_short(dtype) for dtype in dtypes))
