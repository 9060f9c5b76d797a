"""Steps on a CPU that are recorded when they recur.

There are no buckets: a program is for exact addresses and shapes, so nothing is padded and nothing
is captured before it is needed. The inputs of a step lie in a staging buffer, which hands out the
same addresses for the same shapes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.program import Arena, Program, record
from atom.model_ops.kernels.native.recorder import NotRecordableError
from atom.platform import Platform

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Those that were used last.
MOST_PROGRAMS = 256


def create_recorder(platform: Platform) -> StepRecorder | None:
    """A recorder on a CPU that has native kernels, else None."""
    if platform.is_gpu or native_build().reason is not None:
        return None
    return StepRecorder()


@dataclass(frozen=True)
class Recordable(Generic[T]):
    """Work that may be recorded.

    Attributes:
        name: of a kind of work.
        key: everything but the contents of tensors on which it depends. All work of a name and a
            key calls the same ops.
        inputs: the tensors that it reads and that are not the same in every step.
        run: does it.
        results: the tensors of what `run` returns; they are valid until the next run of the name.
        passing: likewise those that are valid only until other work runs, and need no memory of
            their own.
        in_parts: does it, too, where it cannot be recorded as a whole; None if only `run` does.
    """

    name: str
    key: Hashable
    inputs: Iterable[torch.Tensor | None]
    run: Callable[[], T]
    results: Callable[[T], Iterable[torch.Tensor]]
    passing: Callable[[T], Iterable[torch.Tensor]] = lambda _: ()
    in_parts: Callable[[], T] | None = None

    def run_op_by_op(self) -> T:
        """Do it without a program."""
        return self.run() if self.in_parts is None else self.in_parts()

    @property
    def place(self) -> Hashable:
        """What one program serves."""
        inputs = (None if t is None else (t.data_ptr(), t.shape) for t in self.inputs)
        return self.name, self.key, tuple(inputs)


@dataclass(eq=False)
class Recording(Generic[T]):
    """Attributes:
    result: what the work returned.
    used: when it was replayed last, in runs of the recorder.
    """

    result: T
    program: Program
    used: int = 0


class StepRecorder:
    """Replays work that it has seen before with the same tensors.

    Work is recorded the first time, which takes about as long as running it op by op. What cannot
    be recorded runs op by op from then on, with any tensors, and the log says why, once.

    Attributes:
        arena: where programs have what they need while they run.
        was_replayed: whether the last work was.
        has_program: whether the last work has one, and so its results where they will be again.
        seconds_to_record: the mean time that recording took, before the program ran.
    """

    def __init__(self) -> None:
        self.arena = Arena()
        self._programs: dict[Hashable, Recording[Any]] = {}
        self._num_runs = 0
        self._refused: set[tuple[str, Hashable]] = set()
        self._logged: set[str] = set()
        self._is_usual = True
        self.was_replayed = self.has_program = False
        self.seconds_to_record, self._num_recorded = 0.0, 0

    def run(
        self,
        known: dict[Hashable, Recording[Any]],
        which: Hashable,
        work: Callable[[], Recordable[T]],
    ) -> T:
        """What the work returns, replayed if it was recorded.

        Args:
            known: recordings of work with just these inputs, to which this one is added; they stay
                until it goes.
            which: of them.
            work: only called if that is none of them.
        """
        self._num_runs += 1
        recording = known.get(which)
        if recording is None:
            described = work()
            self.was_replayed = self.has_program = False
            if self.refuses(described.name, described.key):
                return described.run_op_by_op()
            place = described.place
            recording = self._programs.get(place)
            if recording is None:
                return self._record(described, place)
            known[which] = recording
        recording.used = self._num_runs
        recording.program.replay()
        self.was_replayed = self.has_program = True
        return cast(T, recording.result)

    def _record(self, work: Recordable[T], place: Hashable) -> T:
        started = time.perf_counter()
        self.note_unusual()
        try:
            result, program = record(work.run, work.results, self.arena, work.passing)
        except NotRecordableError as error:
            self.refuse(work.name, work.key, error)
            return work.run_op_by_op()
        self._num_recorded += 1
        seconds = time.perf_counter() - started
        self.seconds_to_record += (seconds - self.seconds_to_record) / self._num_recorded
        self._programs[place] = Recording(result, program, self._num_runs)
        if len(self._programs) > MOST_PROGRAMS:
            del self._programs[min(self._programs, key=lambda own: self._programs[own].used)]
        program.replay()
        self.has_program = True
        return result

    def refuses(self, name: str, key: Hashable) -> bool:
        """Whether such work was refused before."""
        return (name, key) in self._refused

    def refuse(self, name: str, key: Hashable, error: NotRecordableError) -> None:
        """Let such work run op by op from now on."""
        self._refused.add((name, key))
        message = f"{name} runs op by op: {error}"
        if message not in self._logged:
            self._logged.add(message)
            logger.info("%s", message)

    def note_unusual(self) -> None:
        """Note that work takes longer than it will again."""
        self._is_usual = False

    def take_usual(self) -> bool:
        """Whether all work since the last call took the time that it will take again."""
        usual, self._is_usual = self._is_usual, True
        return usual

    def release(self) -> None:
        """Drop all programs but those that are known where their inputs are."""
        self._programs.clear()
