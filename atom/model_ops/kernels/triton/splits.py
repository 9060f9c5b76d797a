"""Into how many parts a context or a sum is split, so that their programs fill the device."""

from __future__ import annotations

import functools

from atom.platform import current_platform, num_compute_units

# Programs of products that keep a GPU busy: two for each unit of an H100 and of an MI300X.
BUSY = {"cuda": 264, "rocm": 608}
# For devices that do not report it; between an H200 (132) and an MI300X (304).
_DEFAULT_COMPUTE_UNITS = 256
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
