"""What every Triton entry of the op table needs: can Triton run here at all?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from atom.config import triton_is_interpreted
from atom.model_ops.registry import Implementation, OpQuery
from atom.platform import Platform

MINIMUM = (3, 6)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def implementation(
    load: Callable[[], Any], refuses: Callable[[OpQuery], str | None] = lambda _: None
) -> Implementation:
    """A `triton` entry of the op table; `refuses` judges shape and storage."""

    def supports(query: OpQuery) -> str | None:
        if query.dtype not in _DTYPES:
            return f"no kernel for {query.dtype}"
        return unavailable(query.platform) or refuses(query)

    return Implementation("triton", supports, load)


def unavailable(platform: Platform) -> str | None:
    """Why Triton kernels cannot run on `platform`; None when they can."""
    if platform.kind == "cpu" and not triton_is_interpreted():
        return "needs a GPU (or TRITON_INTERPRET=1, for tests)"
    return _unusable_installation()


@functools.cache
def _unusable_installation() -> str | None:
    try:
        import triton  # its distribution goes by several names: only the module tells
    except ModuleNotFoundError:
        return "triton is not installed"
    except Exception as error:
        return f"triton cannot be imported: {error}"
    installed = triton.__version__
    if tuple(int(part) for part in installed.split(".")[:2]) < MINIMUM:
        return f"triton {installed} is older than {MINIMUM[0]}.{MINIMUM[1]}"
    return None
