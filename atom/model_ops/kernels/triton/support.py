"""Limits common to all Triton and Gluon kernels; does not import the kernels."""

from __future__ import annotations

import functools

import torch

from atom.environment import op_override, triton_is_interpreted
from atom.model_ops.registry import OpQuery
from atom.platform import Platform

MINIMUM = (3, 6)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GLUON_ARCHES = ("gfx942", "gfx950")


def refuses(query: OpQuery) -> str | None:
    """Why no Triton kernel can run; None if those that support the shape can."""
    if query.dtype not in _DTYPES:
        return f"no kernel for {query.dtype}"
    return _unavailable(query.platform)


def refuses_gluon(query: OpQuery) -> str | None:
    """Why no Gluon kernel can run; None if those that support the shape can."""
    platform = query.platform
    if platform.kind != "rocm" or platform.arch not in _GLUON_ARCHES:
        arches = " and ".join(_GLUON_ARCHES)
        return f"written for {arches}, this is {platform.kind} ({platform.arch})"
    return _unavailable(platform) or _no_gluon()


def refuses_storage(query: OpQuery) -> str | None:
    """Why a cache of this dtype is not supported; None if it is."""
    storage, platform = query.storage, query.platform
    if storage is None or storage in _DTYPES:
        return None
    if storage not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        return f"no kernel for a cache of {storage}"
    known = storage in _eight_bit_types(platform)
    return None if known else f"{platform.arch} does not convert {storage}"


def refuses_parts(*ops: str) -> str | None:
    """Why one kernel cannot stand for these ops: the user demands another of one; else None."""
    for op in ops:
        if (wanted := op_override(op)) not in (None, "triton"):
            return f"does the work of {op}, and ATOM_OP_{op.upper()}={wanted}"
    return None


def _eight_bit_types(platform: Platform) -> tuple[torch.dtype, ...]:
    """FP8 types that Triton converts: in software on AMD if necessary, only in hardware on
    NVIDIA.
    """
    if platform.kind != "cuda":
        return torch.float8_e4m3fn, torch.float8_e4m3fnuz
    capability = int(platform.arch.removeprefix("sm"))
    return (torch.float8_e4m3fn,) if capability >= 89 else ()


def _unavailable(platform: Platform) -> str | None:
    """Why Triton kernels cannot run on `platform`; None if they can."""
    if platform.kind == "cpu" and not triton_is_interpreted():
        return "needs a GPU (or TRITON_INTERPRET=1, for tests)"
    return _unusable_installation()


@functools.cache
def _unusable_installation() -> str | None:
    try:
        import triton  # the distribution has several names, so check the module
    except ModuleNotFoundError:
        return "triton is not installed"
    except Exception as error:
        return f"triton cannot be imported: {error}"
    installed = triton.__version__
    if tuple(int(part) for part in installed.split(".")[:2]) < MINIMUM:
        return f"triton {installed} is older than {MINIMUM[0]}.{MINIMUM[1]}"
    return None


@functools.cache
def _no_gluon() -> str | None:
    try:
        from triton.experimental.gluon.language import amd  # noqa: F401
    except Exception as error:
        return f"this triton has no Gluon for AMD: {error}"
    return None
