"""GPUs that a plan may be made for."""

from __future__ import annotations

from dataclasses import dataclass

from atom.config import ConfigError


@dataclass(frozen=True)
class Gpu:
    """Attributes:
    name: as on the command line.
    arch: as in `Platform`.
    memory: bytes.
    bandwidth: of its memory, bytes/s, as the vendor states it.
    compute_units: or streaming multiprocessors.
    """

    name: str
    kind: str
    arch: str
    memory: int
    bandwidth: float
    compute_units: int


_GB = 10**9
_GPUS = (
    Gpu("mi300x", "rocm", "gfx942", 192 * _GB, 5.3e12, 304),
    Gpu("mi325x", "rocm", "gfx942", 256 * _GB, 6.0e12, 304),
    Gpu("mi350x", "rocm", "gfx950", 288 * _GB, 8.0e12, 256),
    Gpu("mi355x", "rocm", "gfx950", 288 * _GB, 8.0e12, 256),
    Gpu("h100", "cuda", "sm90", 80 * _GB, 3.35e12, 132),
    Gpu("h200", "cuda", "sm90", 141 * _GB, 4.8e12, 132),
    Gpu("b200", "cuda", "sm100", 180 * _GB, 8.0e12, 148),
)
NAMES = tuple(gpu.name for gpu in _GPUS)


def find_gpu(name: str) -> Gpu:
    """Raises:
    ConfigError: for a name that is not in the table.
    """
    for gpu in _GPUS:
        if gpu.name == name.lower():
            return gpu
    raise ConfigError(f"unknown GPU {name!r}; known are {', '.join(NAMES)}")
