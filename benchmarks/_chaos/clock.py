"""A wall clock that jumps, for the processes of one server."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")


class JumpingClock:
    """Compiles the library that shifts the clock.

    Args:
        folder: of the library and its shift; exists.

    Attributes:
        env: variables of the processes whose clock is shifted.

    Raises:
        RuntimeError: without a C compiler.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise RuntimeError(
                "a clock that jumps needs a C compiler, and there is no `cc`: install one, or "
                "leave the phase out (--phases)"
            )
        library = folder / "clock.so"
        command = [compiler, "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(library)]
        subprocess.run(command, check=True)
        self._shift = folder / "clock.shift"
        self._shift.write_bytes(bytes(8))
        self.env = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._shift)}

    def jump(self, seconds: int) -> None:
        """Let the clock say so many seconds more than it is."""
        file = os.open(self._shift, os.O_WRONLY)
        try:
            os.pwrite(file, struct.pack("q", seconds), 0)
        finally:
            os.close(file)
