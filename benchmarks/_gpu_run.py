"""Runs a program for as long as it may take, shows what it says meanwhile, and keeps the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
_KEPT = 4000
_SECONDS_TO_END = 5


def run(
    command: Sequence[str], seconds: float, *, shows: bool = False, keeps: int = _KEPT
) -> tuple[int | None, str]:
    """The exit status, None when it took too long, and the end of what was printed.

    A program that takes too long is ended with all processes that it began.

    Args:
        shows: pass its standard error on as it comes.
        keeps: characters.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    printed: list[str] = []
    told: list[str] = []
    readers = [
        Thread(target=_read, args=(process.stdout, printed, False), daemon=True),
        Thread(target=_read, args=(process.stderr, told, shows), daemon=True),
    ]
    for reader in readers:
        reader.start()
    status: int | None
    try:
        status = process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
        status = None
        _end(process)
    except BaseException:
        _end(process)
        raise
    for reader in readers:
        reader.join(_SECONDS_TO_END)
    return status, f"{''.join(printed)[-keeps:]}{''.join(told)[-keeps:]}"


def _read(stream: IO[str], lines: list[str], shows: bool) -> None:
    for line in stream:
        lines.append(line)
        if shows:
            print(f"  {line.rstrip()}", file=sys.stderr, flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_)
            process.wait(_SECONDS_TO_END)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        return
