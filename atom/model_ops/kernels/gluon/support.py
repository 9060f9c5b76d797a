"""When the Gluon kernels can run; imports Triton only to ask."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from atom.model_ops.kernels.triton.support import unavailable
from atom.model_ops.registry import Implementation, OpQuery

if TYPE_CHECKING:
    from atom.model_ops.kernels.torch.attention import PagedAttentionOp

ARCHES = ("gfx942", "gfx950")
_HEAD_DIMS = (64, 128)
_BLOCK_SIZES = (16, 32, 64, 128)


def _load_paged_attention() -> PagedAttentionOp:
    from atom.model_ops.kernels.gluon import paged_attention

    return paged_attention.load()


def _supports_paged_attention(query: OpQuery) -> str | None:
    return _unavailable(query) or _refuses_shape(query)


PAGED_ATTENTION = Implementation("gluon", _supports_paged_attention, _load_paged_attention)


def _unavailable(query: OpQuery) -> str | None:
    platform = query.platform
    if platform.kind != "rocm" or platform.arch not in ARCHES:
        return f"written for {' and '.join(ARCHES)}, this is {platform.kind} ({platform.arch})"
    return unavailable(platform) or _no_gluon()


def _refuses_shape(query: OpQuery) -> str | None:
    shape, native = query.shape, query.platform.fp8_dtype
    if shape["num_heads"] != shape["num_kv_heads"]:
        return (
            f"for layers without grouped queries; num_heads={shape['num_heads']} is not "
            f"num_kv_heads={shape['num_kv_heads']}"
        )
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 and float16, not {query.dtype}"
    if query.storage not in (None, query.dtype, native):
        return f"reads a cache of {query.dtype} or {native}, not {query.storage}"
    if shape["head_dim"] not in _HEAD_DIMS:
        return f"head_dim={shape['head_dim']} is none of {_HEAD_DIMS}"
    if shape["block_size"] not in _BLOCK_SIZES:
        return f"block_size={shape['block_size']} is none of {_BLOCK_SIZES}"
    return None


@functools.cache
def _no_gluon() -> str | None:
    try:
        from triton.experimental.gluon.language import amd  # noqa: F401
    except Exception as error:
        return f"this triton has no Gluon for AMD: {error}"
    return None
