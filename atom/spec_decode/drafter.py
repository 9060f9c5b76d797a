"""Combines a proposer (device), a lookup (host) and a rule for the number of drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from atom.batch import ScheduledBatch, StepOutput
from atom.graphs.recorded import StepRecorder
from atom.sampling.rows import SequenceState
from atom.spec_decode.base import Proposal, Proposer, VerifiedStep
from atom.spec_decode.grammar import GRAMMAR, GrammarDrafter, GrammarDrafts
from atom.spec_decode.lengths import DraftLength, Verification
from atom.spec_decode.lookup import Lookup

# Prompt and output tokens of a sequence.
History = tuple[Sequence[int], Sequence[int]]
# The lookup's drafts for each sampled sequence; None where it found none.
Found = Sequence[list[int] | None]


class Drafter:
    """Makes drafts: by lookup, by the proposer where the lookup finds nothing, and by grammars.

    The proposer sees every step, even if its drafts are not needed, to keep its KV complete.

    Attributes:
        proposer: makes drafts on the device.
        looks: whether there is a lookup.
        looks_first: whether the lookup runs before the proposer, which may then be skipped. Not on
            a GPU, where the host would have to wait for the tokens in the middle of the step.
        guides: whether the proposer follows grammars; not on a GPU, either.

    Args:
        source: the proposer's name in the statistics.
        length: chooses the number of drafts; None for the maximum.
        grammars: drafts for sequences with grammars; None if they have those of others alone.
        waiting_is_free: whether a host sync costs nothing (the device is the CPU).
        recorder: replays the proposer's work in steps that recur.
    """

    def __init__(
        self,
        proposer: Proposer,
        source: str,
        lookup: Lookup | None,
        length: DraftLength | None,
        grammars: GrammarDrafter | None = None,
        *,
        waiting_is_free: bool,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.proposer = proposer
        self.looks = lookup is not None
        self.looks_first = self.looks and waiting_is_free
        self.guides = grammars is not None and waiting_is_free
        self._recorder = recorder
        self._source = source
        self._lookup = lookup
        self._length = length
        self._grammars = grammars
        self._count = 0

    def begin(self, num_sampled: int) -> int:
        """The number of drafts to make in the step that begins, unless the lookup runs first.

        Args:
            num_sampled: sequences that the step samples.
        """
        self._count = self._choose([self._source] * num_sampled, True) if num_sampled else 0
        return self._count

    def follow(self, num_drafts: int) -> None:
        """Make as many drafts in the step that begins as another rank chose."""
        if self._length is not None and num_drafts != self._count:
            self._length.follow(num_drafts)
        self._count = num_drafts

    def forget(self, rows: Sequence[int]) -> None:
        """Drop the state of these rows' sequences."""
        if self._lookup is not None:
            self._lookup.forget(rows)
        if self._grammars is not None:
            self._grammars.forget(rows)

    @contextmanager
    def grammar_drafts(
        self, rows: Sequence[int], states: Sequence[SequenceState]
    ) -> Iterator[GrammarDrafts | None]:
        """Drafts of those of the sampled sequences that have grammars; None if none has."""
        if self._grammars is None or not any(state.grammar for state in states):
            yield None
            return
        grammars = [state.grammar for state in states]
        outputs = [state.output_token_ids for state in states]
        with self._grammars.drafts(rows, grammars, outputs) as drafts:
            yield drafts

    def look_up(self, rows: Sequence[int], histories: Sequence[History]) -> Found:
        """The lookup's drafts for each sampled sequence."""
        lookup = self._lookup
        assert lookup is not None
        pairs = zip(rows, histories, strict=True)
        return [lookup.find(row, *history) for row, history in pairs]

    def propose(self, step: VerifiedStep | None, found: Found | None) -> Proposal | None:
        """The proposer's drafts; None when it makes none.

        Args:
            step: None when the proposer reads no steps.
            found: the lookup's drafts if it runs first, which then decide their number; else None.
        """
        needed = True
        if found is not None:
            needed = any(drafts is None for drafts in found)
            sources = [self._source_of(drafts) for drafts in found]
            self._count = self._choose(sources, needed) if sources else 0
        if step is None:
            return None
        count = self._count if needed else 0
        if self._recorder is None or not step.recurs:
            return self.proposer.propose(step, count)
        kind = "drafting" if count else "writing the draft's cache"
        return self._recorder.run(
            kind,
            count,
            step.tensors,
            lambda: self.proposer.propose(step, count),
            lambda proposal: proposal.tensors,
        )

    def merge(
        self, found: Found, made: np.ndarray | None, allowed: GrammarDrafts | None = None
    ) -> list[tuple[list[int], str]]:
        """The drafts of each sampled sequence, and their source.

        Args:
            allowed: drafts of the sequences with grammars, if any has one.
        """
        rows: list[list[int]] = [[] for _ in found] if made is None else made.tolist()
        count = self._count
        merged = [
            (row if drafts is None else drafts[:count], self._source_of(drafts))
            for drafts, row in zip(found, rows, strict=True)
        ]
        if allowed is not None:
            for index, draft in allowed.finish([drafts for drafts, _ in merged]).items():
                source = GRAMMAR if draft.is_forced else merged[index][1]
                merged[index] = draft.token_ids, source
        return merged

    def observe(self, batch: ScheduledBatch, output: StepOutput, seconds: float | None) -> None:
        """Update the draft length from a finished step.

        Args:
            seconds: that it took, drafting included; None if another like it would take another
                time.
        """
        if self._length is None:
            return
        verifications, num_rows = [], 0
        for sequence, result in zip(batch.sequences, output.sequences, strict=True):
            if sequence.wants_sample:
                accepted = max(min(len(result.token_ids) - 1, sequence.num_drafts), 0)
                verifications.append(
                    Verification(sequence.draft_source, sequence.num_drafts, accepted)
                )
                num_rows += sequence.num_drafts + 1
        is_decode = num_rows == batch.num_tokens
        self._length.observe(verifications, seconds if is_decode else None)

    def _choose(self, sources: Sequence[str], needed: bool) -> int:
        if self._length is None:
            return self.proposer.lookahead.num_tokens
        return self._length.choose(sources, drafts=needed and self.proposer.reads_steps)

    def _source_of(self, drafts: list[int] | None) -> str:
        if drafts is None or self._lookup is None:
            return self._source
        return self._lookup.source
