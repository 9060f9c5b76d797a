"""Blocks of models some of whose layers have a sliding window and a pool of their own.

A sequence holds the parts of its blocks that its window reaches: they are given when their tokens
are scheduled, and taken back when no later query sees them. That is told by computed tokens alone,
so a rejected draft, whose place is computed again, needs none that are gone.
"""

from __future__ import annotations

from atom.batch import Lookahead
from atom.kv_cache.cache_window import CacheWindow
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.scheduling.kv_cache_manager import KVCacheManager
from atom.model_engine.scheduling.prefix_cache import PrefixCache
from atom.model_engine.scheduling.window_pool import WindowPool
from atom.model_engine.sequence import Sequence


class WindowedPrefixCache(PrefixCache):
    """A prefix of cached blocks counts only if those that its window reaches have their parts."""

    def __init__(
        self,
        pool: BlockPool,
        kv_depends_on_successor: bool,
        windows: WindowPool,
        window: CacheWindow,
    ) -> None:
        super().__init__(pool, kv_depends_on_successor)
        self._windows = windows
        self._window = window

    def match(self, seq: Sequence) -> list[int]:
        if not self.serves(seq):
            return []
        found = self._pool.find_prefix(self._hashes(seq, len(seq.token_ids) - 1))
        count, last_gap = 0, -1
        for end in range(1, len(found) + 1):
            if not self._windows.has(found[end - 1]):
                last_gap = end - 1
            if last_gap < self._first_block(end * self._pool.block_size):
                count = end
        del found[count:]
        self._pool.hold(found)
        seq.windowed = range(min(self._first_block(count * self._pool.block_size), count), count)
        self._windows.hold(found[seq.windowed.start :])
        return found

    def give_back(self, seq: Sequence, block_ids: list[int]) -> None:
        self._windows.release(block_ids[seq.windowed.start :])
        seq.windowed = range(0)
        super().give_back(seq, block_ids)

    def publish(self, seq: Sequence) -> None:
        """Publish the blocks whose tokens are all computed, then take back those behind the window.

        Of two equal blocks the one with its part stays in the cache.
        """
        is_new = seq.num_computed // self._pool.block_size > seq.num_published
        if self._pool.enable_prefix_caching and is_new:
            for block_hash in self._hashes(seq, seq.num_computed)[seq.num_published :]:
                found = self._pool.find_prefix([block_hash])
                if found and not self._windows.has(found[0]):
                    self._pool.forget(block_hash)
        super().publish(seq)
        held = seq.windowed
        first = min(self._first_block(seq.num_computed), held.stop)
        if first > held.start:
            self._windows.release(seq.block_ids[held.start : first])
            seq.windowed = range(first, held.stop)

    def _first_block(self, position: int) -> int:
        return self._window.first_block(position)


class WindowedKVCacheManager(KVCacheManager):
    """Gives the parts of blocks, too: those of the tokens that a step computes."""

    def __init__(
        self,
        pool: BlockPool,
        prefixes: WindowedPrefixCache,
        num_rows: int,
        lookahead: Lookahead,
        windows: WindowPool,
    ) -> None:
        super().__init__(pool, prefixes, num_rows, lookahead)
        self._windows = windows

    def allocate(self, seq: Sequence, budget: int, *, min_tokens: int, reserve_blocks: int) -> int:
        count = super().allocate(seq, budget, min_tokens=min_tokens, reserve_blocks=reserve_blocks)
        if count:
            self._attach(seq, self._missing(seq, seq.num_computed + count))
        return count

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        missing = self._missing(seq, num_tokens)
        if missing > self._windows.num_free or not super().grow(seq, num_tokens):
            return False
        self._attach(seq, missing)
        return True

    def free(self, seq: Sequence) -> None:
        held, seq.windowed, seq.new_windows = seq.windowed, range(0), None
        self._windows.release(seq.block_ids[held.start : held.stop])
        super().free(seq)

    def _has_room(self, seq: Sequence, num_tokens: int, reserve_blocks: int) -> bool:
        return self._missing(seq, num_tokens) + reserve_blocks <= self._windows.num_free

    def _missing(self, seq: Sequence, num_tokens: int) -> int:
        """Parts that it takes to compute the first `num_tokens`."""
        return -(-num_tokens // self._pool.block_size) - seq.windowed.stop

    def _attach(self, seq: Sequence, count: int) -> None:
        if count <= 0:
            return
        held = seq.windowed
        attached = self._windows.attach(seq.block_ids[held.stop : held.stop + count])
        seq.windowed = range(held.start, held.stop + count)
        # With those of a plan that came to nothing.
        seq.new_windows = (seq.new_windows or {}) | attached
