"""Recorded work: a list of kernels with their arguments, replayed in one call.

While work runs under `record`, every native kernel that it calls is added to a program instead of
being run, and torch only allocates and makes views. The tensors in between are placed in one block
of memory, the arena, where those that are not needed at the same time share their place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import TypeVar

import numpy as np
import torch

from atom.model_ops.kernels.native.bindings import address, kernel, listening
from atom.model_ops.kernels.native.recorder import Call, Pause, Recorder

T = TypeVar("T")

_ALIGNMENT = 64
_run_program = Struct("2P2q").pack
# The first kernel, the arguments of `run_program` but for the threads, and what follows them.
_Part = tuple[int, tuple[int, int, int], Callable[[], None] | None]


class Arena:
    """Memory that programs use one after another. A program keeps what it was given."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """At least so many bytes, at a multiple of 64."""
        if self._memory.numel() < num_bytes + _ALIGNMENT:
            self._memory = torch.empty(2 * num_bytes + _ALIGNMENT, dtype=torch.uint8)
        start = -self._memory.data_ptr() % _ALIGNMENT
        return self._memory[start:]


class Program:
    """Kernels with their arguments, and what the host does between them.

    What they read and write outside the arena must outlive the program.

    Args:
        calls: in order. Memory allocated while they were recorded is placed in the arena.
        pauses: between them, in order.
        kept: tensors that do not move there, since they are read after a replay.
        passing: tensors that are read after a replay, too, but before another program's. They move
            there as they are.
    """

    def __init__(
        self,
        calls: list[Call],
        kept: Iterable[torch.Tensor],
        arena: Arena,
        *,
        passing: Iterable[torch.Tensor] = (),
        pauses: Sequence[Pause] = (),
    ) -> None:
        self._names = [call.kernel for call in calls]
        self._kept = tuple(kept)
        moving = [*passing, *(tensor for pause in pauses for tensor in pause.tensors)]
        places, size = _plan(calls, _storages(self._kept), _storages(moving))
        self._arena = arena.reserve(size)
        for tensor in moving:
            _move_tensor(tensor, places, self._arena)
        base = self._arena.data_ptr()
        moved = [_move(call, places, base) for call in calls]
        self._blocks = np.frombuffer(b"".join(moved), dtype=np.uint8).copy()
        steps = np.empty((len(calls), 2), dtype=np.uint64)
        at = self._blocks.ctypes.data
        for i, (call, block) in enumerate(zip(calls, moved, strict=True)):
            steps[i] = address(call.kernel), at
            at += len(block)
        self._steps, self._failed = steps, np.zeros(1, dtype=np.int64)
        self._parts = self._cut(pauses)
        self._run = kernel("run_program")

    def _cut(self, pauses: Sequence[Pause]) -> list[_Part]:
        """The kernels before each pause, and those behind the last."""
        starts = [0, *(pause.at for pause in pauses)]
        ends = [*starts[1:], len(self._steps)]
        actions = [*(pause.action for pause in pauses), None]
        first, failed = self._steps.ctypes.data, self._failed.ctypes.data
        return [
            (start, (first + start * self._steps.strides[0], failed, end - start), action)
            for start, end, action in zip(starts, ends, actions, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._names)

    def replay(self) -> None:
        """Run all kernels on the current contents of their tensors.

        Raises:
            IndexError: when one of them meets an index that is out of range.
        """
        for start, where, action in self._parts:
            wrong = self._run(_run_program(*where, torch.get_num_threads()))
            if wrong:
                name = self._names[start + int(self._failed[0])]
                raise IndexError(
                    f"{name}: row or sequence {wrong - 1} refers to what does not exist"
                )
            if action is not None:
                action()


def record(
    work: Callable[[], T],
    results: Callable[[T], Iterable[torch.Tensor]],
    arena: Arena,
    passing: Callable[[T], Iterable[torch.Tensor]] = lambda _: (),
) -> tuple[T, Program]:
    """What `work` returns, and the kernels that compute it when they are replayed.

    Args:
        results: the tensors of what `work` returns, but for the next.
        passing: those of them that are read before other work is replayed.

    Raises:
        NotRecordableError: when `work` calls what no program can hold.
    """
    recorder = Recorder()
    listening.listener = recorder
    try:
        with recorder:
            result = work()
    finally:
        listening.listener = None
    program = Program(
        recorder.calls,
        results(result),
        arena,
        passing=passing(result),
        pauses=recorder.pauses,
    )
    return result, program


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _plan(calls: list[Call], kept: set[int], passing: set[int]) -> tuple[dict[int, int], int]:
    """Offsets in the arena of the temporaries, by their address, and the arena's size.

    Args:
        kept: addresses of memory that is not placed there.
        passing: addresses of memory that is needed until the end.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for i, call in enumerate(calls):
        for place in call.places:
            if place is None or place.storage in kept:
                continue
            first.setdefault(place.storage, i)
            last[place.storage] = len(calls) - 1 if place.storage in passing else i
            sizes[place.storage] = -(-place.num_bytes // _ALIGNMENT) * _ALIGNMENT
    starting: dict[int, list[int]] = {}
    ending: dict[int, list[int]] = {}
    for storage, i in first.items():
        starting.setdefault(i, []).append(storage)
        ending.setdefault(last[storage], []).append(storage)
    free = _FreeList()
    offsets: dict[int, int] = {}
    for i in range(len(calls)):
        for storage in starting.get(i, ()):
            offsets[storage] = free.take(sizes[storage])
        for storage in ending.get(i, ()):
            free.give(offsets[storage], sizes[storage])
    return offsets, free.size


class _FreeList:
    """Free ranges [start, end) of the arena, ascending.

    Attributes:
        size: of the arena so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._ranges: list[tuple[int, int]] = []

    def take(self, num_bytes: int) -> int:
        """The start of the smallest free range that is large enough, or of a new one."""
        fitting = [(end - start, i) for i, (start, end) in enumerate(self._ranges)]
        fitting = [item for item in fitting if item[0] >= num_bytes]
        if not fitting:
            start = self.size
            if self._ranges and self._ranges[-1][1] == self.size:
                start = self._ranges.pop()[0]
            self.size = start + num_bytes
            return start
        _, i = min(fitting)
        start, end = self._ranges[i]
        self._ranges[i : i + 1] = [] if end - start == num_bytes else [(start + num_bytes, end)]
        return start

    def give(self, start: int, num_bytes: int) -> None:
        """Return a range, and join it with its neighbours."""
        end = start + num_bytes
        i = bisect_right(self._ranges, (start, end))
        if i < len(self._ranges) and self._ranges[i][0] == end:
            end = self._ranges.pop(i)[1]
        if i and self._ranges[i - 1][1] == start:
            i -= 1
            start = self._ranges.pop(i)[0]
        self._ranges.insert(i, (start, end))


def _move_tensor(tensor: torch.Tensor, offsets: dict[int, int], arena: torch.Tensor) -> None:
    """Let a tensor of memory that is placed in the arena lie there."""
    start = offsets.get(tensor.untyped_storage().data_ptr())
    if start is not None:
        size = tensor.element_size()
        offset = (arena.storage_offset() + start) // size + tensor.storage_offset()
        tensor.set_(arena.untyped_storage(), offset, tensor.size(), tensor.stride())


def _move(call: Call, offsets: dict[int, int], base: int) -> bytes:
    """The call's arguments, with temporaries in the arena."""
    block = bytearray(call.block)
    pointers = memoryview(block).cast("Q")
    for i, place in enumerate(call.places):
        if place is not None and place.storage in offsets:
            pointers[i] += base + offsets[place.storage] - place.storage
    pointers.release()
    return bytes(block)
