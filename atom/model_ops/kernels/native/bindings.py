"""Shared by the native ops: kernels, support checks, tensor layouts.

A call has about two microseconds of overhead. Arguments are packed into one block of 8-byte fields
in the order of the C++ struct, pointers first. A kernel returns 0, or 1 + the index of the row or
sequence that is out of range.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from ctypes import c_char_p, c_int64
from struct import Struct
from typing import Any, Protocol

import torch

from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.operands import mismatch as mismatch
from atom.model_ops.registry import OpQuery

Kernel = Callable[[bytes], int]

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Listener(Protocol):
    """Takes the kernels that its thread calls, which do not run then."""

    def called(self, kernel: str, block: bytes, num_pointers: int) -> None:
        """A kernel was called with arguments `block`, which begin with so many pointers."""
        ...

    def paused(self, action: Callable[[], None], tensors: tuple[torch.Tensor, ...]) -> None:
        """Something else is to be done here."""
        ...


class _Listening(threading.local):
    listener: Listener | None = None


listening = _Listening()


def num_threads() -> int:
    """The number of threads to give a kernel; 0, the program's, while one is recorded."""
    return torch.get_num_threads() if listening.listener is None else 0


def between_kernels(action: Callable[[], None], *tensors: torch.Tensor) -> None:
    """Do this now, or in each replay of the program that is recorded.

    Args:
        action: may do anything with the tensors' contents, and calls no recorded work.
        tensors: that it reads and writes.
    """
    if listening.listener is None:
        action()
    else:
        listening.listener.paused(action, tensors)


class Kernels:
    """The kernels of one op, by dtype.

    Attributes:
        op: their name in the library, without the dtype.

    Args:
        layout: of their arguments, such as `4P5q`: pointers, then integers and doubles.
    """

    def __init__(self, op: str, layout: str) -> None:
        self.op = op
        self._pack = Struct(layout).pack
        self._num_pointers = int(layout.partition("P")[0])
        self._kernels: dict[torch.dtype | None, tuple[str, Kernel]] = {}

    def __call__(self, dtype: torch.dtype | None, *arguments: float) -> int:
        """Call the kernel for `dtype`, or the only one if None. 0, or 1 + the index of what is out
        of range.
        """
        if dtype not in self._kernels:
            name = self.op if dtype is None else f"{self.op}_{_NAMES[dtype]}"
            self._kernels[dtype] = name, kernel(name)
        name, function = self._kernels[dtype]
        block = self._pack(*arguments)
        if (listener := listening.listener) is not None:
            listener.called(name, block, self._num_pointers)
            return 0
        return function(block)


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
def kernel(name: str) -> Kernel:
    function = _symbol(name)
    function.argtypes = [c_char_p]
    function.restype = c_int64
    call: Kernel = function
    return call


@functools.cache
def address(name: str) -> int:
    """Where a kernel lies in memory."""
    return int(ctypes.cast(_symbol(name), ctypes.c_void_p).value or 0)


@functools.cache
def constant(name: str) -> int:
    """A build property: `lanes`, `has_float16`."""
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


def check_out(op: str, out: torch.Tensor, rows: int, outs: int, dtype: torch.dtype) -> None:
    """Raises:
    ValueError: when a product [rows, outs] of `dtype` cannot be written to `out`.
    """
    if out.shape != (rows, outs) or out.dtype is not dtype or out.stride(1) != 1:
        raise ValueError(
            f"{op} writes [{rows}, {outs}] {dtype} with each row contiguous, not to "
            f"{list(out.shape)} {out.dtype} with strides {out.stride()}"
        )
