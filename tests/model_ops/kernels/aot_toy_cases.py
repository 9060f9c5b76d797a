"""Cases that go wrong in every way that the compile lane has to notice, and two that do not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from aot_case import Case

from atom.model_ops.registry import Implementation, OpQuery
from atom.platform import current_platform


@triton.jit
def _add_kernel(a, b, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(a + at, mask=at < size) + tl.load(b + at, mask=at < size)
    tl.store(out + at, total, mask=at < size)


@triton.jit
def _product_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rm, rn, rk = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + rm[:, None] * K + rk[None, :])
    right = tl.load(b + rk[:, None] * N + rn[None, :])
    tl.store(out + rm[:, None] * N + rn[None, :], tl.dot(left, right))


@triton.jit
def _normalise_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at).to(tl.float32)
    tl.store(out + at, values / tl.sum(values, 0))


@triton.jit
def _count_kernel(x, out, turns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    chosen = tl.load(x + at) > 0.0
    count = tl.zeros([BLOCK], tl.float32)
    for turn in range(turns):
        count = tl.where(chosen, count * 0.5 + turn, count)
    tl.store(out + at, count)


def _add(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _add_kernel[(triton.cdiv(x.numel(), 1024),)](x, x, out, x.numel(), BLOCK=1024)
    return out


def _product(x: torch.Tensor, rows: int = 64) -> None:
    _product_kernel[(1,)](x, x, x.float(), M=rows, N=64, K=64)


def _spill(x: torch.Tensor) -> None:
    # More values a lane than the registers that are left to it, 32 or, for eight waves, 64.
    few = {"maxnreg": 32} if current_platform().kind == "cuda" else {"waves_per_eu": 8}
    _normalise_kernel[(1,)](x, x, BLOCK=8192, num_warps=1, **few)


def _spill_scalars(x: torch.Tensor) -> None:
    # 128 masks of two scalar registers each, of which there are 102.
    _count_kernel[(1,)](x, x, x.numel(), BLOCK=8192, num_warps=1)


def _empty_grid(x: torch.Tensor) -> None:
    _add_kernel[(0,)](x, x, x, x.numel(), BLOCK=1024)


def _die(_: torch.Tensor) -> None:
    os.abort()


@dataclass(frozen=True)
class Toy(Case):
    """A case of a function that is in no table."""

    function: Callable[[torch.Tensor], object] = _add
    for_nvidia: bool = False

    def entry(self) -> Implementation:
        def supports(query: OpQuery) -> str | None:
            refused = query.platform.kind == "cuda" and not self.for_nvidia
            return "toys are not for NVIDIA" if refused else None

        return Implementation("triton", supports, lambda: self.function)


def _toy(name: str, function: Callable[[torch.Tensor], object], **more: object) -> Toy:
    given: dict[str, object] = {"refused": {"sm90": "not for NVIDIA"}, **more}
    return Toy(
        name, "toy", lambda _: (torch.empty(512 * 64, dtype=torch.bfloat16),), {},
        function=function, **given,
    )  # fmt: skip


_WARP_GROUPS: Mapping[str, object] = {
    "for_nvidia": True,
    "refused": {},
    "warp_groups": ("_product_kernel",),
}
CASES = (
    _toy("add", _add),
    _toy("dies", _die),
    _toy("product", _product, matrix=("_product_kernel",)),
    _toy("product of warp groups", _product, **_WARP_GROUPS),
    _toy("product of small tiles", partial(_product, rows=16), **_WARP_GROUPS),
    _toy("not launched", _product, matrix=("_other_kernel",)),
    _toy("no matrix", _add, matrix=("_add_kernel",)),
    _toy("reads", lambda x: x.sum().item()),
    _toy("launches nothing", lambda x: x + 1),
    _toy("empty grid", _empty_grid),
    _toy("spills", _spill, for_nvidia=True, refused={}),
    _toy("scalar spills", _spill_scalars),
    _toy("not refused", _add, refused={"gfx942": "never"}),
)
