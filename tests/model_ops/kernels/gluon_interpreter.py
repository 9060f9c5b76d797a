"""Runs the arithmetic of a Gluon kernel on the CPU, for which Gluon has no interpreter.

The body runs under Triton's interpreter with another `gl`: layouts mean nothing, a conversion of
layouts is the identity, a matrix instruction is a product, and a buffer load is a masked load
that gives zeros where the mask is false. Whether the layouts are legal is what compiling shows.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction

_INT32 = np.iinfo(np.int32)


class _Layout:
    """Any layout: takes every argument and means nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class _Instructions:
    """What both generations of matrix units have."""

    @staticmethod
    def buffer_load(ptr: Any, offsets: Any, mask: Any = None, other: Any = None) -> Any:
        _check_offsets(offsets)
        if mask is not None and other is None:
            other = 0.0
        return tl.load(ptr + offsets, mask=mask, other=other)

    @staticmethod
    def buffer_store(stored_value: Any, ptr: Any, offsets: Any, mask: Any = None) -> None:
        _check_offsets(offsets)
        tl.store(ptr + offsets, stored_value, mask=mask)

    @staticmethod
    def mfma(a: Any, b: Any, acc: Any) -> Any:
        if a.dtype != b.dtype:
            raise TypeError(f"matrix instruction of {a.dtype} and {b.dtype}")
        return tl.dot(a, b, acc)


class _Gluon:
    """Stands for `triton.experimental.gluon.language`. Looks names up when they are used, so that
    it finds what the interpreter has put in the place of Triton's own."""

    amd = types.SimpleNamespace(AMDMFMALayout=_Layout, cdna3=_Instructions(), cdna4=_Instructions())

    @staticmethod
    def convert_layout(value: Any, _layout: Any) -> Any:
        return value

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return _Layout
        function = getattr(tl, name)
        if name in ("arange", "zeros", "full"):
            return lambda *args, layout, **kwargs: function(*args, **kwargs)
        return function


class _Function(InterpretedFunction):  # type: ignore[misc]
    """The stock one knows the annotation `tl.constexpr` only."""

    def rewrite(self) -> Any:
        function = super().rewrite()
        function.__annotations__ = dict.fromkeys(function.__annotations__, "constexpr")
        return function


def _check_offsets(offsets: Any) -> None:
    if offsets.dtype != tl.int32:
        raise TypeError(f"buffer offsets are int32, not {offsets.dtype}")
    values = offsets.handle.data
    if values.min() < 0 or values.max() > _INT32.max // 8:
        raise ValueError(f"buffer offsets of {values.min()} .. {values.max()} elements")


def interpreted(kernel: GluonJITFunction) -> InterpretedFunction:
    """`interpreted(kernel)[grid](cpu tensors, ...)`; what it calls is interpreted too."""
    return _interpreted(kernel, {})


def _interpreted(kernel: Any, done: dict[Any, Any]) -> Any:
    if kernel not in done:
        # Its own globals: the kernel's module stays as it is.
        names: dict[str, Any] = {**kernel.fn.__globals__, "tl": tl, "gl": _Gluon()}
        function = types.FunctionType(
            kernel.fn.__code__, names, kernel.fn.__name__, kernel.fn.__defaults__
        )
        function.__annotations__ = kernel.fn.__annotations__
        function.__module__ = kernel.fn.__module__
        done[kernel] = _Function(function)
        for name, value in kernel.fn.__globals__.items():
            if isinstance(value, GluonJITFunction) and value is not kernel:
                names[name] = _interpreted(value, done)
    return done[kernel]
