"""Steps on a CPU that are recorded when they recur.

There are no buckets: a program is for exact addresses and shapes, so nothing is padded and nothing
is captured before it is needed. The inputs of a step lie in a staging buffer, which hands out the
same addresses for the same shapes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, cast

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


class StepRecorder:
    """Replays work that it has seen before with the same tensors.

    Work is recorded the first time, which takes about as long as running it op by op. What cannot
    be recorded runs op by op from then on, with any tensors, and the log says why, once.

    Attributes:
        was_replayed: whether the last work was.
    """

    def __init__(self) -> None:
        self._arena = Arena()
        self._programs: OrderedDict[Hashable, tuple[Any, Program]] = OrderedDict()
        self._refused: set[tuple[str, Hashable]] = set()
        self._logged: set[str] = set()
        self._is_usual = True
        self.was_replayed = False

    def run(
        self,
        name: str,
        key: Hashable,
        inputs: Iterable[torch.Tensor | None],
        work: Callable[[], T],
        results: Callable[[T], Iterable[torch.Tensor]],
    ) -> T:
        """What `work` returns; its tensors are valid until the next run of the same name.

        Args:
            name: of a kind of work.
            key: everything but the contents of tensors on which `work` depends. All work of a name
                and a key calls the same ops.
            inputs: the tensors that `work` reads and that are not the same in every step.
            results: the tensors of what it returns.
        """
        self.was_replayed = False
        if (name, key) in self._refused:
            return work()
        where = (name, key, tuple(None if t is None else (t.data_ptr(), t.shape) for t in inputs))
        if where in self._programs:
            self._programs.move_to_end(where)
            result, program = self._programs[where]
            program.replay()
            self.was_replayed = True
            return cast(T, result)
        self._is_usual = False
        return self._record(name, key, where, work, results)

    def _record(
        self,
        name: str,
        key: Hashable,
        where: Hashable,
        work: Callable[[], T],
        results: Callable[[T], Iterable[torch.Tensor]],
    ) -> T:
        try:
            result, program = record(work, results, self._arena)
        except NotRecordableError as error:
            self._refused.add((name, key))
            self._log(f"{name} runs op by op: {error}")
            return work()
        self._programs[where] = result, program
        if len(self._programs) > MOST_PROGRAMS:
            self._programs.popitem(last=False)
        program.replay()
        return result

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.info("%s", message)

    def take_usual(self) -> bool:
        """Whether all work since the last call took the time that it will take again."""
        usual, self._is_usual = self._is_usual, True
        return usual

    def release(self) -> None:
        """Drop all programs."""
        self._programs.clear()
