"""The processors that this process may use.

It imports no torch: programs that begin to work while they import that know how many there are.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# Where version 1 of cgroups has processors.
_VERSION_1 = ("cpu", "cpu,cpuacct")


def default_num_threads() -> int:
    """Processors that this process may use."""
    return int(max(min(len(_own_cpus()), _cgroup_num_cpus()), 1))


def cpus_by_core() -> list[int]:
    """Processors that this process may use, those of a core and of a socket side by side.

    Empty where a container's quota, or the operating system, gives no processor to it alone.
    """
    own = _own_cpus()
    if not hasattr(os, "sched_setaffinity") or _cgroup_num_cpus() < len(own):
        return []
    return sorted(own, key=lambda cpu: (*_core_of(cpu), cpu))


def _core_of(cpu: int) -> tuple[int, int]:
    """Socket and core; the processor's own number where the kernel tells neither."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        socket = int((topology / "physical_package_id").read_text())
        return socket, int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu


def _own_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cgroup_num_cpus() -> float:
    """Processors that a container's quota amounts to, rounded up; the least of several."""
    found = [_read(_CGROUP / "cpu.max")]
    for name in _VERSION_1:
        folder = _CGROUP / name
        found.append(_read(folder / "cpu.cfs_quota_us") + _read(folder / "cpu.cfs_period_us"))
    return min(map(_num_cpus, found))


def _num_cpus(words: list[str]) -> float:
    """Args:
    words: quota and period; the quota is `max` or -1 where there is none.
    """
    try:
        quota, period = map(int, words)
        return math.ceil(quota / period) if quota > 0 else math.inf
    except (ValueError, ZeroDivisionError):
        return math.inf


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (OSError, ValueError):
        return []
