"""The block tables of running sequences, on host and device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from atom.batch import ScheduledSequence
from atom.graphs.staging import StagingBuffer

# Wider than needed, so that few steps are recorded.
_LEAST_WIDTH = 64


class BlockTables:
    """One block table per row, on the device and mirrored on the host.

    A running sequence has one row, and each step appends only its new block ids. Entries beyond a
    table's end are stale; the blocks they name are not attended to.

    Attributes:
        on_device: [num_rows, width] int32.

    Args:
        width: blocks of the longest context, and of padding behind it.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.on_device = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._on_host = np.zeros((num_rows, width), dtype=np.int64)
        self._grown: tuple[np.ndarray, np.ndarray] | None = None
        self._update: tuple[torch.Tensor, torch.Tensor] | None = None

    def grow(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Append the new block ids; on the device only after `stage` and `update`."""
        self._grown = None
        grown = [s for s in sequences if s.new_block_ids]
        if not grown:
            return
        width = self._on_host.shape[1]
        sizes = np.array([len(s.new_block_ids) for s in grown])
        starts = np.array([s.row * width + s.num_blocks for s in grown]) - sizes
        ids = np.array([id for s in grown for id in s.new_block_ids], dtype=np.int32)
        # All ranges start ... start + size - 1, one behind the other.
        offsets = np.cumsum(sizes) - sizes
        places = np.arange(sizes.sum()) + np.repeat(starts - offsets, sizes)
        self._on_host.reshape(-1)[places] = ids
        self._grown = places, ids

    @property
    def have_grown(self) -> bool:
        """Whether the last `grow` appended anything."""
        return self._grown is not None

    def stage(self, staging: StagingBuffer) -> None:
        """Copy the appended ids to the device."""
        self._update = None
        if self._grown is not None:
            places, ids = self._grown
            self._update = staging.put(places), staging.put(ids, torch.int32)

    def update(self) -> None:
        """Write the appended ids to the device tables, after `staging.send`."""
        if self._update is not None:
            self.on_device.view(-1).index_copy_(0, *self._update)

    def slots_at(self, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
        """[n] int64, the slots of (row, position) pairs in the KV cache."""
        indices, places = np.divmod(positions, block_size)
        slots: np.ndarray = self._on_host[rows, indices] * block_size + places
        return slots


class StepTables:
    """Copies of the rows of a step's sequences, anew in each step.

    Attributes:
        in_place: whether they are at the same addresses in each step.
    """

    in_place = False

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables

    def select(self, sequences: Sequence[ScheduledSequence], rows: torch.Tensor) -> torch.Tensor:
        """The sequences' block tables [B, width], after the tables' `update`.

        Args:
            rows: [B], the sequences' rows.
        """
        width = max([s.num_blocks for s in sequences])
        return self._tables.on_device[:, :width].index_select(0, rows)


class GraphTables(StepTables):
    """Where graphs gather the block tables of their sequences themselves.

    Attributes:
        on_device: [most sequences, width] int32.
    """

    def __init__(self, tables: BlockTables, num_sequences: int, width: int) -> None:
        super().__init__(tables)
        self.on_device = tables.on_device.new_zeros(num_sequences, width)

    def select(self, sequences: Sequence[ScheduledSequence], rows: torch.Tensor) -> torch.Tensor:
        return self.on_device[: len(sequences)]


class StepTablesInPlace(StepTables):
    """The same where the programs of recorded steps find them.

    Those of as many sequences with as wide tables are the same tensor, which is filled only if it
    does not hold what is wanted already.
    """

    in_place = True

    def __init__(self, tables: BlockTables) -> None:
        super().__init__(tables)
        self._memory = torch.zeros_like(tables.on_device).view(-1)
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        # Width and rows of what the memory holds.
        self._held: tuple[int, ...] = ()

    def select(self, sequences: Sequence[ScheduledSequence], rows: torch.Tensor) -> torch.Tensor:
        longest = max([s.num_blocks for s in sequences])
        most = self._tables.on_device.shape[1]
        width = min(max(_LEAST_WIDTH, 1 << (longest - 1).bit_length()), most)
        shape = len(sequences), width
        if (view := self._views.get(shape)) is None:
            view = self._views[shape] = self._memory[: shape[0] * width].view(shape)
        wanted = width, *[s.row for s in sequences]
        if self._tables.have_grown or wanted != self._held:
            torch.index_select(self._tables.on_device[:, :width], 0, rows, out=view)
            self._held = wanted
        return view
