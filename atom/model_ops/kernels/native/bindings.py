"""Shared by the native ops: kernel lookup, support checks, tensor layouts.

A call has about two microseconds of overhead. Arguments are packed into one block of 8-byte fields
in the order of the C++ struct. A kernel returns 0, or 1 + the index of the row or sequence that is
out of range.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_char_p, c_int64
from typing import Any

import torch

from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.registry import OpQuery

Kernel = Callable[[bytes], int]

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def refuses(query: OpQuery) -> str | None:
    """Why no native kernel can run here; None if they can."""
    if query.platform.kind != "cpu":
        return "runs on CPUs only"
    if query.dtype not in _NAMES:
        return f"no kernel for {query.dtype}"
    if reason := native_build().reason:
        return reason
    if query.dtype == torch.float16 and not constant("has_float16"):
        return "built without float16 conversion"
    return None


@functools.cache
def kernels(op: str) -> dict[torch.dtype, Kernel]:
    """The kernels of one op, by storage dtype."""
    names = dict(_NAMES)
    if not constant("has_float16"):
        del names[torch.float16]
    return {dtype: kernel(f"{op}_{name}") for dtype, name in names.items()}


@functools.cache
def kernel(name: str) -> Kernel:
    function = _symbol(name)
    function.argtypes = [c_char_p]
    function.restype = c_int64
    call: Kernel = function
    return call


@functools.cache
def constant(name: str) -> int:
    """A build property: `lanes`, `has_float16`, `has_amx`."""
    function = _symbol(name)
    function.restype = c_int64
    return int(function())


def _symbol(name: str) -> Any:
    build = native_build()
    if build.library is None:
        raise RuntimeError(f"the native kernels are not available: {build.reason}")
    return build.library[f"atom_{name}"]  # an item, not an attribute: a new object each time


def rows_apart(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [T, n] or [T, heads, d] with each row contiguous, and its row stride in elements."""
    strides = x.stride()
    if strides[-1] != 1 or (len(strides) == 3 and strides[1] != x.shape[2]):
        x = x.contiguous()
        return x, x.stride(0)
    return x, strides[0]


def mismatch(op: str, **tensors: torch.Tensor) -> ValueError:
    """The error for operands that do not match, with their shapes and dtypes."""
    given = ", ".join(
        f"{name} {list(t.shape)} {t.dtype}{'' if t.is_contiguous() else ' (strided)'}"
        for name, t in tensors.items()
    )
    return ValueError(f"the operands of {op} do not fit together: {given}")
