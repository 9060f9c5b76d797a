"""BlockPool: references, hashes, eviction order, and its books under random use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atom.model_engine.block_pool import BlockHash, BlockPool, hash_block, root_hash


def chain(count: int, salt: str = "") -> list[BlockHash]:
    """Hashes of `count` blocks of two tokens: (0, 1), (2, 3), ..."""
    hashes: list[BlockHash] = []
    for i in range(count):
        parent = hashes[-1] if hashes else root_hash(salt)
        hashes.append(hash_block(parent, [2 * i, 2 * i + 1]))
    return hashes


def cache(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """Hold, publish and free blocks for `hashes`."""
    block_ids = pool.allocate(len(hashes))
    assert block_ids is not None
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.free(block_ids)
    return block_ids


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 2, enable_prefix_caching=True)
    held = pool.allocate(3)
    assert held is not None
    assert len(set(held)) == 3
    assert (pool.num_free, pool.num_used) == (1, 3)
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_used) == (1, 3)
    assert pool.allocate(0) == []
    pool.free(held)
    assert pool.num_free == 4
    pool.check_integrity()


def test_match_takes_references_on_the_longest_prefix() -> None:
    pool = BlockPool(6, 2, enable_prefix_caching=True)
    hashes = chain(4)
    block_ids = cache(pool, hashes[:3])
    assert pool.num_free == 6
    assert pool.match_prefix(hashes) == block_ids
    assert pool.num_free == 3
    assert pool.match_prefix(hashes[:2]) == block_ids[:2]
    assert [pool.ref_count(b) for b in block_ids] == [2, 2, 1]
    # Without its first block a prefix does not match.
    assert pool.match_prefix(hashes[1:]) == block_ids[1:]
    assert pool.match_prefix([chain(1, "salt")[0], *hashes]) == []
    pool.free(block_ids[1:])
    pool.free(block_ids[:2])
    pool.free(block_ids)
    assert pool.num_used == 0
    pool.check_integrity()


def test_shared_blocks_outlive_one_holder() -> None:
    pool = BlockPool(2, 2, enable_prefix_caching=True)
    hashes = chain(2)
    block_ids = cache(pool, hashes)
    first, second = pool.match_prefix(hashes), pool.match_prefix(hashes)
    pool.free(first)
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    assert pool.match_prefix(hashes) == block_ids
    pool.free(second)
    pool.free(block_ids)
    assert pool.num_free == 2


def test_blank_blocks_go_first_then_the_least_recently_used_tail() -> None:
    pool = BlockPool(5, 2, enable_prefix_caching=True)
    old, new = chain(2, "old"), chain(2, "new")
    old_ids = cache(pool, old)
    new_ids = cache(pool, new)
    (blank,) = set(range(5)) - set(old_ids) - set(new_ids)
    assert pool.allocate(1) == [blank]
    # `old` is used again, so `new` is evicted, its tail first.
    pool.free(pool.match_prefix(old))
    assert pool.allocate(1) == [new_ids[1]]
    assert pool.match_prefix(new) == [new_ids[0]]
    pool.free([new_ids[0]])
    assert pool.allocate(2) == [old_ids[1], old_ids[0]]
    assert pool.match_prefix(old) == []
    pool.check_integrity()


def test_an_evicted_block_loses_its_hash() -> None:
    pool = BlockPool(1, 2, enable_prefix_caching=True)
    first, second = chain(2)
    cache(pool, [first])
    cache(pool, [second])
    assert pool.match_prefix([first]) == []
    assert pool.match_prefix([second]) == [0]


def test_the_first_of_two_twins_keeps_the_hash() -> None:
    pool = BlockPool(2, 2, enable_prefix_caching=True)
    (block_hash,) = chain(1)
    block_ids = pool.allocate(2)
    assert block_ids is not None
    for block_id in block_ids:
        pool.publish(block_id, block_hash)
    pool.check_integrity()
    pool.free(block_ids)
    assert pool.allocate(1) == [block_ids[1]]
    assert pool.match_prefix([block_hash]) == [block_ids[0]]


def test_without_prefix_caching_nothing_is_published() -> None:
    pool = BlockPool(2, 2, enable_prefix_caching=False)
    cache(pool, chain(2))
    assert pool.match_prefix(chain(2)) == []
    pool.check_integrity()


def test_misuse_raises() -> None:
    pool = BlockPool(2, 2, enable_prefix_caching=True)
    first, second = chain(2)
    held = pool.allocate(1)
    assert held == [0]
    pool.publish(0, first)
    pool.publish(0, first)
    with pytest.raises(RuntimeError, match="two different hashes"):
        pool.publish(0, second)
    pool.free(held)
    with pytest.raises(RuntimeError, match="block 0 was freed, but nobody holds it"):
        pool.free(held)
    with pytest.raises(RuntimeError, match="block 1 was published, but nobody holds it"):
        pool.publish(1, second)
    for num_blocks, size in ((0, 2), (2, 0)):
        with pytest.raises(ValueError, match=f"got {num_blocks} blocks of {size} tokens"):
            BlockPool(num_blocks, size, enable_prefix_caching=True)
    pool.check_integrity()


def test_integrity_check_tells_what_is_wrong() -> None:
    pool = BlockPool(3, 2, enable_prefix_caching=True)
    held = pool.allocate(2)
    assert held is not None
    pool.check_references([held])
    with pytest.raises(AssertionError, match=r"\{1: \(0, 1\)\}"):
        pool.check_references([[0]])
    pool._ref_counts[1] = 0
    with pytest.raises(AssertionError, match=r"\[1\] are either free and held, or neither"):
        pool.check_integrity()
    pool._ref_counts[1] = -1
    with pytest.raises(AssertionError, match="negative"):
        pool.check_integrity()
    pool._ref_counts[1] = 1
    pool._hashes[0] = chain(1)[0]
    with pytest.raises(AssertionError, match="1 blocks have a hash and 0 can be found"):
        pool.check_integrity()
    pool._cached = {chain(1)[0]: 0}
    pool.check_integrity()
    pool.check_published(0, chain(1)[0])
    pool.check_published(1, chain(1)[0])
    with pytest.raises(AssertionError, match="block 0 is found by a hash that its tokens do not"):
        pool.check_published(0, chain(1, "salt")[0])
    pool.enable_prefix_caching = False
    with pytest.raises(AssertionError, match=r"blocks \[0\] are cached although"):
        pool.check_integrity()
    pool.enable_prefix_caching = True
    pool.free(held)
    pool.check_integrity()
    pool._free.move_to_end(0, last=False)
    with pytest.raises(AssertionError, match="a cached block would be evicted before a blank one"):
        pool.check_integrity()


def test_hashes_depend_on_all_that_changes_the_kv() -> None:
    root = root_hash("")
    block = hash_block(root, [1, 2])
    others = [
        hash_block(root, [2, 1]),
        hash_block(root, [1, 2, 3]),
        hash_block(root, [1, 2 + 2**32]),
        hash_block(root_hash("salt"), [1, 2]),
        hash_block(block, [1, 2]),
    ]
    assert len({block, *others}) == 6
    assert hash_block(root, (1, 2)) == block
    # SHA-256, so the same in every process; and any text is a salt, even a lone surrogate.
    assert root.hex().startswith("e3b0c44298fc1c149afbf4c8996fb924")
    assert len(root_hash("\ud800")) == 32


class PoolMachine(RuleBasedStateMachine):
    """Random holders against a plain account of who holds what and what each block contains."""

    @initialize(num_blocks=st.integers(1, 8), caching=st.booleans())
    def start(self, num_blocks: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, 1, caching)
        self.tables: list[list[int]] = []
        self.contents: dict[int, BlockHash] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), publish=st.booleans())
    def hold(self, tokens: list[int], publish: bool) -> None:
        hashes = [root_hash("")]
        for token in tokens:
            hashes.append(hash_block(hashes[-1], [token]))
        hashes = hashes[1:]
        table = self.pool.match_prefix(hashes)
        for block_id, block_hash in zip(table, hashes, strict=False):
            assert self.contents[block_id] == block_hash
        free = self.pool.num_free
        fresh = self.pool.allocate(len(hashes) - len(table))
        assert (fresh is None) == (free < len(hashes) - len(table))
        if fresh is None:
            self.pool.free(table)
            return
        held = {block_id for other in self.tables for block_id in other}
        assert not held & set(fresh)
        for block_id, block_hash in zip(fresh, hashes[len(table) :], strict=True):
            self.contents[block_id] = block_hash if publish else BlockHash(b"half-full")
            if publish:
                self.pool.publish(block_id, block_hash)
        self.tables.append(table + fresh)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.free(self.tables.pop(index))

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        self.pool.check_references(self.tables)
        held = {block_id for table in self.tables for block_id in table}
        assert self.pool.num_used == len(held)
        assert self.pool.num_free == self.pool.num_blocks - len(held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_reset_forgets_all_but_what_is_held() -> None:
    pool = BlockPool(4, 2, enable_prefix_caching=True)
    hashes = chain(2)
    cache(pool, hashes)
    held = pool.match_prefix(hashes)
    assert not pool.reset()
    assert pool.match_prefix(hashes) == held
    pool.free(held)
    pool.free(held)
    assert pool.reset()
    pool.check_integrity()
    assert pool.match_prefix(hashes) == []
    assert pool.num_free == 4


def test_images_count_in_the_blocks_that_they_stand_in() -> None:
    root, block = root_hash(""), [1, 2, 3, 4]

    def hashed(start: int, *images: tuple[int, int, bytes]) -> BlockHash:
        given: Any = [SimpleNamespace(start=a, stop=b, digest=d * 32) for a, b, d in images]
        return hash_block(root, block, start, given)

    plain = hash_block(root, block)
    assert hashed(0, (4, 8, b"a")) == plain
    assert hashed(8, (4, 8, b"a")) == plain
    seen = [hashed(4, *images) for images in ([(4, 8, b"a")], [(4, 8, b"b")], [(3, 8, b"a")])]
    seen += [
        hashed(4, (7, 8, b"a")),
        hashed(4, (0, 5, b"a")),
        hashed(4, (4, 8, b"a"), (7, 9, b"b")),
    ]
    assert len({plain, *seen}) == 7
