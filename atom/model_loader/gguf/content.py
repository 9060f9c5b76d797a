"""Tells files apart by their content, whatever they are called and wherever they lie.

All of it is read, by several threads of one process, once for each file: the cache remembers the
key of a place, size and time. It imports no torch: a program that knows its model reads a file that
was never converted while it imports that.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from atom.model_loader.errors import WeightError
from atom.model_loader.gguf import locks

logger = logging.getLogger(__name__)

# A thread hashes one at a time; part of what keys are.
_PIECE_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_MOST_THREADS = 8
_KEY = re.compile(r"[0-9a-f]{32}")


class _Hashing:
    """Files whose content is being hashed, from now on, by threads of its own."""

    def __init__(self, paths: Sequence[Path], num_threads: int) -> None:
        sizes = [path.stat().st_size for path in paths]
        self._pool = ThreadPoolExecutor(min(num_threads, _MOST_THREADS))
        self._files = [
            (size, [self._pool.submit(_digest, path, at) for at in range(0, size, _PIECE_BYTES)])
            for path, size in zip(paths, sizes, strict=True)
        ]

    def key(self) -> str:
        """Raises OSError when a file cannot be read."""
        content = hashlib.sha256()
        try:
            for size, digests in self._files:
                content.update(size.to_bytes(8, "little"))
                content.update(b"".join(each.result() for each in digests))
        finally:
            self.cancel()  # after Ctrl-C nobody waits for the rest
        return content.hexdigest()[:32]

    def cancel(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _digest(path: Path, start: int) -> bytes:
    content, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = _PIECE_BYTES
        # A file system may give less than is asked for; only the file's end gives nothing.
        while left and (count := file.readinto(buffer[:left])):
            content.update(buffer[:count])
            left -= count
    return content.digest()


# Files that are hashed before somebody asks for them, by their identity, and this process's turn.
_ahead: dict[str, tuple[_Hashing, ExitStack]] = {}


def hash_ahead(paths: Sequence[Path], cache: Path, num_threads: int) -> None:
    """Begin to hash files whose key somebody is likely to ask for, unless another process does."""
    with contextlib.suppress(OSError):  # whoever asks is told
        identity = files_identity(paths)
        if identity not in _ahead and _noted(identity, cache) is None:
            with _turn(identity, cache, waits=False) as turn:
                _ahead[identity] = _Hashing(paths, num_threads), turn.pop_all()


def forget_hashed_ahead() -> None:
    """Stop to hash files that nobody asked for."""
    while _ahead:
        hashing, turn = _ahead.popitem()[1]
        hashing.cancel()
        turn.close()


def content_key(paths: Sequence[Path], identity: str, cache: Path, num_threads: int) -> str:
    """A name for the content of files that have this identity; one process finds it.

    Raises:
        OSError: when one cannot be read.
        WeightError: when one was changed meanwhile.
    """
    if (noted := _noted(identity, cache)) is not None:
        return noted
    begun = _ahead.pop(identity, None)
    with begun[1] if begun else _turn(identity, cache, waits=True):
        if begun is None and (noted := _noted(identity, cache)) is not None:
            return noted
        try:
            key = (begun[0] if begun else _Hashing(paths, num_threads)).key()
        finally:  # a file that was changed meanwhile may have failed in any way
            check_unchanged(paths, identity)
        write_note(_note(identity, cache), key)
    return key


def _turn(identity: str, cache: Path, waits: bool) -> ExitStack:
    """Lets other processes wait until it is closed; nothing where there are no locks.

    Raises:
        BlockingIOError: when it is another's turn, and this process does not wait.
    """
    turn, path = ExitStack(), cache / f".{identity}.hashing"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if waits:
            descriptor = locks.lock_alone(path, "reading the same files to tell them from others")
        else:
            descriptor = locks.lock(path, locks.ALONE | locks.AT_ONCE)
    except BlockingIOError:
        raise
    except OSError as error:
        logger.info("no lock in %s: %s", cache, error)
    else:
        turn.callback(locks.remove, path, descriptor)
    return turn


def files_identity(paths: Sequence[Path]) -> str:
    """A name for the files' places, sizes and times."""
    identity = ""
    for path in paths:
        status = path.stat()
        identity += f"{path.resolve()} {status.st_ino} {status.st_size} {status.st_mtime_ns} "
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def check_unchanged(paths: Sequence[Path], identity: str) -> None:
    """Raises WeightError unless the files are those that had this identity."""
    with contextlib.suppress(OSError):  # it was moved or removed
        if files_identity(paths) == identity:
            return
    raise WeightError(f"{paths[0]} was changed while it was read; start again once it is complete")


def write_note(path: Path, text: str) -> None:
    """Write a small file, as a whole; a cache that is only read has none, and each start finds out
    again what it would say.
    """
    temporary = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        logger.info("nothing is noted in %s: %s", path.parent, error)
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_note(path: Path) -> str:
    """What was noted; nothing where that is not there or not for this user to read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _noted(identity: str, cache: Path) -> str | None:
    """The key, unless there is no note or a machine that lost power left it empty."""
    key = read_note(_note(identity, cache))
    return key if _KEY.fullmatch(key) else None


def _note(identity: str, cache: Path) -> Path:
    return cache / f".{identity}.key"
