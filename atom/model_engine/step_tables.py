"""The block tables of steps that are recorded, where their programs find them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom.batch import ScheduledSequence
from atom.kv_cache.block_tables import BlockTables

# Wider than needed, so that few steps are recorded.
_LEAST_WIDTH = 64


class StepTables:
    """Copies of rows of block tables.

    Those of as many sequences with as wide tables are the same tensor, which is filled only if it
    does not hold what is wanted already.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._memory = torch.zeros_like(tables.on_device).view(-1)
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        # Width and rows of what the memory holds.
        self._held: tuple[int, ...] = ()

    def select(self, sequences: Sequence[ScheduledSequence], rows: torch.Tensor) -> torch.Tensor:
        """The sequences' block tables [B, width], after the tables' `update`.

        Args:
            rows: [B], the sequences' rows.
        """
        longest = max([s.num_blocks for s in sequences])
        most = self._tables.on_device.shape[1]
        width = min(max(_LEAST_WIDTH, 1 << (longest - 1).bit_length()), most)
        view = self._view(len(sequences), width)
        wanted = width, *[s.row for s in sequences]
        if self._tables.have_grown or wanted != self._held:
            torch.index_select(self._tables.on_device[:, :width], 0, rows, out=view)
            self._held = wanted
        return view

    def _view(self, count: int, width: int) -> torch.Tensor:
        shape = count, width
        if shape not in self._views:
            self._views[shape] = self._memory[: count * width].view(shape)
        return self._views[shape]
