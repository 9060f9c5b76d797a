"""Whether a converted folder has all that was written to it.

A folder is used before its files have reached the disk, which takes a large model seconds: a
machine that goes down meanwhile may keep their names and sizes, and zeros for their bytes. So a
note in the folder has the sizes of its files, and until they are on disk it counts only in the boot
of the machine in which it was written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

_NOTE = "stored.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Note(msgspec.Struct, frozen=True):
    """Attributes:
    on_disk: 0 or 1; the first field, so that it lies at `_AT`.
    boot: in which the files were written.
    sizes: bytes of each file, by its path in the folder.
    """

    on_disk: int
    boot: str
    sizes: dict[str, int]


_AT = len(b'{"on_disk":')


class NotStored(Exception):
    """A folder lacks what was written to it; the message says what."""


# Folders that a thread of this process brings to the disk, or has brought.
_storing: set[Path] = set()


def note_written(folder: Path) -> None:
    """Note what a folder has that is complete; where boots have no names, once it is on disk."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    if not (boot := _this_boot()):
        _sync(folder, sizes)
    note = msgspec.json.encode(_Note(int(not boot), boot, sizes))
    (folder / _NOTE).write_bytes(note)


def check_stored(folder: Path) -> None:
    """Raises NotStored unless all files that were noted are there, with the bytes written."""
    note = _read(folder)
    if not note.on_disk and note.boot != _this_boot():
        raise NotStored("the machine went down before its files were on disk")
    for name, size in note.sizes.items():
        found = os.stat(folder / name).st_size if (folder / name).is_file() else 0
        if found != size:
            raise NotStored(f"{name} has {found} bytes, not {size}")


def is_stored(folder: Path) -> bool:
    """Whether `check_stored` finds nothing."""
    try:
        check_stored(folder)
    except NotStored:
        return False
    return True


def bring_to_disk(folder: Path) -> None:
    """Let a thread do so, and note it, unless that was done; a process may end before."""
    with contextlib.suppress(NotStored):  # removed meanwhile
        note = _read(folder)
        if folder not in _storing and not note.on_disk:
            _storing.add(folder)
            threading.Thread(target=_bring_to_disk, args=[folder, note], daemon=True).start()


def _bring_to_disk(folder: Path, written: _Note) -> None:
    try:
        _sync(folder, written.sizes)
        note = os.open(folder / _NOTE, os.O_WRONLY)
        try:
            os.pwrite(note, b"1", _AT)  # nobody can read a half of it
        finally:
            os.close(note)
    except OSError as error:  # the next start tries again
        logger.info("%s may not be on disk: %s", folder, error)


def _sync(folder: Path, names: dict[str, int]) -> None:
    files = [folder / name for name in names]
    for path in dict.fromkeys([*files, *(file.parent for file in files), folder]):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _read(folder: Path) -> _Note:
    try:
        return msgspec.json.decode((folder / _NOTE).read_bytes(), type=_Note)
    except (OSError, msgspec.MsgspecError) as error:
        raise NotStored(f"{_NOTE} cannot be read: {error}") from None


def _this_boot() -> str:
    """The kernel's name for this run of the machine; empty where it has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
