"""Programs of work on any number of rows.

The numbers among the arguments of the kernels that such work calls, the sizes of what it allocates
and the shapes of its results are constant, or grow evenly with the rows: two recordings say how,
and others check it. Between the fewest and the most rows of recordings that agree, all work is
taken to call the same kernels: a choice between them that depends on the rows changes once, at a
number of rows, and then the recordings on its two sides do not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

import numpy as np
import torch

from atom.model_ops.kernels.native.bindings import listening
from atom.model_ops.kernels.native.program import Arena, KernelList, plan
from atom.model_ops.kernels.native.recorder import Call, NotRecordableError, Recorder

_WORD_BYTES = 8
# Recordings that agree before work on other numbers of rows follows from them.
_ENOUGH = 3


@dataclass(frozen=True, eq=False)
class Trace:
    """What work on so many rows calls.

    Attributes:
        rows: their number.
        num_inputs: of the work.
        kernels: their names, in order.
        starts: of each kernel's arguments, in words.
        owners: [n] of each argument, which memory its number is an offset in, in bytes: 0 is none,
            the inputs follow, and then what was allocated.
        lives: of what was allocated and a kernel takes, by owner, the first and the last kernel.
        results: owner, type and number of dimensions of each; an empty one may have no owner.
        num_allocated: pieces of memory.
        numbers: [n + m] int64: the arguments, the sizes of what was allocated in bytes, and for
            each result, in elements, its offset, its shape and its strides.
    """

    rows: int
    num_inputs: int
    kernels: tuple[str, ...]
    starts: list[int]
    owners: np.ndarray
    lives: dict[int, tuple[int, int]]
    results: tuple[tuple[int, torch.dtype, int], ...]
    num_allocated: int
    numbers: np.ndarray

    @property
    def structure(self) -> Hashable:
        """What the number of rows does not change while the kernels are the same."""
        owners = self.num_inputs, self.num_allocated, self.owners.tobytes()
        return self.kernels, *owners, self.results

    @property
    def sizes(self) -> slice:
        """Of `numbers`, those of what was allocated."""
        return slice(len(self.owners), len(self.owners) + self.num_allocated)


def trace(
    work: Callable[[], Sequence[torch.Tensor]], rows: int, inputs: Sequence[torch.Tensor]
) -> Trace:
    """The kernels that `work` on so many rows calls, none of which runs.

    Args:
        work: returns its results, which it allocates.
        inputs: the tensors that it reads and that are not the same in every call.

    Raises:
        NotRecordableError: when it does what no such program can hold.
    """
    recorder = Recorder()
    listening.listener = recorder
    try:
        with recorder:
            results = work()
    finally:
        listening.listener = None
    if recorder.pauses:
        raise NotRecordableError("what the host does between kernels is in no program of any rows")
    allocated = recorder.allocated
    memory = [(t.data_ptr(), t.numel() * t.element_size()) for t in inputs]
    memory += [(place.storage, place.num_bytes) for place in allocated]
    starts = [0, *accumulate(len(call.block) // _WORD_BYTES for call in recorder.calls)]
    arguments = np.frombuffer(b"".join(c.block for c in recorder.calls), dtype=np.int64)
    owners, offsets = _owned(arguments, _are_pointers(recorder.calls, starts), memory)
    first_own = 1 + len(inputs)
    owner_of = {place.storage: first_own + i for i, place in enumerate(allocated)}
    described: list[tuple[int, torch.dtype, int]] = []
    geometry: list[int] = []
    for tensor in results:
        owner = owner_of.get(tensor.untyped_storage().data_ptr(), 0)
        if owner == 0 and tensor.numel():
            raise NotRecordableError("a result that was there before is in no program of any rows")
        described.append((owner, tensor.dtype, tensor.dim()))
        geometry += [int(tensor.storage_offset()), *tensor.shape, *tensor.stride()]
    kernels = tuple(call.kernel for call in recorder.calls)
    sizes = [place.num_bytes for place in allocated]
    return Trace(
        rows,
        len(inputs),
        kernels,
        starts[:-1],
        owners,
        _lives(owners, starts, first_own),
        tuple(described),
        len(sizes),
        np.concatenate([offsets, np.array([*sizes, *geometry], dtype=np.int64)]),
    )


def _are_pointers(calls: Sequence[Call], starts: Sequence[int]) -> np.ndarray:
    """[n] bool, which arguments are: the first of each kernel."""
    marks = np.zeros(starts[-1], dtype=bool)
    for call, start in zip(calls, starts, strict=False):
        marks[start : start + len(call.places)] = True
    return marks


def _owned(
    arguments: np.ndarray, are_pointers: np.ndarray, memory: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """[n] each: `Trace.owners`, and the arguments as offsets.

    Args:
        memory: the address and the size of what owners 1, 2, ... have.
    """
    addresses, sizes = np.array([(0, 0), *memory], dtype=np.int64).T
    order = np.argsort(addresses, kind="stable")
    places = order[np.searchsorted(addresses[order], arguments, side="right") - 1]
    is_inside = are_pointers & (arguments < (addresses + sizes)[places])
    owners = np.where(is_inside, places, 0)
    return owners, arguments - addresses[owners]


def _lives(owners: np.ndarray, starts: Sequence[int], first_own: int) -> dict[int, tuple[int, int]]:
    calls = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    lives: dict[int, tuple[int, int]] = {}
    for i in np.flatnonzero(owners >= first_own):
        call, owner = int(calls[i]), int(owners[i])
        lives[owner] = lives.get(owner, (call, call))[0], call
    return lives


class DynamicProgram:
    """Work on as many rows as its recordings have, or on any number between them.

    What it reads and writes beside its inputs must outlive it.

    Args:
        first: a recording.
        arena: where it has what it needs while it runs.
    """

    def __init__(self, first: Trace, arena: Arena) -> None:
        self._first = first
        self._known = {first.rows}
        self._arena = arena
        self._base, self._slope = first.numbers, np.zeros_like(first.numbers)
        self._are_enough = False
        self._arguments = np.zeros(len(first.owners), dtype=np.int64)
        starts = [start * _WORD_BYTES for start in first.starts]
        self._kernels = KernelList(first.kernels, starts, self._arguments)
        self._results = [owner for owner, *_ in first.results]
        self._own = {o: life for o, life in first.lives.items() if o not in self._results}
        self._place(first.rows)

    def holds(self, rows: int) -> bool:
        """Whether it can run on so many."""
        known = self._known
        return rows in known or (self._are_enough and min(known) < rows < max(known))

    def add(self, more: Trace) -> bool:
        """Take another recording; False if it disagrees with those that are known."""
        first, base, slope = self._first, self._base, self._slope
        if more.structure != first.structure:
            return False
        if len(self._known) == 1:
            # Rounded down: what does not grow evenly disagrees.
            slope = (more.numbers - first.numbers) // (more.rows - first.rows)
            base = first.numbers - slope * first.rows
        is_even = np.array_equal(base + slope * more.rows, more.numbers)
        # What needs less memory for more rows would find too little.
        if not is_even or (slope[first.sizes] < 0).any():
            return False
        self._base, self._slope = base, slope
        if more.rows > self._room:
            # For more rows, too, so that few recordings make it be done again.
            self._place(1 << (more.rows - 1).bit_length())
        self._known.add(more.rows)
        # Where they all are multiples, more or less a remainder, of the same number, a size that is
        # rounded up to one looks even.
        apart = gcd(*(rows - first.rows for rows in self._known))
        self._are_enough = len(self._known) >= _ENOUGH and apart == 1
        return True

    def run(self, rows: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results in memory of their own.

        Args:
            rows: as many as it `holds`.

        Raises:
            IndexError: when a kernel meets an index that is out of range.
        """
        first, first_own = self._first, 1 + len(inputs)
        numbers = self._base + self._slope * rows
        sizes = numbers[first.sizes]
        block, addresses = self._arena.reserve(self._size), self._offsets.copy()
        addresses[self._placed] += block.data_ptr()
        addresses[1:first_own] = [t.data_ptr() for t in inputs]
        memory = {0: _allocate(0)}
        for owner in self._results:
            if owner not in memory:
                memory[owner] = _allocate(int(sizes[owner - first_own]))
                addresses[owner] = memory[owner].data_ptr()
        np.add(numbers[: first.sizes.start], addresses[first.owners], out=self._arguments)
        self._kernels.replay()
        geometry = numbers[first.sizes.stop :].tolist()
        results = []
        for owner, dtype, dim in first.results:
            offset, shape = geometry[0], geometry[1 : 1 + dim]
            strides, geometry = geometry[1 + dim : 1 + 2 * dim], geometry[1 + 2 * dim :]
            results.append(torch.empty(0, dtype=dtype).set_(memory[owner], offset, shape, strides))
        return results

    def _place(self, rows: int) -> None:
        """Place what is allocated for as many rows."""
        first, first_own = self._first, 1 + self._first.num_inputs
        sizes = (self._base + self._slope * rows)[first.sizes].tolist()
        offsets, self._size = plan(self._own, {o: sizes[o - first_own] for o in self._own})
        self._room = rows
        self._placed = list(offsets)
        self._offsets = np.zeros(first_own + len(sizes), dtype=np.int64)
        self._offsets[self._placed] = list(offsets.values())


def _allocate(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
