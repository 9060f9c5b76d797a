"""Starts ranks as processes on this machine.

A rank reads its instructions from standard input, and ends when that closes: nothing is left behind
however the process ends that holds the other end.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from atom.distributed.rank_environment import RankEnvironment
from atom.environment import environment_with
from atom.numa import unbound

RANK_MODULE = "atom.model_engine.processes.rank_process"
LENGTH_BYTES = 8
# Once a rank is told to end, or has nobody to follow.
_EXIT_SECONDS = 3.0
_LAST_LINES = 20
_POLL_SECONDS = 0.1


class RankStartError(RuntimeError):
    """A rank could not start or join the others, for no fault of the options."""


class Launched(Protocol):
    """Ranks that this process has started."""

    def check(self) -> None:
        """Raises:
        RankStartError: when one has ended, with its last words.
        """
        ...

    def last_words(self, rank: int) -> str | None:
        """What a rank wrote last; None if it wrote nothing, or was started elsewhere."""
        ...

    def kill(self) -> None:
        """End all at once."""
        ...

    def close(self) -> None:
        """Let all end; kill those that do not."""
        ...


class LocalRanks:
    """Processes on this machine, one a rank.

    Args:
        instructions: what each gets on its standard input.
    """

    def __init__(self, environments: Sequence[RankEnvironment], instructions: bytes) -> None:
        self._processes = [_RankProcess(each, instructions) for each in environments]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def check(self) -> None:
        for process in self._processes:
            if process.status is not None:
                raise RankStartError(process.describe_end())

    def last_words(self, rank: int) -> str | None:
        said = (each.last_words() for each in self._processes if each.rank == rank)
        return next(said, None)

    def wait(self, stop: threading.Event) -> int:
        """Wait until all have ended, one has failed, or `stop` is set.

        Returns:
            The status of the one that failed, 128 and more for a signal; else 0.
        """
        while not stop.wait(_POLL_SECONDS):
            states = [process.status for process in self._processes]
            if failed := [status for status in states if status]:
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            if None not in states:
                return 0
        return 0

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for process in self._processes:
            process.leave()
        end = time.monotonic() + _EXIT_SECONDS
        for process in self._processes:
            process.end(max(end - time.monotonic(), 0))


class _RankProcess:
    def __init__(self, environment: RankEnvironment, instructions: bytes) -> None:
        self.rank = environment.rank
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        # An earlier engine may have bound this process to the node of its own GPU.
        with unbound():
            self._process = subprocess.Popen(
                [sys.executable, "-m", RANK_MODULE],
                env=environment_with(environment.variables()),
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        # A full pipe would block until the rank has imported what it reads with.
        tell = threading.Thread(target=self._tell, args=(instructions,), daemon=True)
        self._forwarding = threading.Thread(target=self._forward, daemon=True)
        tell.start()
        self._forwarding.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def describe_end(self) -> str:
        """How the process ended, and the last thing it said."""
        status = self._process.returncode
        how = f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"
        hint = ", perhaps for lack of memory" if status == -9 else ""
        words = self.last_words()
        said = "" if words is None else f"; its last words: {words}"
        return f"rank {self.rank} (pid {self._process.pid}) {how}{hint}{said}"

    def last_words(self) -> str | None:
        """The last line of its standard error, once it has ended."""
        self._forwarding.join(1.0)
        lines = (line.strip() for line in reversed(self._last_lines))
        return next((line for line in lines if line), None)

    def leave(self) -> None:
        """Close its standard input, at which it ends."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            return  # it has ended, and did not read all

    def kill(self) -> None:
        self._process.kill()

    def end(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._forwarding.join(1.0)

    def _tell(self, instructions: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(instructions).to_bytes(LENGTH_BYTES, "big"))
            self._process.stdin.write(instructions)
            self._process.stdin.flush()
        except (OSError, ValueError):
            return  # it has ended, or is to end

    def _forward(self) -> None:
        """Pass on what it writes to standard error, and remember the end of it."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace")
            self._last_lines.append(text)
            sys.stderr.write(text)
            sys.stderr.flush()
