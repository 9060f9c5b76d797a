"""Gives running sequences their KV blocks, and a row in the runner's tables."""

from __future__ import annotations

from atom.batch import Lookahead
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.scheduling.prefix_cache import PrefixCache
from atom.model_engine.sequence import Sequence


class KVCacheManager:
    """Gives rows and blocks to sequences, and takes them back.

    Args:
        prefixes: finds the blocks of a sequence that are in the pool already.
        num_rows: of the runner's tables.
        lookahead: says how many slots are reserved behind a sequence's tokens.
    """

    def __init__(
        self, pool: BlockPool, prefixes: PrefixCache, num_rows: int, lookahead: Lookahead
    ) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self._num_reserved = lookahead.num_reserved
        self._free_rows = list(reversed(range(num_rows)))
        # Rows that the runner must clear before the next step.
        self._freed_rows: list[int] = []

    def allocate(self, seq: Sequence, budget: int, *, min_tokens: int, reserve_blocks: int) -> int:
        """Give a sequence a row, and blocks for all its known tokens, so that its prefill cannot
        run out of them.

        Args:
            budget: most tokens to compute now.
            min_tokens: tokens that it must have then, those found in the pool included.
            reserve_blocks: blocks that must stay free.

        Returns:
            The number of its tokens to compute now; 0, with nothing given, when it has to wait.
        """
        if not self._free_rows:
            return 0
        cached = self._prefixes.match(seq)
        start = len(cached) * self._pool.block_size
        count = min(len(seq.token_ids) - start, budget)
        missing = self._num_blocks(seq, len(seq.token_ids)) - len(cached)
        fits = start + count >= min_tokens and missing + reserve_blocks <= self._pool.num_free
        if not fits or not self._has_room(seq, start + count, reserve_blocks):
            self._prefixes.give_back(seq, cached)
            return 0
        block_ids = self._pool.allocate(missing)
        assert block_ids is not None
        seq.row = self._free_rows.pop()
        seq.block_ids = cached + block_ids
        seq.num_computed = start
        seq.num_published = len(cached)
        return count

    def _has_room(self, seq: Sequence, num_tokens: int, reserve_blocks: int) -> bool:
        """Whether what else a sequence needs to compute its first `num_tokens` is free."""
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give blocks for `num_tokens` and what is reserved behind them; false, with nothing given,
        when there are too few.
        """
        held = len(seq.block_ids)
        if held * self._pool.block_size >= num_tokens + self._num_reserved:
            return True
        missing = self._num_blocks(seq, num_tokens) - held
        if missing <= 0:
            return True
        block_ids = self._pool.allocate(missing)
        if block_ids is None:
            return False
        seq.block_ids += block_ids
        return True

    def free(self, seq: Sequence) -> None:
        """Take back what a sequence holds, which no launched step computes."""
        self._pool.free(seq.block_ids)
        seq.block_ids = []
        self._free_rows.append(seq.row)
        self._freed_rows.append(seq.row)

    def take_freed_rows(self) -> list[int]:
        """The rows that were freed since the last call."""
        freed, self._freed_rows = self._freed_rows, []
        return freed

    def return_freed_rows(self, rows: list[int]) -> None:
        """Rows that the runner may not have cleared: the step failed that told it."""
        self._freed_rows = [*rows, *self._freed_rows]

    def _num_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks for `num_tokens` and what is reserved behind them.

        At most what the whole sequence needs: its last token is never computed.
        """
        num_slots = min(num_tokens + self._num_reserved, seq.max_num_tokens - 1)
        return -(-num_slots // self._pool.block_size)
