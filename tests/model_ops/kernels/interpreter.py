"""Mends the Triton interpreter, so that bfloat16 and fp8 kernels give what a GPU gives.

The interpreter keeps bfloat16 and fp8 values as raw bits. Of those it multiplies and adds the
bits themselves, truncates where hardware rounds, and loses the carry out of the mantissa. Here
every such value is widened to float32, and narrowed to nearest even, by torch.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import interpreter_types
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_AS_BITS = frozenset(_TORCH) - {
    tl.float64,
    tl.float32,
    tl.float16,
}  # how the interpreter keeps them
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_TORCH_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def install() -> None:
    """Mend the interpreter of this process; a second call does nothing."""
    builder = interpreter.InterpreterBuilder
    if builder.create_dot is _dot:
        return
    interpreter_types.install()
    interpreter._convert_float = _convert
    builder.create_dot = _dot
    builder.create_dot_scaled = _dot_scaled
    builder.create_fma = _fma
    builder.cast_impl = _cast(builder.cast_impl)
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, _widened(getattr(builder, name)))
    for name in ("create_rsqrt", "create_erf"):
        setattr(builder, name, _widened_unary(getattr(builder, name)))
    interpreter.ReduceOps.apply_impl = _widened_reduce(interpreter.ReduceOps.apply_impl)
    interpreter.ScanOps.apply_impl = _widened_reduce(interpreter.ScanOps.apply_impl)
    interpreter._patch_lang_core = _with_every_type(interpreter._patch_lang_core)
    interpreter._patch_lang = _Language(interpreter._patch_lang).patch
    interpreter.GridExecutor.__call__ = _one_at_a_time(interpreter.GridExecutor.__call__)
    interpreter.GridExecutor._init_args_hst = _in_place(interpreter.GridExecutor._init_args_hst)
    interpreter.GridExecutor._restore_args_dev = _in_place(
        interpreter.GridExecutor._restore_args_dev
    )


def _one_at_a_time(call: Callable[..., Any]) -> Callable[..., Any]:
    """While a kernel runs its language is replaced for all threads, such as ranks'."""
    lock = RLock()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return call(*args, **kwargs)

    return wrapped


class _Language:
    """Triton's language, whose attributes the interpreter replaces while a kernel runs.

    The stock interpreter looks for them at every launch, and at every call of a function from
    within it. Here they are found once, and set once a launch.
    """

    def __init__(self, stock: Callable[..., Any]) -> None:
        self._stock = stock
        # Where, name, as it was, as it is for a kernel.
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self._is_replaced = False

    def patch(self, _function: Any) -> _Language:
        """For a launch, which restores it, or for a call from within one, which finds it done."""
        if not self._changes:
            both = types.FunctionType(_nothing.__code__, {"tl": tl, "core": tl.core})
            changes = self._stock(both)._changes
            self._changes = [(*change, getattr(change[0], change[1])) for change in changes]
        elif not self._is_replaced:
            for where, name, _, value in self._changes:
                setattr(where, name, value)
        self._is_replaced = True
        return self

    def restore(self) -> None:
        for where, name, stock, _ in reversed(self._changes):
            if stock is interpreter._MISSING:
                delattr(where, name)
            else:
                setattr(where, name, stock)
        self._is_replaced = False


def _nothing() -> None:
    """A function of which only the globals count."""


def _convert(data: Any, source: Any, target: Any, _rounding: Any = None) -> Any:
    """Raw bits of `source` values -> raw bits of `target` values, to nearest even."""
    bits = np.array(data, copy=True, order="C")
    bits = bits.view(_SIGNED[bits.itemsize])
    values = torch.from_numpy(bits.reshape(-1)).view(_TORCH[source])
    # Directly from float64 to a narrow type: no second rounding on the way.
    wide = values.to(torch.float64 if source == tl.float64 else torch.float32)
    narrow = wide.to(_TORCH[target])
    size = narrow.element_size()
    return narrow.view(_TORCH_SIGNED[size]).numpy().view(_UNSIGNED[size]).reshape(bits.shape)


def _float(handle: Any) -> Any:
    """A handle's values as numpy floats or integers."""
    scalar = handle.dtype.scalar
    if scalar not in _AS_BITS:
        return handle.data
    return _convert(handle.data, scalar, tl.float32).view(np.float32).reshape(handle.data.shape)


def _widen(handle: Any) -> Any:
    return interpreter.TensorHandle(_float(handle), tl.float32)


def _narrow(values: Any, scalar: Any) -> Any:
    bits = _convert(np.asarray(values, dtype=np.float32), tl.float32, scalar)
    return interpreter.TensorHandle(bits, scalar)


