"""Memory that kernels read as a stream, in huge pages where the system has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from atom.model_ops.kernels.native.bindings import Kernels

_PAGE_BYTES = 2 << 20
_advise = Kernels("use_huge_pages", "1P2q")


def empty_stream(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape, not filled. A large one begins at a huge page, and Linux is asked for
    them: they spare most look-ups of addresses, and processors fetch ahead only within a page.

    What does not fill a huge page, at the end, has ordinary ones, so memory in use stays the same.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _PAGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = torch.empty(num_bytes + _PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE_BYTES
    part = memory[start : start + num_bytes]
    _advise(None, part.data_ptr(), num_bytes, _PAGE_BYTES)
    return part.view(dtype).view(tuple(shape))
