"""Prefix caching for sequences, on top of the block pool's hashes."""

from __future__ import annotations

from atom.model_engine.block_pool import BlockHash, BlockPool, hash_block, root_hash
from atom.model_engine.sequence import Sequence


class PrefixCache:
    """Matches and publishes the blocks of sequences.

    Args:
        kv_depends_on_successor: whether the KV of a position may depend on the next token (in a
            draft's cache); block hashes then include the token after the block.
    """

    def __init__(self, pool: BlockPool, kv_depends_on_successor: bool) -> None:
        self._pool = pool
        self._overlap = int(kv_depends_on_successor)

    def serves(self, seq: Sequence) -> bool:
        """Whether cached blocks may be used; not with prompt logprobs, which need every row
        computed.
        """
        return self._pool.enable_prefix_caching and seq.prompt_logprobs is None

    def match(self, seq: Sequence) -> list[int]:
        """Take the cached blocks at the start of a sequence; at least one token is left to
        compute.
        """
        if not self.serves(seq):
            return []
        return self._pool.match_prefix(self._hashes(seq, len(seq.token_ids) - 1))

    def give_back(self, seq: Sequence, block_ids: list[int]) -> None:
        """Undo a `match` that returned these."""
        self._pool.free(block_ids)

    def publish(self, seq: Sequence) -> None:
        """Publish the blocks whose tokens are all computed."""
        if not self._pool.enable_prefix_caching:
            return
        if seq.num_computed // self._pool.block_size == seq.num_published:
            return
        hashes = self._hashes(seq, seq.num_computed)
        for index in range(seq.num_published, len(hashes)):
            self._pool.publish(seq.block_ids[index], hashes[index])
        seq.num_published = len(hashes)

    def check_integrity(self, seq: Sequence) -> None:
        """Check that what a sequence has published is computed, and found by its tokens alone.

        Raises:
            AssertionError: saying what is inconsistent.
        """
        size = self._pool.block_size
        if seq.num_published * size > seq.num_computed:
            raise AssertionError(
                f"{seq.request.id!r} has published {seq.num_published} blocks of {size} tokens and "
                f"computed {seq.num_computed} tokens"
            )
        parent = root_hash(seq.request.cache_salt)
        for index, block_id in enumerate(seq.block_ids[: seq.num_published]):
            start = index * size
            tokens = seq.token_ids[start : start + size + self._overlap]
            parent = hash_block(parent, tokens, start, seq.request.images)
            self._pool.check_published(block_id, parent)

    def _hashes(self, seq: Sequence, num_tokens: int) -> list[BlockHash]:
        """Hashes of the full blocks in the first `num_tokens` tokens, which must be followed by
        another.
        """
        size = self._pool.block_size
        return seq.block_hashes(num_tokens // size, size, self._overlap)
