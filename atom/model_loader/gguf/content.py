"""Tells files apart by their content, whatever they are called and wherever they lie.

All of it is read, by several threads, once for each file: the cache remembers the key of a place,
size and time. It imports no torch: a program that knows its model reads a file that was never
converted while it imports that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atom.model_loader.errors import WeightError

# A thread hashes one at a time; part of what keys are.
_PIECE_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_MOST_THREADS = 8


class _Hashing:
    """Files whose content is being hashed, from now on, by threads of its own."""

    def __init__(self, paths: Sequence[Path], num_threads: int) -> None:
        pieces = [
            (path, start) for path in paths for start in range(0, path.stat().st_size, _PIECE_BYTES)
        ]
        self._pool = ThreadPoolExecutor(min(num_threads, _MOST_THREADS))
        self._digests = [self._pool.submit(_digest, *piece) for piece in pieces]

    def key(self) -> str:
        """Raises OSError when a file cannot be read."""
        try:
            digests = b"".join(each.result() for each in self._digests)
        finally:
            self.cancel()  # after Ctrl-C nobody waits for the rest
        return hashlib.sha256(digests).hexdigest()[:16]

    def cancel(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _digest(path: Path, start: int) -> bytes:
    content, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        for _ in range(_PIECE_BYTES // _READ_BYTES):
            content.update(buffer[: file.readinto(buffer)])
    return content.digest()


# Files that are hashed before somebody asks for them, by their identity.
_ahead: dict[str, _Hashing] = {}


def hash_ahead(paths: Sequence[Path], cache: Path, num_threads: int) -> None:
    """Begin to hash files whose key somebody is likely to ask for."""
    with contextlib.suppress(OSError):  # whoever asks is told
        identity = files_identity(paths)
        if identity not in _ahead and not _note(identity, cache).is_file():
            _ahead[identity] = _Hashing(paths, num_threads)


def forget_hashed_ahead() -> None:
    """Stop to hash files that nobody asked for."""
    while _ahead:
        _ahead.popitem()[1].cancel()


def content_key(paths: Sequence[Path], cache: Path, num_threads: int) -> str:
    """A name for the files' content.

    Raises:
        OSError: when one cannot be read, or the cache not be written.
        WeightError: when one was changed meanwhile.
    """
    identity = files_identity(paths)
    note = _note(identity, cache)
    if note.is_file():
        return note.read_text()
    key = (_ahead.pop(identity, None) or _Hashing(paths, num_threads)).key()
    check_unchanged(paths, identity)
    write_note(note, key)
    return key


def files_identity(paths: Sequence[Path], more: str = "") -> str:
    """A name for the files' places, sizes and times, and what else is given."""
    identity = ""
    for path in paths:
        status = path.stat()
        identity += f"{path.resolve()} {status.st_ino} {status.st_size} {status.st_mtime_ns} "
    identity += more
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def check_unchanged(paths: Sequence[Path], identity: str) -> None:
    """Raises WeightError unless the files are those that had this identity."""
    if files_identity(paths) != identity:
        raise WeightError(
            f"{paths[0]} was changed while it was read; start again once it is complete"
        )


def write_note(path: Path, text: str) -> None:
    """Write a small file, as a whole."""
    temporary = path.with_suffix(f".{uuid.uuid4().hex}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _note(identity: str, cache: Path) -> Path:
    return cache / f".{identity}.key"
