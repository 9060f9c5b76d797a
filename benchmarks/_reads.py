"""How fast threads read memory. Needs a C compiler, `$CC` or `cc`, and nothing of this project."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCE = Path(__file__).with_name("_reads.c")
# Four streams of eight numbers.
_CHUNK = 256


class Memory:
    """Memory that threads read together, in huge pages where the system has them.

    Args:
        threads: that many; each reads a part of its own.
        num_bytes: at least; the size is rounded up to equal parts.

    Raises:
        OSError, subprocess.CalledProcessError: without a compiler.
    """

    def __init__(self, threads: int, num_bytes: int) -> None:
        part = -(-num_bytes // (threads * _CHUNK)) * _CHUNK
        self.num_bytes = threads * part
        self._data = mmap.mmap(-1, self.num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._data.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._data))
        ctypes.memset(start, 1, self.num_bytes)
        self._parts = [(start + i * part, part // 8) for i in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self._function = _compiled()

    def read(self) -> float:
        """Seconds of reading all of it once.

        Raises:
            RuntimeError: when some of it was not read.
        """
        started = time.perf_counter()
        found = sum(self._pool.map(lambda part: self._function(*part), self._parts))
        seconds = time.perf_counter() - started
        if found % 2**64 != self.num_bytes // 8 * 0x0101010101010101 % 2**64:
            raise RuntimeError("not all of the memory was read")
        return seconds


def _compiled() -> ctypes._NamedFuncPointer:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "reads.so"
        flags = ("-O3", "-march=native", "-shared", "-fPIC", "-o", str(library))
        subprocess.run([os.environ.get("CC", "cc"), *flags, str(_SOURCE)], check=True)
        function = ctypes.CDLL(str(library)).read_all
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return function
