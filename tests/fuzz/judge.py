"""What a reader may do with damaged input: take it, or refuse it by name; soon, in bounds."""

from __future__ import annotations

import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# Of processor time, which other programs do not lengthen.
_SECONDS = 10
# Beyond what the process has when an input is read.
_BYTES = 1 << 30


def cases(few: int, spread: int) -> list[Any]:
    """Numbers of seeds: `few` in each run, and parts of `spread` with --run-slow."""
    part = 2000
    slow = [
        pytest.param(range(start, min(start + part, spread)), marks=pytest.mark.slow)
        for start in range(few, spread, part)
    ]
    return [range(few), *slow]


def judge(
    seeds: range,
    read: Callable[[int], object],
    named: tuple[type[Exception], ...],
    least_share: float = 0.02,
) -> None:
    """Read the inputs of all seeds.

    Args:
        read: makes the input of a seed and reads it.
        named: the errors that tell a user what is wrong.
        least_share: of the inputs, that must have been refused, and that must have been read: an
            input that is always refused at once tries nothing behind that.
    """
    outcomes: Counter[str] = Counter()
    with _bounded():
        for seed in seeds:
            signal.setitimer(signal.ITIMER_PROF, _SECONDS)
            try:
                read(seed)
                outcomes["read"] += 1
            except named as error:
                outcomes["refused" if str(error).strip() else f"seed {seed} says nothing"] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    assert outcomes.keys() == {"read", "refused"}, outcomes
    assert min(outcomes.values()) >= least_share * len(seeds), outcomes


@contextmanager
def _bounded() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {_SECONDS} s of a processor")

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (now + _BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGPROF, before)
