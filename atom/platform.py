"""Hardware detection: which platform there is, its architecture and memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atom.config import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Platform:
    """Attributes:
    kind: `cpu`, `cuda` or `rocm`.
    arch: `gfx942`, `gfx950`, `sm90`, ...; on a CPU torch's capability, such as `avx512`.
    has_native_bf16: whether bfloat16 matrix products run in hardware.
    """

    kind: str
    arch: str
    has_native_bf16: bool

    @property
    def device(self) -> torch.device:
        # ROCm builds of torch call their devices "cuda" as well.
        return torch.device("cpu" if self.kind == "cpu" else "cuda")

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The FP8 type of the matrix units: e4m3fnuz on gfx942, else e4m3fn (OCP)."""
        return torch.float8_e4m3fnuz if self.arch == "gfx942" else torch.float8_e4m3fn


@dataclass(frozen=True)
class PretendedGpu:
    """A GPU that is not there, for a rehearsal."""

    platform: Platform
    num_compute_units: int


_pretended: PretendedGpu | None = None


def pretend(gpu: PretendedGpu) -> None:
    """Let this process choose and size kernels for a GPU that it does not have.

    For the whole process, and before kernels are imported: some ask for the platform then.
    """
    global _pretended
    _pretended = gpu
    current_platform.cache_clear()


@functools.cache
def current_platform() -> Platform:
    """The platform of this process."""
    if _pretended is not None:
        return _pretended.platform
    if not torch.cuda.is_available():
        return cpu_platform()
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip is not None:
        return Platform("rocm", properties.gcnArchName.split(":")[0], True)
    return Platform("cuda", f"sm{properties.major}{properties.minor}", properties.major >= 8)


def select_platform(device: str) -> Platform:
    """The platform for `--device`.

    Raises:
        ConfigError: when there is no such device.
    """
    if device == "cpu":
        return cpu_platform()
    platform = current_platform()
    if device == "cuda" and not platform.is_gpu:
        raise ConfigError(
            f"device is cuda, and torch {torch.__version__} sees no CUDA or ROCm device; use cpu, "
            f"or install a torch for the GPU (PYTHON=... of the scripts takes one that is there)"
        )
    return platform


def cpu_platform() -> Platform:
    return Platform("cpu", torch.backends.cpu.get_cpu_capability().lower(), _cpu_has_native_bf16())


def _cpu_has_native_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def num_compute_units(platform: Platform, index: int = 0) -> int | None:
    """Streaming multiprocessors (CUDA) or compute units (ROCm) of a GPU; None without one."""
    if _pretended is not None:
        return _pretended.num_compute_units
    if not (platform.is_gpu and torch.cuda.is_available()):
        return None
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_gpus() -> int:
    """GPUs that this process may use; they stay untouched."""
    return int(torch.cuda.device_count())


def pci_address(index: int) -> str | None:
    """Of a GPU, such as `0000:c5:00.0`; None where torch sees none."""
    if not torch.cuda.is_available():
        return None
    of: Any = torch.cuda.get_device_properties(index)  # torch's types lack these three
    return f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"


def free_memory_bytes(platform: Platform) -> int:
    """Memory in bytes that can be allocated now."""
    if platform.is_gpu:
        return int(torch.cuda.mem_get_info()[0])
    import psutil

    available = int(psutil.virtual_memory().available)
    return min(available, _cgroup_headroom_bytes(available))


def total_memory_bytes(platform: Platform) -> int:
    if platform.is_gpu:
        return int(torch.cuda.mem_get_info()[1])
    import psutil

    return int(psutil.virtual_memory().total)


def _cgroup_headroom_bytes(default: int) -> int:
    """What the container's memory limit leaves; `default` without a limit.

    Files that were read count as used there until the kernel needs their pages, so they are free;
    but not those that are mapped, such as weights, which would be read again for every step.
    """
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return default
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return default
    cached = int(stat["active_file"]) + int(stat["inactive_file"]) - int(stat["file_mapped"])
    return max(int(limit) - used + max(cached, 0), 0)


_OUT_OF_MEMORY = ("DefaultCPUAllocator", "not enough memory")


def is_device_lost() -> bool:
    """Whether the GPU is unusable for the rest of this process.

    After a fault (illegal address, failed assertion) every call raises. A refused launch or a lack
    of memory does not affect the device, whatever the error was called.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def release_cached_memory() -> None:
    """Return torch's cached memory to the device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device or the host ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _OUT_OF_MEMORY)
