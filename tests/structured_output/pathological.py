"""Grammars that take minutes to compile, and processes that compile."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

from atom import StructuredOutput
from atom.structured_output.trials import workers as trial_workers
from atom.structured_output.trials.messages import TrialLimits


def hard(number: int) -> StructuredOutput:
    """A regular expression of 4400 characters that keeps xgrammar busy for minutes."""
    repeated = "".join(f".{{0,{100 + i}}}x.*" for i in range(400))
    return StructuredOutput.regex(f"{number}.*{repeated}")


def easy(number: int) -> StructuredOutput:
    return StructuredOutput.regex(f"[a-z]{{1,5}}{number}")


def workers(pid: int | None) -> list[psutil.Process]:
    """The processes that compile for a process of trials."""
    return psutil.Process(pid).children()


def settled_worker(pid: int | None) -> psutil.Process | None:
    """The process that compiles a hard grammar to its end; a slice ends those before it."""
    added = len(TrialLimits().slices) * trial_workers._NICENESS
    least = min(os.getpriority(os.PRIO_PROCESS, 0) + added, 19)
    for worker in workers(pid):
        with suppress(psutil.NoSuchProcess):
            if worker.nice() >= least:
                return worker
    return None
