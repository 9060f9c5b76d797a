"""Shared by the aiter adapters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from atom.model_ops.kernels import probe
from atom.model_ops.registry import OpQuery, always

# For which architecture aiter picks kernels: $GPU_ARCHS if that is set, of several the last.
_GET_GFX = probe.EntryPoint("aiter.jit.utils.chip_info:get_gfx", "")
# The device's.
COMPUTE_UNITS = probe.EntryPoint("aiter.jit.utils.chip_info:get_cu_num", "")

# Keeps a bound that is rounded to bfloat16 within the range; what it cuts off rounds to the largest
# number all the same.
_INWARDS = 1 - 2**-8

# Smallest and largest number that a scale of FP8 can stand for, by scale and the number's type.
_bounds = WeakTensorKeyDictionary()

HALF = (torch.bfloat16, torch.float16)


def requires(
    *entry_points: probe.EntryPoint,
    also: Callable[[OpQuery], str | None] = always,
    dtypes: tuple[torch.dtype, ...] = HALF,
) -> Callable[[OpQuery], str | None]:
    """A `refuses` function: requires aiter's entry points, that it knows the GPU, and dtypes, and
    then asks `also`.

    Args:
        also: checks shape and storage.
        dtypes: of the activations.
    """

    def refuses(query: OpQuery) -> str | None:
        if reason := probe.refusal(*entry_points, _GET_GFX) or _refuses_arch(query.platform.arch):
            return reason
        if query.dtype not in dtypes and query.dtype not in probe.extra_dtypes():
            return f"computes in {_listed(dtypes)}, not {_short(query.dtype)}"
        return also(query)

    return refuses


def _refuses_arch(arch: str) -> str | None:
    """Why aiter would pick kernels for another GPU than this one; None if it does not."""
    try:
        told = probe.function(_GET_GFX)()
    except Exception as error:
        what = " ".join(str(error).split())
        return f"it cannot tell the GPU's architecture: {type(error).__name__}: {what}"
    if told == arch:
        return None
    return (
        f"it picks kernels for {told}, and this GPU is {arch}: it takes the last of $GPU_ARCHS, "
        f"which is for building it; unset that, or set it to {arch}"
    )


def arch() -> str:
    """The platform's architecture, as aiter tells it: `requires` refuses one that tells another."""
    return str(probe.function(_GET_GFX)())


def refuses_storage(query: OpQuery) -> str | None:
    """A cache must be in the model's dtype or in the arch's FP8 type."""
    if query.storage in (query.dtype, query.platform.fp8_dtype):
        return None
    known = _listed((query.dtype, query.platform.fp8_dtype))
    return f"keeps a cache in {known}, not {_short(query.storage)}"


def storage_name(scale: torch.Tensor | None) -> str:
    """aiter's name for the storage dtype of a cache with this scale."""
    return "auto" if scale is None else "fp8"


def bounded(x: torch.Tensor, scale: torch.Tensor | None, storage: torch.dtype) -> torch.Tensor:
    """x [T, ...] with contiguous rows, and with a scale [1] within the range of the FP8 `storage`:
    aiter's kernels do not saturate, and what lies beyond becomes NaN.
    """
    if scale is None:
        return dense_rows(x)
    if scale not in _bounds:
        _bounds[scale] = {}
    bounds = _bounds[scale]
    if x.dtype not in bounds:
        bound = (scale * (torch.finfo(storage).max * _INWARDS)).to(x.dtype)
        bounds[x.dtype] = -bound, bound
    return dense_rows(x.clamp(*bounds[x.dtype]))


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...] with contiguous rows; rows may be strided."""
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
