"""Runs pytest in forks of a process that has imported what tests need, but not what is mutated."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# Beyond which a mutant that allocates without end is killed, before the machine is short of memory.
_MOST_BYTES = 8 << 30
_TICK_SECONDS = 0.02
# Of a tick that took longer, this process and its tests were stopped from outside.
_LONGEST_TICK_SECONDS = 0.5


@dataclass(frozen=True)
class TestRun:
    """How a run of tests ended.

    Attributes:
        failed: ids of failed tests, or what ended the run.
    """

    seconds: float
    failed: list[str]
    timed_out: bool = False


class Runner:
    """Args:
    tree: the copy of the tree; becomes this process's folder.
    """

    def __init__(self, tree: Path) -> None:
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
        """Import what no mutant changes, so that forks need not."""
        for name in modules:
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)

    def run(
        self,
        files: Sequence[str],
        limit: float,
        plugin: Any,
        *,
        keep_going: bool = False,
        write_bytecode: bool = False,
    ) -> TestRun:
        """Run test files as a plugin chooses their tests.

        Args:
            limit: seconds after which the run is ended; those in which all is stopped do not count.
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

            status = _fork(work, limit)
            seconds = time.monotonic() - start
            output.seek(0)
            text = output.read().decode(errors="replace")
        if status is None:
            return TestRun(seconds, ["ran out of time"], timed_out=True)
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
        if status != 0 and not failed:
            failed = [f"exit status {status}: {text.strip()[-200:]}"]
        return TestRun(seconds, failed)


def _fork(work: Callable[[], int], limit: float) -> int | None:
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
    spent, last = 0.0, time.monotonic()
    while status is None and spent < limit:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(_TICK_SECONDS)
        now = time.monotonic()
        spent += min(now - last, _LONGEST_TICK_SECONDS)
        last = now
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status
