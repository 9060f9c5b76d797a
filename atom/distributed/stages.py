"""The stages of a rank's start, which tell who is waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec


class Stage(msgspec.Struct, frozen=True):
    """What a rank is doing, such as `loading the model`; all pass the same stages in order."""

    number: int = 0
    what: str = "joining the others"


@dataclass(frozen=True)
class Begun:
    """A stage, and when it began on this machine's monotonic clock."""

    stage: Stage
    at: float


class Stages:
    """Where a rank's start is: set by the thread that starts it, read by those that watch."""

    def __init__(self) -> None:
        self._begun = Begun(Stage(), time.monotonic())

    @property
    def begun(self) -> Begun:
        return self._begun

    @property
    def current(self) -> Stage:
        return self._begun.stage

    def begin(self, what: str) -> None:
        """Every rank calls it at the same points."""
        self._begun = Begun(Stage(self.current.number + 1, what), time.monotonic())