def _dot(_builder: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
    product = np.matmul(_float(a), _float(b), dtype=acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


@contextmanager
def ordered_products() -> Iterator[None]:
    """Products are summed input by input, as by a GPU's instruction in every tile.

    The library behind numpy chooses the order by the shape, and by the place in it.
    """
    builder = interpreter.InterpreterBuilder
    stock, builder.create_dot = builder.create_dot, _ordered_dot
    try:
        yield
    finally:
        builder.create_dot = stock


@contextmanager
def last_splits_first() -> Iterator[None]:
    """Programs run in the reverse order of a grid's second dimension."""
    builder = interpreter.InterpreterBuilder
    stock = builder.set_grid_idx

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        stock(self, x, self.grid_dim[1] - 1 - y, z)

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        builder.set_grid_idx = stock


def _ordered_dot(_builder: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
    terms = np.empty((1 + a.data.shape[1], *acc.data.shape), acc.data.dtype)
    terms[0] = acc.data
    np.multiply(_float(a).T[:, :, None], _float(b)[:, None, :], out=terms[1:])
    # Over the first axis numpy adds one matrix after the other.
    return interpreter.TensorHandle(np.add.reduce(terms, axis=0), acc.dtype.scalar)


def _dot_scaled(
    _builder: Any, a: Any, a_scale: Any, _: Any, b: Any, b_scale: Any, *rest: Any
) -> Any:
    """Of e2m1 codes, two neighbours of K in a byte; scales e8m0 [M, K / 32] and [N, K / 32]."""
    *_, acc = rest
    if a.data.dtype != np.uint8 or b.data.dtype != np.uint8:
        raise NotImplementedError("products with scales are interpreted for e2m1 alone")
    left = _e2m1(a.data) * np.exp2(a_scale.data.astype(np.float64) - 127).repeat(32, axis=1)
    right = _e2m1(b.data.T) * np.exp2(b_scale.data.astype(np.float64) - 127).repeat(32, axis=1)
    product = (left @ right.T + acc.data).astype(acc.data.dtype)
    return interpreter.TensorHandle(product, acc.dtype.scalar)


def _e2m1(packed: Any) -> Any:
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], -1)
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return np.where(codes & 8, -1.0, 1.0) * values[codes & 7]


def _fma(_builder: Any, x: Any, y: Any, z: Any) -> Any:
    scalar = z.dtype.scalar
    values = _float(x) * _float(y) + _float(z)
    if scalar in _AS_BITS:
        return _narrow(values, scalar)
    return interpreter.TensorHandle(values, scalar)


def _cast(stock: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(builder: Any, source: Any, target_type: Any) -> Any:
        target = target_type.scalar
        if source.dtype.scalar in _AS_BITS:
            source = _widen(source)
        if target in _AS_BITS:
            if source.dtype.scalar not in _TORCH:  # integers
                source = interpreter.TensorHandle(source.data.astype(np.float64), tl.float64)
            bits = _convert(source.data, source.dtype.scalar, target)
            return interpreter.TensorHandle(bits, target)
        return stock(builder, source, target_type)

    return cast_impl


def _widened(stock: Callable[..., Any]) -> Callable[..., Any]:
    """An elementwise method over operands of one type; `select`, led by a mask, only moves bits."""

    def method(builder: Any, *arguments: Any) -> Any:
        *handles, operation = arguments
        scalar = handles[0].dtype.scalar
        if scalar not in _AS_BITS:
            return stock(builder, *handles, operation)
        values = operation(*[_float(handle) for handle in handles])
        if values.dtype == np.bool_:
            return interpreter.TensorHandle(values, tl.int1)
        return _narrow(values, scalar)

    return method


def _widened_unary(stock: Callable[..., Any]) -> Callable[..., Any]:
    def method(builder: Any, handle: Any) -> Any:
        scalar = handle.dtype.scalar
        if scalar not in _AS_BITS:
            return stock(builder, handle)
        return _narrow(stock(builder, _widen(handle)).data, scalar)

    return method


def _widened_reduce(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction or scan; refuses the types whose raw bits it would combine."""

    def apply_impl(self: Any, inputs: Any) -> Any:
        for value in inputs:
            if value.dtype.scalar in _AS_BITS:
                raise TypeError(
                    f"reduction over {value.dtype}: convert to float32 first; on a GPU partial "
                    "results would be rounded in an order that differs by layout"
                )
        return stock(self, inputs)

    return apply_impl


def _with_every_type(stock: Callable[..., None]) -> Callable[..., None]:
    """The stock table of types lacks the fnuz ones; a type stands for itself."""

    def patch(language: Any, scope: Any) -> None:
        stock(language, scope)
        complete = language.dtype.to_ir

        def to_ir(self: Any, builder: Any) -> Any:
            return self if self in _AS_BITS else complete(self, builder)

        scope.set_attr(language.dtype, "to_ir", to_ir)

    return patch


def _in_place(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels work on CPU tensors themselves: no copy of a large, hardly touched pool."""

    def on_host(self: Any, arguments: Any, *rest: Any) -> Any:
        keywords = rest[-2] if len(rest) == 3 else rest[0]
        tensors = [a for a in (*arguments, *keywords.values()) if isinstance(a, torch.Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return stock(self, arguments, *rest)
        return None if len(rest) == 3 else (list(arguments), dict(keywords))

    return on_host
