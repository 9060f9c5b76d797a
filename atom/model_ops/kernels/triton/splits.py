"""Into how many parts a context or a sum is split, so that their programs fill the device; and how
the parts of a product are added by the last of its programs.

Of the programs that sum a tile's splits of the inputs, the one that arrives last adds all parts, in
the order of the splits. So it does not matter which one it is, and no program waits for another.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.target_info import current_target

from atom.environment import triton_is_interpreted
from atom.platform import current_platform, num_compute_units

# Programs of products that keep a GPU busy. Six for each unit of an H100, where more programs
# hide what each waits for; two for each of an MI300X, by calculation.
BUSY = {"cuda": 792, "rocm": 608}
# For devices that do not report it; between an H200 (132) and an MI300X (304).
_DEFAULT_COMPUTE_UNITS = 256
_IS_INTERPRETED = tl.constexpr(triton_is_interpreted())
# From this share of the device on, more splits bring little and cost partial results.
_BUSY = 0.8


@functools.cache
def compute_units() -> int:
    """The compute units of this process's device."""
    units = num_compute_units(current_platform())
    return _DEFAULT_COMPUTE_UNITS if units is None else units


def side_by_side(units: int, resident: int) -> int:
    """Programs that `units` run at once, of a kernel of which each runs `resident`.

    The compile lane compares `resident` with the registers and the shared memory of the kernel.
    """
    return units * resident


@functools.cache
def arrivals(device: torch.device) -> torch.Tensor:
    """How many programs have arrived at each of up to `max(BUSY.values())` tiles, int32.

    Every product takes zeros and leaves zeros. All products of a device share them, since they run
    one after the other. They are made when one runs for the first time, which is never within a
    graph: work runs once before its capture.
    """
    return torch.zeros(max(BUSY.values()), dtype=torch.int32, device=device)


@triton.constexpr_function
def _is_gfx9() -> bool:
    target = current_target()
    return target is not None and str(target.arch).startswith("gfx9")


@triton.jit
def _finish_stores():
    """Wait until this thread's stores are done. Before a barrier only gfx9 needs it: the others'
    barriers wait for them, its own does not, and one thread may release no other's.
    """
    if not _IS_INTERPRETED and _is_gfx9():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)", "=v,0,~{memory}", [0], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def arrives_last(arrived_ptr):
    """Whether all programs of a tile, the grid's second dimension, have stored their parts, which
    this one then sees.

    arrived_ptr: of the tile; 0 before the first program and after the last.
    """
    # One thread counts for all: after what they stored, and before what they read.
    _finish_stores()
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(1) - 1
    tl.debug_barrier()
    if is_last:
        tl.atomic_xchg(arrived_ptr, 0, sem="relaxed")
    return is_last


@triton.jit
def add_splits(part_ptrs, mask, stride):
    """The sum of a tile's parts, one after the other.

    part_ptrs: of the first split.
    stride: between splits.
    """
    total = tl.zeros(part_ptrs.shape, part_ptrs.dtype.element_ty)
    for split in range(tl.num_programs(1)):
        total += tl.load(part_ptrs + split * stride, mask=mask, other=0)
    return total


@functools.lru_cache(maxsize=4096)
def fewest_that_fill(programs: int, most: int, slots: int) -> int:
    """The fewest splits of each of `programs` that keep a device busy, from 1 to `most`.

    Programs run in rounds of `slots`. Where no number of splits fills enough of its rounds, the one
    that fills most of them. Remembered, since each layer of an eager step asks.
    """

    def busy(splits: int) -> float:
        rounds = -(-programs * splits // slots)
        return programs * splits / (rounds * slots)

    choices = range(1, max(most, 1) + 1)
    return next((splits for splits in choices if busy(splits) >= _BUSY), max(choices, key=busy))
