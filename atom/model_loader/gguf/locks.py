"""Locks on files that may be removed by who holds them alone."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED, ALONE = fcntl.LOCK_SH, fcntl.LOCK_EX
AT_ONCE = fcntl.LOCK_NB


def lock(path: Path, how: int) -> int:
    """Make a file, unless it is there, and lock it -> its descriptor; closing it lets go.

    Args:
        how: `SHARED` or `ALONE`, with `AT_ONCE` or waiting for others.

    Raises:
        BlockingIOError: when others hold it and nobody waits.
        OSError: when there are no locks, or no such file for this user.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, how)
            if is_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # who held it has removed it


def lock_alone(path: Path, others: str) -> int:
    """`lock` it alone, waiting for others; they are doing what the log then says."""
    try:
        return lock(path, ALONE | AT_ONCE)
    except BlockingIOError:
        logger.warning("another process is %s; waiting for it", others)
        return lock(path, ALONE)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one that others find at a path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove(path: Path, descriptor: int) -> None:
    """Let go of a file that is locked alone, and leave none."""
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
