"""Notices that a process of this machine has ended, and why, or is stopped."""

from __future__ import annotations

import os
import select
import sys

import psutil


class LocalProcess:
    """A process that may be a child of this one or not.

    Where the kernel has pidfds, another process that gets the same pid later is not mistaken for
    it, and one that has ended counts as such before its parent knows.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._was_gone = False
        self._descriptor: int | None = None
        if sys.platform == "linux":
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._was_gone = True
            except OSError:  # an old kernel, or a sandbox
                return

    @property
    def has_ended(self) -> bool:
        if self._was_gone:
            return True
        if self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            return bool(poll.poll(0))
        return self._peek() is not None or not _exists(self.pid)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal keeps it from running, such as SIGSTOP."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def describe_exit(self) -> str:
        """How it ended; known for a child that nobody has waited for, as it is not reaped here."""
        result = self._peek()
        if result is None:
            return "has ended"
        code, status = result
        return f"ended with status {status}" if code == os.CLD_EXITED else _describe_signal(status)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _peek(self) -> tuple[int, int] | None:
        """`si_code` and `si_status` of a child that has ended."""
        if sys.platform != "linux":
            return None
        try:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        return None if result is None else (result.si_code, result.si_status)


def _describe_signal(number: int) -> str:
    hint = ", perhaps for lack of memory" if number == 9 else ""
    return f"was killed by signal {number}{hint}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
