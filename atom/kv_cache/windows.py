"""Blocks for layers with a sliding window: a pool of their own, which has only what windows see.

Block tables name blocks of the pool of all other layers. A map says which block of its own pool a
layer with a window has in the place of each; of blocks behind the window it says anything, since
nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from atom.batch import ScheduledSequence
from atom.graphs.staging import StagingBuffer
from atom.kv_cache.block_tables import BlockTables
from atom.kv_cache.cache_window import CacheWindow
from atom.model_ops.attention.metadata import ModelInput, ModelOutput

# The op `window_places`.
WindowPlaces = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]
]


class WindowMap:
    """Which block layers with a window have for each block of the pool.

    Attributes:
        window: of these layers.
        of_block: [blocks of the pool] int32, on the device.
    """

    def __init__(self, window: CacheWindow, device: torch.device) -> None:
        self.window = window
        self.of_block = torch.zeros(1, dtype=torch.int32, device=device)

    def allocate(self, num_blocks: int) -> None:
        """For a pool of so many blocks."""
        self.of_block = self.of_block.new_zeros(num_blocks)


class WindowedBlockTables(BlockTables):
    """Block tables that also bring the map to the device."""

    def __init__(self, num_rows: int, width: int, windows: WindowMap) -> None:
        super().__init__(num_rows, width, windows.of_block.device)
        self._windows = windows
        self._moved: dict[int, int] = {}
        self._change: tuple[torch.Tensor, torch.Tensor] | None = None

    def grow(self, sequences: Sequence[ScheduledSequence]) -> None:
        super().grow(sequences)
        self._moved = {}
        for sequence in sequences:
            if sequence.new_windows is not None:
                self._moved |= sequence.new_windows

    def stage(self, staging: StagingBuffer) -> None:
        super().stage(staging)
        self._change = None
        if self._moved:
            blocks = np.array(list(self._moved), dtype=np.int64)
            own = np.array(list(self._moved.values()), dtype=np.int32)
            self._change = staging.put(blocks), staging.put(own, torch.int32)

    def update(self) -> None:
        super().update()
        if self._change is not None:
            self._windows.of_block.index_copy_(0, *self._change)


class WindowedForward:
    """A model's layers, those with a window in the blocks that the map names."""

    def __init__(
        self,
        forward: Callable[[ModelInput], ModelOutput],
        windows: WindowMap,
        places: WindowPlaces,
    ) -> None:
        self._forward = forward
        self._windows = windows
        self._places = places

    def __call__(self, model_input: ModelInput) -> ModelOutput:
        attention = model_input.attention
        tables, slots = self._places(
            self._windows.of_block,
            attention.block_tables,
            attention.slot_mapping,
            self._windows.window.block_size,
        )
        windowed = replace(attention, block_tables=tables, slot_mapping=slots)
        attention = replace(attention, windowed=windowed)
        return self._forward(replace(model_input, attention=attention))
