"""Keeps a process to the processors beside its GPU: those of the GPU's NUMA node."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")

# What this process could use before it was bound first; None if it was not.
_before: set[int] | None = None


def bind_to_gpu(index: int, address: str | None, root: Path = Path("/")) -> None:
    """Bind this process's threads, and so those that they will start, to a GPU's NUMA node.

    A thread gets no processor that it could not use before. Nothing is bound where the GPU's node
    is unknown, or has no processor that this process may use; the log says what was done.

    Args:
        index: torch's, of the GPU.
        address: its PCI address, as `pci_address` has it; None where that is unknown.
        root: of the file system with `sys` and `proc`.
    """
    if sys.platform != "linux" or address is None:
        return
    if index == 0:
        _warn_of_balancing(root)
    node = _node_of(address, root)
    if node is None:
        return
    beside, allowed = _processors_of(node, root), os.sched_getaffinity(0)
    if not beside & allowed:
        logger.info(
            "GPU %d (%s) is on NUMA node %d, none of whose processors this process may use: its "
            "processors stay as they are",
            index, address, node,
        )  # fmt: skip
        return
    global _before
    _before = _before or allowed
    _bind_threads(beside)
    logger.info(
        "GPU %d (%s): bound to NUMA node %d, %d of the %d processors that it could use",
        index, address, node, len(beside & allowed), len(allowed),
    )  # fmt: skip


@contextmanager
def unbound() -> Iterator[None]:
    """Processes that are started in here may use what this one could before it was bound.

    Their GPUs may be on other nodes, and a process never gets processors that it had not.
    """
    if _before is None:
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def _node_of(address: str, root: Path) -> int | None:
    """None where the kernel does not tell it, for which it has -1."""
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _processors_of(node: int, root: Path) -> set[int]:
    """Such as {0, 1, 8} of `0-1,8`; a node of memory alone has none."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
        ranges = [part.partition("-") for part in text.split(",") if part]
        return {
            processor
            for first, _, last in ranges
            for processor in range(int(first), int(last or first) + 1)
        }
    except (OSError, ValueError):
        return set()


def _bind_threads(processors: set[int]) -> None:
    """Every thread has processors of its own; one that may use none of these keeps its own, and
    so does one whose processors the system does not let this process choose.
    """
    for thread in [int(path.name) for path in _THREADS.iterdir()]:
        try:
            if both := os.sched_getaffinity(thread) & processors:
                os.sched_setaffinity(thread, both)
        except OSError:
            continue  # it has ended, or may not be bound: placement is no reason not to start


def _warn_of_balancing(root: Path) -> None:
    try:
        mode = int((root / "proc/sys/kernel/numa_balancing").read_text())
    except (OSError, ValueError):
        return
    if mode & 1:
        logger.warning(
            "kernel.numa_balancing is %d: the kernel unmaps pages to see who uses them, and moves "
            "them, which GPUs wait for; sysctl kernel.numa_balancing=0 turns it off",
            mode,
        )
