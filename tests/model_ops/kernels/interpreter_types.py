"""Types of values in the Triton interpreter, made once for each shape instead of for each value.

An interpreted program makes a value for every operation, and the stock types derive everything
about its shape again, which takes a third of a kernel's time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def install() -> None:
    interpreter._get_np_dtype = _known_dtypes(interpreter._get_np_dtype)
    core.block_type.__init__ = _init_block_type(core.block_type.__init__)
    core.tensor.__init__ = _init_tensor


def _known_dtypes(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def find(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = stock(scalar)
        return known[scalar.name]

    return find


def _init_block_type(stock: Callable[..., None]) -> Callable[..., None]:
    """A shape is checked, multiplied and written out once."""
    known: dict[tuple[Any, ...], tuple[Any, int, str]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(s.value if isinstance(s, tl.constexpr) else s for s in shape)
        if sizes not in known:
            stock(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = known[sizes]
        self.name = f"<{text}, {element_ty}>"

    return __init__


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    sizes = tuple(type.shape) if type.is_block() else ()
    self.shape, self.numel = _shape(sizes)


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """As a tensor has them."""
    numel = 1
    for size in sizes:
        numel *= size
    return core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(numel)
