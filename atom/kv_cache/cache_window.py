"""How much of a sequence layers with a sliding window keep."""

from __future__ import annotations

from dataclasses import dataclass

# `attention.metadata.MAX_DECODE_QUERIES`, which would bring torch.
_MAX_DECODE_QUERIES = 16
# A GPU's kernels start to read at a multiple of so many keys, or of a divisor of it.
_GPU_TILE = 128


@dataclass(frozen=True)
class CacheWindow:
    """What layers with a window keep of a sequence.

    Attributes:
        num_tokens: of the largest window.
        tile: keys are read from a multiple of it on.
        block_size: tokens of a block.
    """

    num_tokens: int
    tile: int
    block_size: int

    @classmethod
    def of(cls, num_tokens: int, block_size: int, *, on_gpu: bool) -> CacheWindow:
        return cls(num_tokens, _GPU_TILE if on_gpu else 1, block_size)

    def first_block(self, position: int) -> int:
        """The first block that queries at `position` and behind it read."""
        oldest = max(position - self.num_tokens + 1, 0)
        return oldest // self.tile * self.tile // self.block_size

    @property
    def per_sequence(self) -> int:
        """Most blocks of a sequence, but for those of a prompt's tokens that steps compute."""
        # Two steps' drafts; and blocks are cut at both ends.
        kept = self.num_tokens + self.tile + 2 * _MAX_DECODE_QUERIES
        return -(-kept // self.block_size) + 2
