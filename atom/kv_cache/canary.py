"""Watches the KV cache for wrong reads: `--debug-kv-canary`."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch

from atom.batch import NewSequence, ScheduledBatch, ScheduledSequence, SequenceResult
from atom.messages import EngineDeadError
from atom.model_ops.attention.metadata import CacheTensor, KVCacheTensor

logger = logging.getLogger(__name__)

# What a step may cost: slots whose content is hashed once they are written, and blocks that are
# checked, with as many of their hashed slots.
_SLOTS_HASHED, _BLOCKS_CHECKED, _SLOTS_CHECKED = 16, 8, 16
_SEED = 0
_NO_TOKEN = -1


@dataclass
class _Watched:
    """What must be true of the sequence in a row.

    Attributes:
        tokens: that are known.
        root: of the chain of its tokens.
        chains: of its computed tokens, up to each of them.
        blocks: its block table, as the scheduler told it.
    """

    id: str
    tokens: list[int]
    root: int
    chains: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    is_wrong: bool = False


class KVCanary:
    """Knows which token of which text was computed into each slot, and compares it with what each
    sequence reads.

    It follows each sequence by what a step was given and what came back, apart from scheduler,
    pool and block tables. Each slot has the chain of the tokens up to the one whose KV it holds,
    and the token after it; a few have a hash of their bytes, over all of the target's layers. After
    each step random sequences are checked: their table on the device against the blocks that they
    were given, and in random blocks of it the chains and hashes of what is before the step. A
    sequence that starts with cached blocks has all their chains checked.

    A draft model's KV is not hashed, since it may be written late or again; the token on which it
    depends is checked. Of several ranks the first one's cache is watched.

    Args:
        layers: the target's views of its pools.
        checks_successors: whether a cached block must have been followed by the same token.
        raises: whether the first wrong read ends the engine, or each sequence's first is logged.
    """

    def __init__(
        self,
        layers: Sequence[CacheTensor],
        num_blocks: int,
        block_size: int,
        *,
        checks_successors: bool,
        raises: bool,
    ) -> None:
        self._parts = [part for layer in layers for part in _parts_of(layer)]
        self._block_size = block_size
        self._checks_successors = checks_successors
        self._raises = raises
        self._random = random.Random(_SEED)
        self._rows: dict[int, _Watched] = {}
        # Of each slot. A slot that nobody wrote has chain 0, which no text has.
        self._chains = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self._successors = np.full(num_blocks * block_size, _NO_TOKEN, dtype=np.int64)
        self._hashes: dict[int, bytes] = {}
        self.num_wrong = 0

    def check(
        self, batch: ScheduledBatch, tables: np.ndarray, results: Sequence[SequenceResult]
    ) -> None:
        """Check what a step that has ended read, and remember what it wrote.

        Args:
            tables: [B, width], the block tables that its attention read.

        Raises:
            EngineDeadError: for a wrong read, with `raises`.
        """
        for row in batch.freed_rows:
            self._rows.pop(row, None)
        for new in batch.new:
            self._rows[new.row] = _watch(new)
        written: list[int] = []
        sequences = batch.sequences
        for table, part, result in zip(tables, sequences, results, strict=True):
            seq = self._rows[part.row]
            seq.blocks += part.new_block_ids
            if not seq.chains and part.start:
                self._match(seq, part.start, table)
            written += self._write(seq, part, result)
        self._hash(self._random.sample(written, min(_SLOTS_HASHED, len(written))))
        chosen = self._random.sample(range(len(sequences)), min(_BLOCKS_CHECKED, len(sequences)))
        for index in chosen:
            part = sequences[index]
            self._check_table(self._rows[part.row], tables[index, : part.num_blocks])
        for index in self._random.choices(chosen, k=_BLOCKS_CHECKED) if chosen else ():
            self._check_block(self._rows[sequences[index].row], tables[index])

    def _match(self, seq: _Watched, start: int, table: np.ndarray) -> None:
        """Check the cached blocks that a sequence starts with."""
        seq.chains = list(_chain(seq.root, seq.tokens[:start]))
        slots = self._slots(table, range(start))
        wrong = np.flatnonzero(self._chains[slots] != np.array(seq.chains, dtype=np.uint64))
        if len(wrong):
            at = int(wrong[0])
            self._found(seq, at, int(slots[at]), "was matched, but holds no KV of these tokens")
        after = self._successors[slots[-1]]
        if self._checks_successors and after != seq.tokens[start]:
            what = f"was matched before token {seq.tokens[start]}, but was followed by {after}"
            self._found(seq, start - 1, int(slots[-1]), what)

    def _write(self, seq: _Watched, part: ScheduledSequence, result: SequenceResult) -> list[int]:
        """Remember what was computed; returns the slots of tokens that count."""
        start, sampled = len(seq.chains), result.token_ids
        num_accepted = max(len(sampled) - (result.failure is None), 0)
        if part.is_ahead:  # the drafts that were wrong are not known here
            known = seq.tokens[start:]
            fed = [*known, *sampled[:num_accepted]]
        else:
            fed = part.token_ids
            known = fed[: len(fed) - part.num_drafts]
            if part.start != start or known != seq.tokens[start : start + len(known)]:
                what = f"computes {known[:4]} from {part.start} on, not {seq.tokens[start:][:4]}"
                self._found(seq, start, _NO_TOKEN, what)
                return []
        before = seq.chains[-1] if start else seq.root
        chains = list(_chain(before, fed))
        slots = self._slots(np.array(seq.blocks), range(start, start + len(fed)))
        self._chains[slots] = np.array(chains, dtype=np.uint64)
        for slot in slots.tolist():
            self._hashes.pop(slot, None)
        if part.wants_sample:
            seq.tokens[start + len(known) :] = sampled
        num_counted = min(len(known) + num_accepted, len(fed))
        seq.chains += chains[:num_counted]
        # A token that counts is followed by one that is known; a rejected draft by none.
        after = seq.tokens[start + 1 : start + 1 + len(fed)]
        self._successors[slots] = _NO_TOKEN
        self._successors[slots[: len(after)]] = after
        return [int(slot) for slot in slots[:num_counted]]

    def _check_table(self, seq: _Watched, table: np.ndarray) -> None:
        for index, (read, given) in enumerate(zip_longest(table.tolist(), seq.blocks)):
            if read != given:
                what = f"is read in block {read}, but was given {given}"
                self._found(seq, index * self._block_size, _NO_TOKEN, what)

    def _check_block(self, seq: _Watched, table: np.ndarray) -> None:
        """Check a random block of what a sequence has computed."""
        if not seq.chains:
            return
        size = self._block_size
        first = size * self._random.randrange(-(-len(seq.chains) // size))
        places = range(first, min(first + size, len(seq.chains)))
        slots = self._slots(table, places)
        expected = np.array(seq.chains[first : places.stop], dtype=np.uint64)
        for at in np.flatnonzero(self._chains[slots] != expected)[:1]:
            what = "holds the KV of other tokens"
            self._found(seq, first + int(at), int(slots[at]), what)
        hashed = [slot for slot in slots.tolist() if slot in self._hashes]
        hashed = self._random.sample(hashed, min(_SLOTS_CHECKED, len(hashed)))
        for slot, digest in zip(hashed, self._digests(hashed), strict=True):
            if digest != self._hashes[slot]:
                at = first + slots.tolist().index(slot)
                self._found(seq, at, slot, "holds other bytes than were written")

    def _slots(self, table: np.ndarray, places: range) -> np.ndarray:
        indices, offsets = np.divmod(np.array(places, dtype=np.int64), self._block_size)
        slots: np.ndarray = table[indices].astype(np.int64) * self._block_size + offsets
        return slots

    def _hash(self, slots: list[int]) -> None:
        if self._parts:  # not if all layers have blocks of their own
            self._hashes.update(zip(slots, self._digests(slots), strict=True))

    def _digests(self, slots: list[int]) -> list[bytes]:
        """Of the bytes in each slot, over all layers."""
        if not slots:
            return []
        hashers = [hashlib.blake2b(digest_size=8) for _ in slots]
        index = torch.tensor(slots, device=self._parts[0].device)
        blocks, offsets = index // self._block_size, index % self._block_size
        for part in self._parts:
            rows = part.view(torch.uint8)[blocks, offsets].cpu().numpy()
            for hasher, row in zip(hashers, rows, strict=True):
                hasher.update(row.tobytes())
        return [hasher.digest() for hasher in hashers]

    def _found(self, seq: _Watched, position: int, slot: int, what: str) -> None:
        """Tell of a wrong read; what follows from it in the same sequence is not told."""
        if seq.is_wrong:
            return
        seq.is_wrong = True
        self.num_wrong += 1
        where = "" if slot == _NO_TOKEN else f" (slot {slot} of block {slot // self._block_size})"
        message = f"the KV cache is wrong: {seq.id!r} at position {position}{where} {what}"
        if self._raises:
            raise EngineDeadError(message)
        logger.error("%s", message)


def _watch(new: NewSequence) -> _Watched:
    salt = hashlib.sha256(new.cache_salt.encode("utf-8", "surrogatepass")).digest()
    known = [*new.prompt_token_ids, *new.output_token_ids]
    return _Watched(new.id, known, int.from_bytes(salt[:8], "big"))


def _chain(before: int, token_ids: Sequence[int]) -> Iterator[int]:
    """The chain up to each token, 64 bits that are never 0."""
    for token in token_ids:
        before = hash((before, token)) % (1 << 64) or 1
        yield before


def _parts_of(layer: CacheTensor) -> tuple[torch.Tensor, ...]:
    return (layer.key, layer.value) if isinstance(layer, KVCacheTensor) else (layer.latent,)
