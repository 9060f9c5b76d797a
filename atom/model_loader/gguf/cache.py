"""The folders that GGUF files were converted to, and not more than they may take.

Every process that uses a folder shares a lock on the file `.NAME.use` beside it until it ends, and
whoever removes a folder needs that lock alone. Where a file system has no locks, nothing is
removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from pathlib import Path

from atom.config import ModelOptions
from atom.model_loader.gguf import locks
from atom.model_loader.gguf.content import files_identity, read_note, write_note
from atom.model_loader.gguf.split import split_paths
from atom.model_loader.gguf.stored import bring_to_disk, is_stored

logger = logging.getLogger(__name__)

# Part of each folder's name; increase it when the conversion changes.
CONVERTER_VERSION = 7
# Of files of packed weights, beside the converted ones.
PACKED_SUFFIX = ".packed"
# Locks on the folders that this process uses; the kernel lets go of them when it ends.
_in_use: dict[Path, int] = {}


def wishes_of(options: ModelOptions) -> str:
    """All that the folder of a file depends on besides the file."""
    return f"{options.dtype} {options.quantization == 'auto'} {options.tokenizer is None}"


def remember(identity: str, wishes: str, cache: Path, folder: Path, dtype: str) -> None:
    """Note which folder a file was converted to, and its automatic dtype.

    Args:
        identity: of the file that was read, whatever lies in its place by now.
    """
    write_note(_note(identity, wishes, cache), f"{folder.name} {dtype}")


def recall(path: Path, wishes: str, cache: Path) -> tuple[Path, str] | None:
    """What was noted of a file that has not changed since, while the folder is there.

    Args:
        wishes: as `wishes_of` has them.
    """
    paths = [part for part in split_paths(path) if part.is_file()]
    words = read_note(_note(files_identity(paths), wishes, cache)).split()
    if len(words) != 2:  # a machine that lost power may leave it empty
        return None
    name, dtype = words
    folder = cache / name
    use(folder)
    if not is_stored(folder):
        return None
    bring_to_disk(folder)
    return folder, dtype


def _note(identity: str, wishes: str, cache: Path) -> Path:
    of = f"{identity} v{CONVERTER_VERSION} {wishes}"
    return cache / f".{hashlib.sha256(of.encode()).hexdigest()[:32]}.folder"


def use(folder: Path) -> None:
    """Keep the folder, which may not be there yet, until this process ends; it is the newest."""
    if folder not in _in_use and (descriptor := _share_lock(folder)) is not None:
        _in_use[folder] = descriptor
    with contextlib.suppress(OSError):  # not there yet, of another user, or only to be read
        os.utime(folder)


def _share_lock(folder: Path) -> int | None:
    """A descriptor of the lock; None where there is none for this user, as in another's cache."""
    path = _lock_file(folder)
    while True:
        try:
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        except OSError as error:
            logger.warning("no lock of %s: %s", folder, error)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            logger.warning("no lock in %s: %s", folder.parent, error)
            return descriptor
        if locks.is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # it was removed with its folder


def is_in_use(folder: Path) -> bool:
    """Whether this process keeps the folder: its files stay as they are."""
    return folder in _in_use


def packed_files(folder: Path) -> list[Path]:
    """Those of a converted file, the one that was used last in front."""
    times: dict[Path, int] = {}
    for path in folder.glob(f"*{PACKED_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=times.__getitem__, reverse=True)


def make_room(cache: Path, needed: int, limit: int) -> bool:
    """Remove the folders that were used longest ago, until `needed` bytes more are within `limit`
    -> whether they are; folders that live processes use stay.
    """
    folders = [path for path in cache.iterdir() if path.is_dir() and path.name[0] != "."]
    sizes = {folder: _num_bytes(folder) for folder in folders}
    total = sum(sizes.values()) + needed
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime_ns):
        if total <= limit:
            break
        if _remove_unused(folder):
            logger.info("removed %s, which was used longest ago", folder)
            total -= sizes[folder]
    return total <= limit


def _remove_unused(folder: Path) -> bool:
    """Remove a folder with its lock and what is noted of it, unless a process uses it."""
    path = _lock_file(folder)
    try:
        descriptor = locks.lock(path, locks.ALONE | locks.AT_ONCE)
    except OSError:
        return False
    try:
        shutil.rmtree(folder)
        _forget(folder)
    except OSError:
        os.close(descriptor)
        return False
    locks.remove(path, descriptor)
    return True


def _forget(folder: Path) -> None:
    """Remove the notes of files that were converted to it."""
    cache, key = folder.parent, folder.name.partition("-")[0]
    notes = [path for path in cache.glob(".*.folder") if read_note(path).startswith(folder.name)]
    if not any(cache.glob(f"{key}-*")):
        notes += [path for path in cache.glob(".*.key") if read_note(path) == key]
    for path in notes:
        path.unlink(missing_ok=True)


def _num_bytes(folder: Path) -> int:
    sizes = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
            sizes += path.stat().st_size
    return sizes


def _lock_file(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.use"
