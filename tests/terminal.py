"""A terminal with a shell, as a person uses it: types lines, reads what comes."""

from __future__ import annotations

import os
import pty
import re
import select
import tempfile
import time
from pathlib import Path
from types import TracebackType

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\r")


class Terminal:
    """bash on a pseudo-terminal. Use it as a context manager.

    Attributes:
        text: all that was shown, without colours.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.text = ""
        self._num_blocks = 0
        self._scratch = tempfile.TemporaryDirectory()
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execve("/bin/bash", ["bash", "--noprofile", "--norc", "-i"], env)

    def __enter__(self) -> Terminal:
        self.type("PS1=; stty -echo; failed=0; trap 'failed=1' ERR")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Hang up, which ends what runs in it."""
        os.close(self._fd)
        os.waitpid(self._pid, 0)
        self._scratch.cleanup()

    def type(self, text: str, end: str = "\n") -> None:
        os.write(self._fd, (text + end).encode())

    def begin(self, block: str) -> None:
        """Run lines of bash, which may read what is typed next."""
        self._num_blocks += 1
        script = Path(self._scratch.name, str(self._num_blocks))
        script.write_text(block)
        self.type(f'. {script}; echo; echo "[block {self._num_blocks} ended, failed: $failed]"')

    def wait_for(self, pattern: str, seconds: float, start: int = 0) -> re.Match[str]:
        """Read until what was shown after `start` characters has the pattern."""
        deadline = time.monotonic() + seconds
        while (match := re.compile(pattern, re.MULTILINE).search(self.text, start)) is None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                raise AssertionError(f"no {pattern!r} within {seconds:g} s:\n{self.text[start:]}")
            self.text += _CONTROL.sub("", os.read(self._fd, 65536).decode(errors="replace"))
        return match

    def wait_end(self, seconds: float, start: int) -> str:
        """Wait for the end of the block that was begun last; what it showed after `start`."""
        pattern = rf"^\[block {self._num_blocks} ended, failed: (\d)\]$"
        match = self.wait_for(pattern, seconds, start)
        shown = self.text[start : match.start()]
        assert match[1] == "0", shown
        return shown

    def run(self, block: str, seconds: float) -> str:
        """Run a block to its end: every line of it must succeed. Returns what it showed."""
        start = len(self.text)
        self.begin(block)
        return self.wait_end(seconds, start)
