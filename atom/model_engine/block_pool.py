"""KV cache blocks: reference counts, prefix cache lookup by hash, and eviction order."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NewType

from atom.messages import ImageInput

# SHA-256 over a block's tokens and everything before them that its KV depends on. A collision would
# give one request another request's KV, so no weaker hash is used.
BlockHash = NewType("BlockHash", bytes)


def root_hash(cache_salt: str) -> BlockHash:
    """The parent hash of a sequence's first block: whatever affects its KV besides the tokens.

    Anything else that changes all of a sequence's KV (a LoRA adapter) must be added here; images
    are part of the hashes of their blocks.
    """
    return BlockHash(hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest())


def hash_block(
    parent: BlockHash,
    token_ids: Sequence[int],
    start: int = 0,
    images: Sequence[ImageInput] = (),
) -> BlockHash:
    """The hash of one full block, chained to its parent block's hash (or `root_hash`).

    Args:
        token_ids: of the block, and those behind it that its KV depends on.
        start: position of the first of them.
        images: of the sequence; those count that any of these tokens stand for.
    """
    key = parent + array("q", token_ids).tobytes()
    stop = start + len(token_ids)
    for image in images:
        if image.start < stop and image.stop > start:
            key += image.digest + array("q", [image.start - start]).tobytes()
    return BlockHash(hashlib.sha256(key).digest())


class BlockPool:
    """Counts the references to every block and finds cached blocks by their hash.

    A block's life::

        blank, free --allocate--> blank, held --publish--> cached, held (match: one more holder)
             ^                     |    ^                    |      ^
             '----- last free -----'    |                last free  | match
                                        |                    v      |
                                        '-- allocate ---- cached, free
                                            (evicted)

    Unreferenced blocks are allocated in the order of `_free`: blank ones first, then cached
    ones, least recently used first; a cached block loses its hash when it is allocated.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs at least one block of one token, got {num_blocks} blocks of "
                f"{block_size} tokens"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks with no references, including cached ones, which can be evicted."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """The number of sequences that hold the block."""
        return self._ref_counts[block_id]

    def match_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Take a reference to each block of the longest cached prefix of `hashes`.

        The caller must `free` the returned blocks.
        """
        block_ids = self.find_prefix(hashes)
        self.hold(block_ids)
        return block_ids

    def find_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`; nobody holds them for that."""
        block_ids = []
        for block_hash in hashes:
            block_id = self._cached.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def hold(self, block_ids: Sequence[int]) -> None:
        """Take a reference to each of these cached blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def is_cached(self, block_id: int) -> bool:
        """Whether the block can be found by its hash."""
        return self._hashes[block_id] is not None

    def forget(self, block_hash: BlockHash) -> None:
        """Take a block out of the prefix cache; whoever holds it keeps it."""
        block_id = self._cached.pop(block_hash)
        self._hashes[block_id] = None
        if self._ref_counts[block_id] == 0:
            self._free.move_to_end(block_id, last=False)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each; None, with no change, if too few are free."""
        if count > len(self._free):
            return None
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            evicted = self._hashes[block_id]
            if evicted is not None:
                del self._cached[evicted]
                self._hashes[block_id] = None
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def publish(self, block_id: int, block_hash: BlockHash) -> None:
        """Add a held block to the prefix cache; only after the KV of all its tokens is computed.

        If the hash is cached already, the earlier block stays and this one remains uncached. No
        effect when prefix caching is off.

        Raises:
            RuntimeError: when the block is not held, or has another hash already.
        """
        if not self.enable_prefix_caching:
            return
        if self._ref_counts[block_id] == 0:
            raise RuntimeError(f"block {block_id} was published, but nobody holds it")
        if self._hashes[block_id] not in (None, block_hash):
            raise RuntimeError(f"block {block_id} was published with two different hashes")
        if self._cached.setdefault(block_hash, block_id) == block_id:
            self._hashes[block_id] = block_hash

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a block table.

        Blocks are freed from the last to the first, so the tail is evicted before the head: a
        prefix can only be matched from its first block on.

        Raises:
            RuntimeError: when a block is not held.
        """
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] == 0:
                raise RuntimeError(f"block {block_id} was freed, but nobody holds it")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def reset(self) -> bool:
        """Make every block blank; false, with nothing done, when somebody holds one."""
        if self.num_used:
            return False
        self._cached.clear()
        self._hashes = [None] * self.num_blocks
        return True

    def check_integrity(self) -> None:
        """Check the pool's internal state for consistency.

        Raises:
            AssertionError: saying what is inconsistent.
        """
        unheld = {b for b, count in enumerate(self._ref_counts) if count == 0}
        negative = [b for b, count in enumerate(self._ref_counts) if count < 0]
        check_that(not negative, f"blocks {negative} have negative reference counts")
        check_that(
            unheld == set(self._free),
            f"blocks {sorted(unheld ^ set(self._free))} are either free and held, or neither",
        )
        by_block = {b: h for b, h in enumerate(self._hashes) if h is not None}
        check_that(
            by_block == {b: h for h, b in self._cached.items()},
            f"{len(by_block)} blocks have a hash and {len(self._cached)} can be found by one, "
            "and these are not the same",
        )
        cached = [block_id in by_block for block_id in self._free]
        check_that(cached == sorted(cached), "a cached block would be evicted before a blank one")
        check_that(
            self.enable_prefix_caching or not by_block,
            f"blocks {sorted(by_block)} are cached although prefix caching is off",
        )

    def check_published(self, block_id: int, block_hash: BlockHash) -> None:
        """Check the hash of a block that a sequence published or was given; it has none if another
        block had that hash before.

        Raises:
            AssertionError: when it has another.
        """
        known = self._hashes[block_id]
        check_that(
            known is None or known == block_hash,
            f"block {block_id} is found by a hash that its tokens do not have",
        )

    def check_references(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the reference counts with the block tables of all live sequences.

        Raises:
            AssertionError: with the blocks whose counts differ.
        """
        counts = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                counts[block_id] += 1
        wrong = {
            b: (held, counted)
            for b, (held, counted) in enumerate(zip(counts, self._ref_counts, strict=True))
            if held != counted
        }
        check_that(not wrong, f"block: (tables that hold it, references counted) = {wrong}")


def check_that(holds: bool, message: str) -> None:
    """Raises AssertionError, also where `assert` does nothing, unless something holds."""
    if not holds:
        raise AssertionError(message)
