"""Timing on a device: captured calls, the copy bandwidth they are compared with, and a clock."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _trace import kernel_table, record

from atom.environment import cache_dir
from atom.graphs.capture import CudaGraphBackend
from atom.platform import Platform, free_memory_bytes, select_platform

Call = Callable[[], object]

# No cache of a GPU holds so much, so that rotating over it reads from memory: 60 MB on an H200,
# 256 MiB on an MI300X.
ROTATED_BYTES = 1 << 30
MOST_CALLS = 128
_COPIED_BYTES = 4 << 30
_COPIED_BYTES_ON_CPU = 64 << 20
NO_GPU = 2  # the exit status of a program that found nothing to run on


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto is the GPU, and without one the program ends with exit status "
        f"{NO_GPU}; cpu rehearses tiny shapes (default: %(default)s)",
    )


def chosen_platform(device: str, program: str) -> Platform | None:
    """The platform to run on; None, and a line that says so, where there is none."""
    if device != "cpu" and not torch.cuda.is_available():
        print(
            f"{program}: torch {torch.__version__} sees no CUDA or ROCm device: nothing was "
            f"measured. --device cpu --tiny rehearses the program.",
            file=sys.stderr,
        )
        return None
    return select_platform(device)


class Clock:
    """How much of the allowed time is left.

    Args:
        seconds: None allows any time.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.perf_counter() + seconds

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether so many seconds are left."""
        return self._end is None or time.perf_counter() + seconds < self._end


@dataclass(frozen=True)
class Timing:
    """Attributes:
    seconds: of one call, the median over repetitions.
    how: `graph`, or how else the calls were made.
    kernels: those of one call, from a trace; None without one.
    """

    seconds: float
    how: str
    kernels: list[dict[str, Any]] | None = None


def time_calls(
    calls: Sequence[Call], device: torch.device, repeats: int = 9, trace: bool = False
) -> Timing:
    """The time of one of `calls`, which run one after another.

    On a GPU all are captured in one graph, as the engine runs them, and the device's own clock
    counts: what the host needs to launch them is not in it.
    """
    if device.type == "cpu":
        seconds, how, replay = _median_on_cpu(calls, repeats), "called", _in_turn(calls)
    else:
        replay, how = _captured(calls)
        for _ in range(2):
            replay()
        whole = statistics.median(_device_seconds(replay) for _ in range(repeats))
        seconds = whole / len(calls)
    return Timing(seconds, how, _kernels_of(replay, len(calls), device) if trace else None)


def _kernels_of(
    work: Callable[[], None], calls: int, device: torch.device
) -> list[dict[str, Any]] | None:
    """None where the profiler fails: the time stands."""
    try:
        return kernel_table(record(work, device).work, calls)
    except RuntimeError as error:
        print(f"no trace: {error}", file=sys.stderr, flush=True)
        return None


def _in_turn(calls: Sequence[Call]) -> Callable[[], None]:
    def work() -> None:
        for call in calls:
            call()

    return work


def _captured(calls: Sequence[Call]) -> tuple[Callable[[], None], str]:
    work = _in_turn(calls)
    try:
        return CudaGraphBackend().capture(work), "graph"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize()
        return work, f"launched, not capturable: {str(error).splitlines()[0][:80]}"


def _device_seconds(work: Callable[[], None]) -> float:
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _median_on_cpu(calls: Sequence[Call], repeats: int) -> float:
    for call in calls:
        call()
    times = []
    for _ in range(repeats):
        for call in calls:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def copy_bandwidth(platform: Platform) -> float:
    """Bytes per second of a copy within the device, those read and those written together."""
    size = _COPIED_BYTES_ON_CPU
    if platform.is_gpu:
        size = min(_COPIED_BYTES, free_memory_bytes(platform) // 4)
    seconds = _seconds_of_a_copy(size, platform.device)
    free_device_memory(platform)  # engines and pools take what the driver calls free
    return 2 * size / seconds


def product_speed(platform: Platform) -> float:
    """Operations per second of a large product in bfloat16, as a library computes it; on a CPU of
    a small one in float32.
    """
    size, dtype = (8192, torch.bfloat16) if platform.is_gpu else (512, torch.float32)
    a, b = torch.randn(2, size, size, device=platform.device).to(dtype)
    out = torch.empty_like(a)
    seconds = time_calls([lambda: torch.mm(a, b, out=out)], platform.device).seconds
    return 2 * size**3 / seconds


def _seconds_of_a_copy(size: int, device: torch.device) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return time_calls([lambda: target.copy_(source)], device).seconds


def num_calls(call_bytes: int, available_bytes: int, least_bytes: int = ROTATED_BYTES) -> int:
    """How many calls to rotate over, each with data of its own, so that caches do not help."""
    wanted = -(-least_bytes // call_bytes)
    return max(1, min(wanted, available_bytes // call_bytes, MOST_CALLS))


def free_device_memory(platform: Platform) -> None:
    if platform.is_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def num_cached_kernels() -> int:
    """Kernels that Triton has compiled into its cache, by whatever process."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or cache_dir() / "triton")
    return sum(1 for _ in folder.glob("*/__grp__*.json")) if folder.is_dir() else 0
