"""What the runner asks for drafts: a proposer, a lookup beside it, and a rule for how many."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from atom.sampling.verify import NO_DRAFT
from atom.spec_decode.base import Proposer, VerifiedStep
from atom.spec_decode.length import DraftLength
from atom.spec_decode.lookup import Lookup

LOOKUP = "lookup"


@dataclass(frozen=True)
class Proposal:
    """Drafts of the sampled sequences, on the host.

    Attributes:
        token_ids: for each sequence at most as many as were asked for.
        sources: who was asked for them.
    """

    token_ids: Sequence[list[int]]
    sources: Sequence[str]


class Drafter:
    """Asks the lookup first, and the proposer for what it does not find.

    The proposer sees every step: when nobody needs its drafts it still completes its KV.

    Args:
        source: what statistics call the proposer.
    """

    def __init__(self, proposer: Proposer, source: str, lookup: Lookup, length: DraftLength):
        self._proposer = proposer
        self._source = source
        self._lookup = lookup
        self._length = length

    def draft(self, step: VerifiedStep) -> Proposal:
        seconds = time.perf_counter() - step.started if step.is_decode else None
        self._length.observe_step(step.verifications, seconds)
        found = self._lookup.find(step)
        sources = [self._source if tokens is None else LOOKUP for tokens in found]
        needed = self._source in sources
        count = self._length.choose(sources, drafts=needed) if sources else 0
        made = self._propose(step, count if needed else 0)
        token_ids = [
            [t for t in row if t != NO_DRAFT] if tokens is None else tokens[:count]
            for tokens, row in zip(found, made, strict=True)
        ]
        return Proposal(token_ids, sources)

    def _propose(self, step: VerifiedStep, count: int) -> list[list[int]]:
        started = time.perf_counter()
        drafts: list[list[int]] = self._proposer.propose(
            dataclasses.replace(step, num_drafts=count)
        ).tolist()
        if step.is_decode:
            seconds = time.perf_counter() - started
            self._length.observe_drafting(len(drafts), count, seconds)
        return drafts
