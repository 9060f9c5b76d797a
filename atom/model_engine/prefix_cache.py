"""Which sequences may share computed blocks: the pool's hashes, seen from a sequence."""

from __future__ import annotations

from atom.model_engine.block_pool import BlockHash, BlockPool
from atom.model_engine.sequence import Sequence


class PrefixCache:
    """Finds and offers the blocks of sequences.

    Args:
        kv_depends_on_successor: whether some KV at a position depends on the token after it, so
            that a block is only the same where the next token is.
    """

    def __init__(self, pool: BlockPool, kv_depends_on_successor: bool) -> None:
        self._pool = pool
        self._overlap = int(kv_depends_on_successor)

    def serves(self, seq: Sequence) -> bool:
        """Whether cached blocks may stand in for computing: prompt logprobs need every row."""
        return self._pool.enable_prefix_caching and seq.prompt_logprobs is None

    def match(self, seq: Sequence) -> list[int]:
        """Take the cached blocks at the start of a sequence, leaving a token to compute."""
        if not self.serves(seq):
            return []
        return self._pool.match_prefix(self._hashes(seq, len(seq.token_ids) - 1))

    def publish(self, seq: Sequence) -> None:
        """Offer the blocks whose tokens are all computed to other sequences."""
        if not self._pool.enable_prefix_caching:
            return
        if seq.num_computed // self._pool.block_size == seq.num_published:
            return
        hashes = self._hashes(seq, seq.num_computed)
        for index in range(seq.num_published, len(hashes)):
            self._pool.publish(seq.block_ids[index], hashes[index])
        seq.num_published = len(hashes)

    def _hashes(self, seq: Sequence, num_tokens: int) -> list[BlockHash]:
        """Hashes of the full blocks of the first `num_tokens` tokens, which are not the last."""
        size = self._pool.block_size
        return seq.block_hashes(num_tokens // size, size, self._overlap)
