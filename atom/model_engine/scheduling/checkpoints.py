"""Prefix caching for models with recurrent states.

Blocks bring back the KV of a prefix, but no state. So the state behind a chunk of a prompt is kept
in a slot (`StatePool`), found by the hash of the block that ends there, and a prefix of cached
blocks counts only as far as the last such slot. Chunks are cut to end where a state is worth
keeping: at a prompt's last whole block, which its continuation will have, and where blocks were
found without a state, which prompts evidently share.
"""

from __future__ import annotations

from collections import OrderedDict

from atom.batch import Lookahead
from atom.model_engine.block_pool import BlockHash, BlockPool
from atom.model_engine.scheduling.kv_cache_manager import KVCacheManager
from atom.model_engine.scheduling.prefix_cache import PrefixCache
from atom.model_engine.sequence import Sequence

# Tokens that a state must save to be worth a chunk of its own.
LEAST_TOKENS = 64


class Checkpoints:
    """Which slot has the state behind which block.

    A slot is free, reserved for a chunk that is not computed yet, or published. Published ones give
    way to new ones, the least recently used first. A sequence reads a slot in the step that starts
    it, so nobody has to hold one.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._published: OrderedDict[BlockHash, int] = OrderedDict()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._published

    def find(self, block_hash: BlockHash) -> int:
        """The slot of a published state, which is used now."""
        self._published.move_to_end(block_hash)
        return self._published[block_hash]

    def reserve(self) -> int | None:
        """A slot to write to; None when all are reserved."""
        if self._free:
            return self._free.pop()
        return self._published.popitem(last=False)[1] if self._published else None

    def publish(self, block_hash: BlockHash, slot: int) -> None:
        """A reserved slot has the state behind this block; an earlier one of the same stays."""
        if block_hash in self._published:
            self._free.append(slot)
        else:
            self._published[block_hash] = slot

    def release(self, slot: int) -> None:
        """A reserved slot will not be written, or what was written is of no use."""
        self._free.append(slot)

    @property
    def num_reserved(self) -> int:
        """Slots that are neither free nor published."""
        return self._num_slots - len(self._free) - len(self._published)


class StatefulPrefixCache(PrefixCache):
    """A prefix of cached blocks counts only as far as a state was kept."""

    def __init__(
        self, pool: BlockPool, kv_depends_on_successor: bool, checkpoints: Checkpoints
    ) -> None:
        super().__init__(pool, kv_depends_on_successor)
        self._checkpoints = checkpoints

    def match(self, seq: Sequence) -> list[int]:
        if not self.serves(seq):
            return []
        hashes = self._hashes(seq, len(seq.token_ids) - 1)
        found = self._pool.find_prefix(hashes)
        seq.shared_tokens = len(found) * self._pool.block_size
        while found and hashes[len(found) - 1] not in self._checkpoints:
            found.pop()
        self._pool.hold(found)
        if found:
            seq.load_state = self._checkpoints.find(hashes[len(found) - 1])
        return found

    def give_back(self, seq: Sequence, block_ids: list[int]) -> None:
        seq.load_state = None
        super().give_back(seq, block_ids)

    def publish(self, seq: Sequence) -> None:
        """Publish also the states behind the blocks, where they were kept."""
        super().publish(seq)
        for end in [end for end in seq.kept_states if end <= seq.num_computed]:
            block_hash = self._hashes(seq, end)[-1]
            self._checkpoints.publish(block_hash, seq.kept_states.pop(end))

    def reserve(self, seq: Sequence) -> None:
        """Choose where chunks of a sequence that starts will end to keep its state."""
        if not self.serves(seq):
            return
        size, start = self._pool.block_size, seq.num_computed
        last = (len(seq.token_ids) - 1) // size * size
        for end in sorted({seq.shared_tokens, last}):
            if end - start < LEAST_TOKENS:
                continue
            slot = self._checkpoints.reserve()
            if slot is not None:
                seq.states_to_keep[end] = slot
                start = end

    def release(self, seq: Sequence) -> None:
        """A sequence ends, or will start again."""
        for slot in (*seq.states_to_keep.values(), *seq.kept_states.values()):
            self._checkpoints.release(slot)
        seq.states_to_keep, seq.kept_states, seq.load_state = {}, {}, None


class StatefulKVCacheManager(KVCacheManager):
    """Cuts the chunks of prompts to end where states are kept."""

    def __init__(
        self, pool: BlockPool, prefixes: StatefulPrefixCache, num_rows: int, lookahead: Lookahead
    ) -> None:
        super().__init__(pool, prefixes, num_rows, lookahead)
        self._states = prefixes

    def allocate(self, seq: Sequence, budget: int, *, min_tokens: int, reserve_blocks: int) -> int:
        count = super().allocate(seq, budget, min_tokens=min_tokens, reserve_blocks=reserve_blocks)
        if count:
            self._states.reserve(seq)
            count = seq.cut_for_states(count)
        return count

    def free(self, seq: Sequence) -> None:
        self._states.release(seq)
        super().free(seq)
