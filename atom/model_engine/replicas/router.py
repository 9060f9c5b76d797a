"""Which replica a request goes to: where its prefix is cached, else the least loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from atom.messages import ImageInput
from atom.model_engine.block_pool import BlockHash, hash_block, root_hash

# A known prefix decides when it has so many tokens or is half of the prompt; what is shorter, such
# as the head of a chat template, is computed in no time and would keep all requests together.
MIN_PREFIX_TOKENS = 64
# Unless its replica has more than so many sequences beyond the least loaded one, and more than so
# many times as many.
MOST_EXCESS = 4
MOST_RATIO = 2


class Router:
    """Remembers which blocks of prompts each replica has computed, as its prefix cache does.

    Each replica's blocks are bounded by the size of its cache, the least recently used ones going
    first. Generated tokens are not remembered: a conversation is found by its earlier prompts.

    Args:
        block_size, num_blocks: of each replica's KV cache; with 0 blocks nothing is remembered.
    """

    def __init__(self, num_replicas: int, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._known: list[OrderedDict[BlockHash, None]] = [
            OrderedDict() for _ in range(num_replicas)
        ]
        self._turn = 0

    def hashes(
        self,
        prompt_token_ids: Sequence[int],
        cache_salt: str,
        images: Sequence[ImageInput] = (),
    ) -> list[BlockHash]:
        """The chained hashes of a prompt's full blocks, as many as a cache would be asked for."""
        hashes: list[BlockHash] = []
        if not self._num_blocks:
            return hashes
        size = self._block_size
        parent = root_hash(cache_salt)
        for start in range(0, len(prompt_token_ids) - size, size):
            tokens = prompt_token_ids[start : start + size]
            parent = hash_block(parent, tokens, start, images)
            hashes.append(parent)
        return hashes

    def choose(
        self, hashes: Sequence[BlockHash], num_prompt_tokens: int, loads: Mapping[int, int]
    ) -> int:
        """The replica for a prompt; ties rotate.

        Args:
            loads: unfinished sequences of each replica that may be chosen; at least one.
        """
        least = min(loads.values())
        known = {replica: self._num_known(replica, hashes) for replica in loads}
        longest = max(known.values())
        if longest * self._block_size >= min(MIN_PREFIX_TOKENS, num_prompt_tokens / 2):
            holders = [replica for replica in loads if known[replica] == longest]
            lightest = min(loads[replica] for replica in holders)
            if lightest <= max(least + MOST_EXCESS, least * MOST_RATIO):
                return self._next(replica for replica in holders if loads[replica] == lightest)
        return self._next(replica for replica, load in loads.items() if load == least)

    def record(self, replica: int, hashes: Sequence[BlockHash]) -> None:
        """Remember that a replica computes a prompt."""
        known = self._known[replica]
        # As in the cache, the tail of a prompt is forgotten before its head.
        for block_hash in reversed(hashes[: self._num_blocks]):
            known[block_hash] = None
            known.move_to_end(block_hash)
        while len(known) > self._num_blocks:
            known.popitem(last=False)

    def forget(self, replica: int) -> None:
        """The replica's cache is empty."""
        self._known[replica].clear()

    def _num_known(self, replica: int, hashes: Sequence[BlockHash]) -> int:
        known = self._known[replica]
        return next((i for i, one in enumerate(hashes) if one not in known), len(hashes))

    def _next(self, replicas: Iterable[int]) -> int:
        """The first of these at or after the turn, which goes on behind it."""
        number = len(self._known)
        chosen = min(replicas, key=lambda replica: (replica - self._turn) % number)
        self._turn = (chosen + 1) % number
        return chosen
