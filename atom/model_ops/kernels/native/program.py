"""Recorded work: a list of kernels with their arguments, replayed in one call.

While work runs under `record`, every native kernel that it calls is added to a program instead of
being run, and torch only allocates and makes views. The tensors in between are placed in one block
of memory, the arena, where those that are not needed at the same time share their place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
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


class KernelList:
    """Kernels with their arguments, and what the host does between them.

    Args:
        names: of the kernels, in order.
        starts: where each one's arguments begin in `arguments`, in bytes.
        arguments: of all of them; may be changed between replays.
        pauses: between them, in order.
    """

    def __init__(
        self,
        names: Sequence[str],
        starts: Sequence[int],
        arguments: np.ndarray,
        pauses: Sequence[Pause] = (),
    ) -> None:
        self._names = names
        self._arguments = arguments
        steps = self._steps = np.empty((len(names), 2), dtype=np.uint64)
        steps[:, 0] = [address(name) for name in names]
        steps[:, 1] = arguments.ctypes.data + np.array(starts, dtype=np.uint64)
        self._failed = np.zeros(1, dtype=np.int64)
        first, failed = steps.ctypes.data, self._failed.ctypes.data
        begins = [0, *(pause.at for pause in pauses)]
        ends = [*begins[1:], len(names)]
        actions = [*(pause.action for pause in pauses), None]
        self._parts: list[_Part] = [
            (begin, (first + begin * steps.strides[0], failed, end - begin), action)
            for begin, end, action in zip(begins, ends, actions, strict=True)
        ]
        self._run = kernel("run_program")

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


class Program(KernelList):
    """Kernels with arguments that stay, and what the host does between them.

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
        self._kept = tuple(kept)
        moving = [*passing, *(tensor for pause in pauses for tensor in pause.tensors)]
        places, size = _plan(calls, _storages(self._kept), _storages(moving))
        self._arena = arena.reserve(size)
        for tensor in moving:
            _move_tensor(tensor, places, self._arena)
        base = self._arena.data_ptr()
        moved = [_move(call, places, base) for call in calls]
        starts = [0, *accumulate(len(block) for block in moved)][: len(moved)]
        arguments = np.frombuffer(b"".join(moved), dtype=np.uint8).copy()
        super().__init__([call.kernel for call in calls], starts, arguments, pauses)


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
    lives: dict[int, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    for i, call in enumerate(calls):
        for place in call.places:
            if place is None or place.storage in kept:
                continue
            first, _ = lives.get(place.storage, (i, i))
            lives[place.storage] = first, len(calls) - 1 if place.storage in passing else i
            sizes[place.storage] = place.num_bytes
    return plan(lives, sizes)


def plan(
    lives: Mapping[int, tuple[int, int]], sizes: Mapping[int, int]
) -> tuple[dict[int, int], int]:
    """Offsets of pieces of memory of which those share a place that are not needed at once, and the
    size of all.

    Args:
        lives: of each piece, the first and the last call that needs it.
        sizes: in bytes.
    """
    starting: dict[int, list[int]] = {}
    ending: dict[int, list[int]] = {}
    for piece, (first, last) in lives.items():
        starting.setdefault(first, []).append(piece)
        ending.setdefault(last, []).append(piece)
    free = _FreeList()
    offsets: dict[int, int] = {}
    room = {piece: -(-size // _ALIGNMENT) * _ALIGNMENT for piece, size in sizes.items()}
    for i in sorted({*starting, *ending}):
        for piece in starting.get(i, ()):
            offsets[piece] = free.take(room[piece])
        for piece in ending.get(i, ()):
            free.give(offsets[piece], room[piece])
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
