"""Files of packed weights beside a converted GGUF file's, mapped in huge pages.

It imports no torch: a program that knows its model reads them while it imports that (`read_ahead`).

A file has the length and the SHA-256 of its header, the header as JSON, and the tensors. The
header says the sum of all tensors' bytes, which the kernels compute: a file that was damaged, or
written by something else, is not used.

Kernels read weights from huge pages (`native/huge_pages.py`). Linux keeps files in such pages where
the file system can and they were written or read so, and then a start only maps them. Where it has
a file in small pages, its bytes are copied to huge ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import mmap
import os
import re
import sys
import threading
from pathlib import Path
from struct import Struct

import msgspec

from atom.model_ops.kernels.native.build import is_compiled, native_build

logger = logging.getLogger(__name__)

# Of each tensor: what lines of the processors' caches have.
ALIGNMENT = 64
_PREFIX = Struct("<Q32s")
_MOST_HEADER_BYTES = 100_000_000
HUGE_PAGE_BYTES = 2 << 20
# Of a file that is used as it is mapped; tensors are not cut to pages.
_HUGE_SHARE = 0.75
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MOST_THREADS = 8
_CHECKED = Struct("2P4q")


class PackedFileError(ValueError):
    """A file of packed weights cannot be used; the message says why."""


class TensorEntry(msgspec.Struct, frozen=True):
    """Attributes:
    dtype: torch's name, such as `uint8`.
    offset: of the first byte, from where tensors begin.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int


class PackedEntry(msgspec.Struct, frozen=True):
    """One `PackedWeights`: its tensors by field, and its numbers."""

    tensors: dict[str, TensorEntry]
    sizes: tuple[int, ...]
    fixed_scale: float


class Header(msgspec.Struct, frozen=True):
    """Attributes:
    num_bytes: of all tensors.
    sum: of these bytes, 16 hexadecimal digits.
    layers: what each module prepared, by its name.
    """

    num_bytes: int
    sum: str
    layers: dict[str, tuple[PackedEntry, ...]]


class PackedFile:
    """A file whose tensors are being read, from now on, by threads of their own.

    Attributes:
        header: what it says of them.

    Raises:
        PackedFileError, OSError: when it cannot be used.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self._num_threads = num_threads
        with path.open("rb", buffering=0) as file:
            self.header, self._start = _read_header(file.fileno())
            self._file = os.dup(file.fileno())
        self._values = memoryview(b"")
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def values(self) -> memoryview:
        """Of all tensors; whoever reads them keeps the memory. Nobody may write to it.

        Raises:
            PackedFileError, OSError: when the file was damaged or could not be read.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._values

    def _read(self) -> None:
        try:
            self._values = self._mapped()
            if not _is_in_huge_pages(self._values):
                self._values = self._copied()
        except (PackedFileError, OSError) as error:
            self._error = error
        finally:
            os.close(self._file)

    def _mapped(self) -> memoryview:
        # torch warns of memory that it may not write to. A write would change a copy of the page.
        memory = mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY)
        _use_huge_pages(memory)
        values = memoryview(memory)[self._start :]
        self._check(checked_sum(values, self._num_threads))
        return values

    def _copied(self) -> memoryview:
        num_bytes = self.header.num_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
        _use_huge_pages(memory)
        start = -_address(memory) % HUGE_PAGE_BYTES
        values = memoryview(memory)[start : start + num_bytes]
        self._check(checked_sum(values, self._num_threads, self._file, self._start))
        return values

    def _check(self, total: str) -> None:
        if total != self.header.sum:
            raise PackedFileError("its bytes are not those that were written")


# Files that are read before somebody asks for them.
_ahead: dict[Path, PackedFile] = {}


def read_ahead(path: Path, num_threads: int) -> None:
    """Read a file that is likely to be asked for; nothing where it cannot be used."""
    if not is_compiled():  # this is no thread to compile in
        return
    with contextlib.suppress(PackedFileError, OSError):  # whoever asks for it is told
        _ahead[path] = PackedFile(path, min(_MOST_THREADS, num_threads))


def read_packed(path: Path, num_threads: int) -> PackedFile:
    """The file, which is not read again where it was read ahead.

    Raises:
        PackedFileError, OSError: when it cannot be used.
    """
    found = _ahead.pop(path, None)
    return found or PackedFile(path, min(_MOST_THREADS, num_threads))


def forget_read_ahead() -> None:
    """Give back the memory of files that nobody asked for."""
    _ahead.clear()


def encode_header(header: Header) -> bytes:
    """What comes before the tensors, which begin at a huge page."""
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + _PREFIX.size) % HUGE_PAGE_BYTES)
    return _PREFIX.pack(len(text), hashlib.sha256(text).digest()) + text


def checked_sum(at: memoryview, num_threads: int, file: int = -1, start: int = 0) -> str:
    """The sum of all bytes at `at`, which are read to there from a file first if it is not -1.

    Raises:
        PackedFileError, OSError: when there are no kernels, or the file cannot be read.
    """
    library = native_build().library
    if library is None:
        raise PackedFileError("there are no native kernels")
    function = library["atom_checked_bytes"]
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    total = ctypes.c_uint64(0)
    where = _address(at), ctypes.addressof(total)
    if error := function(_CHECKED.pack(*where, file, start, at.nbytes, num_threads)):
        raise OSError(error - 1, os.strerror(error - 1))
    return f"{total.value:016x}"


def _read_header(file: int) -> tuple[Header, int]:
    """The header, and where the tensors begin."""
    prefix = os.pread(file, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise PackedFileError("it is too short")
    length, digest = _PREFIX.unpack(prefix)
    text = os.pread(file, min(length, _MOST_HEADER_BYTES), _PREFIX.size)
    if hashlib.sha256(text).digest() != digest:
        raise PackedFileError("its header is not the one that was written")
    try:
        header = msgspec.json.decode(text, type=Header)
    except msgspec.MsgspecError as error:
        raise PackedFileError(f"its header is of another version: {error}") from error
    start = _PREFIX.size + length
    if (size := os.fstat(file).st_size) != start + header.num_bytes:
        raise PackedFileError(f"it has {size} bytes, not {start + header.num_bytes}")
    return header, start


def _address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _use_huge_pages(memory: mmap.mmap) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)


def _is_in_huge_pages(values: memoryview) -> bool:
    """Whether most of a map is, whose pages were all read; also where copies would not be."""
    try:
        if "[never]" in _HUGE_PAGES.read_text():
            return True
        maps = Path("/proc/self/smaps").read_text()
    except OSError:
        return True
    address, is_there = _address(values), False
    for line in maps.splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(found[1], 16) <= address < int(found[2], 16)
        elif is_there and line.startswith("FilePmdMapped:"):
            return int(line.split()[1]) * 1024 >= _HUGE_SHARE * values.nbytes
    return True
