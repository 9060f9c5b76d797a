"""Runs pytest in forks of a process that has imported what tests need, but not what is mutated."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import re
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# Beyond which a mutant that allocates without end is killed, before the machine is short of memory.
_MOST_BYTES = 8 << 30
_MUTATED = "atom"
_TICK_SECONDS = 0.02
# What counts of the seconds in which a test waits, for a processor or for something else.
_WAITING = 0.2


@dataclass(frozen=True)
class TestRun:
    """How a run of tests ended.

    Attributes:
        failed: ids of failed tests, or what ended the run.
    """

    seconds: float
    failed: list[str]
    timed_out: bool = False


def seconds_of(processor: float, clock: float) -> float:
    """What a run took, however busy the machine is: seconds of a processor, or a part of those that
    went by where it waits.
    """
    return max(processor, clock * _WAITING)


class Pace:
    """Which test a fork is at and how long that may take, in memory that its parent sees."""

    _FORMAT = "qd"

    def __init__(self, seconds_to_start: float) -> None:
        self._memory = mmap.mmap(-1, struct.calcsize(self._FORMAT))
        self._begin(0, seconds_to_start)

    @property
    def newest(self) -> tuple[int, float]:
        """How many tests have begun, and the seconds that the newest may take."""
        number, seconds = struct.unpack_from(self._FORMAT, self._memory)
        return number, seconds

    def begin(self, seconds: float) -> None:
        """The next test begins."""
        self._begin(self.newest[0] + 1, seconds)

    def _begin(self, number: int, seconds: float) -> None:
        struct.pack_into(self._FORMAT, self._memory, 0, number, seconds)


def _is_mutated(module: str) -> bool:
    return module.partition(".")[0] == _MUTATED


class _Guard(MetaPathFinder):
    """Lets nobody import the mutated package, and says whether somebody would."""

    was_asked = False

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        del path, target
        if _is_mutated(fullname):
            self.was_asked = True
            raise ImportError(f"{fullname} is not to be imported here")


class Runner:
    """Args:
    tree: the copy of the tree; becomes this process's folder.
    """

    def __init__(self, tree: Path) -> None:
        self._tried: set[str] = set()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        # What tests compute is so small that threads wait more than they work.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch

        if not torch.cuda.is_available():
            # As conftest.py says, before anything imports triton.
            os.environ["TRITON_INTERPRET"] = "1"
        for plugin in entry_points(group="pytest11"):
            plugin.load()

    def warm_up(self, modules: Sequence[str]) -> None:
        """Import what no mutant changes, so that forks need not; what imports the mutated package
        itself is left to them.
        """
        guard = _Guard()
        sys.meta_path.insert(0, guard)
        for name in modules:
            if name in sys.modules or name in self._tried:
                continue
            self._tried.add(name)
            known = set(sys.modules)
            guard.was_asked = False
            with contextlib.suppress(Exception):
                importlib.import_module(name)
            if guard.was_asked:
                for new in set(sys.modules) - known:
                    del sys.modules[new]
        sys.meta_path.remove(guard)
        imported = [name for name in sys.modules if _is_mutated(name)]
        assert not imported, f"{imported} would stay as they are, whatever is mutated"

    def run(
        self,
        files: Sequence[str],
        limit: float,
        plugin: Any,
        pace: Pace | None = None,
        *,
        keep_going: bool = False,
        write_bytecode: bool = False,
    ) -> TestRun:
        """Run test files as a plugin chooses their tests.

        Args:
            limit: seconds after which the run is ended, as `seconds_of`.
            pace: what the plugin tells of each test, which may end the run sooner.
            keep_going: after a failed test.
            write_bytecode: of test files, so that later runs need not compile them.
        """
        flags = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore"]
        flags += ["--hypothesis-seed=0", *([] if keep_going else ["-x"])]
        with tempfile.TemporaryFile() as output:
            start = time.monotonic()

            def work() -> int:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.dont_write_bytecode = not write_bytecode
                os.environ["PYTHONDONTWRITEBYTECODE"] = "" if write_bytecode else "1"
                import pytest

                return int(pytest.main([*flags, *files], plugins=[plugin]))

            status = _fork(work, limit, pace or Pace(limit))
            seconds = time.monotonic() - start
            output.seek(0)
            text = output.read().decode(errors="replace")
        if status is None:
            return TestRun(seconds, ["ran out of time"], timed_out=True)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, re.MULTILINE)
        if status != 0 and not failed:
            failed = [f"exit status {status}: {text.strip()[-200:]}"]
        return TestRun(seconds, failed)


def _fork(work: Callable[[], int], limit: float, pace: Pace) -> int | None:
    """Do work in a fork -> its exit status; None if it was ended, with all that it started."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
            code = work()
            sys.stdout.flush()
        finally:
            os._exit(code)
    status: int | None = None
    spent, last, used = 0.0, time.monotonic(), 0.0
    at, most, since = *pace.newest, 0.0
    while status is None and spent < limit and spent - since < most:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(_TICK_SECONDS)
        now, so_far = time.monotonic(), _processor_seconds(child) if not done else used
        spent += seconds_of(so_far - used, now - last)
        last, used = now, so_far
        if pace.newest[0] != at:
            at, most, since = *pace.newest, spent
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def _processor_seconds(process: int) -> float:
    """Of a process that has not been waited for, without its children."""
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
