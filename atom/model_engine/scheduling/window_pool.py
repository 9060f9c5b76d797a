"""The blocks of layers with a sliding window: each stands for a block of the pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from atom.model_engine.block_pool import BlockPool, check_that


class WindowPool:
    """Gives blocks of the pool a part for layers with a window, and takes it back.

    A part is held by the sequences in whose window it lies, and there are fewer parts than blocks.
    One that nobody holds stays with its block, so that a prefix may end behind it, until another
    block needs it: those of blocks that are not in the prefix cache go first, then the least
    recently used.

    Attributes:
        num_blocks: parts that there are.

    Args:
        pool: whose blocks they stand for.
    """

    def __init__(self, num_blocks: int, pool: BlockPool) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        # Of each block its part, and of each part its block; -1 for none.
        self._part_of = [-1] * pool.num_blocks
        self._block_of = [-1] * num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Parts that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def has(self, block_id: int) -> bool:
        """Whether layers with a window have the block, too."""
        return self._part_of[block_id] >= 0

    def ref_count(self, block_id: int) -> int:
        """The number of sequences that hold the block's part."""
        part = self._part_of[block_id]
        return 0 if part < 0 else self._ref_counts[part]

    def attach(self, block_ids: Sequence[int]) -> dict[int, int]:
        """Give new blocks, of which only the caller knows, a part that it holds; so many must be
        free.

        Returns:
            The part of each.
        """
        attached = {}
        for block_id in block_ids:
            part = self._part_of[block_id]
            if part >= 0:  # of what the block was before
                del self._free[part]
            else:
                part, _ = self._free.popitem(last=False)
                if (owner := self._block_of[part]) >= 0:
                    self._part_of[owner] = -1
                self._part_of[block_id], self._block_of[part] = part, block_id
            self._ref_counts[part] = 1
            attached[block_id] = part
        return attached

    def hold(self, block_ids: Sequence[int]) -> None:
        """Hold the parts of these blocks, too; they must have some."""
        for block_id in block_ids:
            part = self._part_of[block_id]
            if self._ref_counts[part] == 0:
                del self._free[part]
            self._ref_counts[part] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Hold the parts of these blocks no longer.

        Raises:
            RuntimeError: when one is not held.
        """
        for block_id in reversed(block_ids):
            part = self._part_of[block_id]
            if part < 0 or self._ref_counts[part] == 0:
                raise RuntimeError(f"the part of block {block_id} was freed, but nobody holds it")
            self._ref_counts[part] -= 1
            if self._ref_counts[part] == 0:
                self._free[part] = None
                if not self._pool.is_cached(block_id):
                    self._free.move_to_end(part, last=False)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Check the state against the blocks of whose parts each live sequence holds one.

        Raises:
            AssertionError: saying what is inconsistent.
        """
        parts = {(b, p) for b, p in enumerate(self._part_of) if p >= 0}
        blocks = {(b, p) for p, b in enumerate(self._block_of) if b >= 0}
        check_that(parts == blocks, f"blocks name parts {parts - blocks}, parts {blocks - parts}")
        counts = [0] * self.num_blocks
        for block_ids in held:
            for block_id in block_ids:
                check_that(self.has(block_id), f"block {block_id} is held, and has no part")
                counts[self._part_of[block_id]] += 1
        check_that(counts == self._ref_counts, f"held {counts}, counted {self._ref_counts}")
        unheld = {part for part, count in enumerate(counts) if count == 0}
        check_that(
            unheld == set(self._free),
            f"parts {unheld ^ set(self._free)} are either free and held, or neither",
        )
