"""Combines a proposer's drafts, a lookup's (host) and a rule for the number of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import numpy as np

from atom.batch import ScheduledBatch, StepOutput
from atom.sampling.rows import SequenceState
from atom.spec_decode.draft_length import (
    Candidates,
    DraftLength,
    DraftNumbers,
    Verification,
)
from atom.spec_decode.grammar import GRAMMAR, GrammarDrafter, GrammarDrafts
from atom.spec_decode.made_drafts import NO_DRAFTS, by_sequence, replaced
from atom.spec_decode.proposers.base import Proposer
from atom.spec_decode.rest import Rest
from atom.spec_decode.suffix_index import Continuation
from atom.spec_decode.suffix_lookup import SuffixLookup

# Prompt and output tokens of a sequence.
History = tuple[Sequence[int], Sequence[int]]
# The lookup's drafts for each sampled sequence; None where the proposer is expected to do better.
Found = Sequence[Continuation | None]
# Of each sampled sequence: drafts that a step verifies which was launched already and goes on from
# its newest tokens; None if there is no such step.
Launched = Sequence[list[int] | None]

_NO_GRAMMARS = nullcontext(None)
# The proposer's accepted drafts, before any were verified, and the window of their mean.
_FIRST_ACCEPTED, _ACCEPTED_WINDOW = 1.0, 256


class Drafter:
    """Makes drafts: by lookup where that is expected to bring more than the proposer has brought,
    else by the proposer, and what the lookup expects to follow those; and by grammars.

    The proposer sees every step, even if its drafts are not needed, to keep its KV complete.

    Attributes:
        proposer: makes drafts on the device.
        max_drafts: most drafts of a sequence.
        source: the proposer's name in the statistics.
        looks: whether there is a lookup.
        looks_first: whether the lookup runs before the proposer, which may then be skipped. Not on
            a GPU, where the host would have to wait for the tokens in the middle of the step.
        guides: whether the proposer follows grammars; not on a GPU, either.
        tokens_lost_by_overlap: of the sampled sequences that were looked up last, as in
            `SequenceResult`: if the next lookup finds as much as this one.

    Args:
        length: chooses the number of drafts; None for the maximum.
        grammars: drafts for sequences with grammars; None if they have those of others alone.
        waiting_is_free: whether a host sync costs nothing (the device is the CPU).
        is_ahead: whether steps are launched before the results of the last one are read.
        rests: whether steps in which nothing pays are spared; only where they are recorded, since
            others take longer by more than a rest saves.
    """

    def __init__(
        self,
        proposer: Proposer,
        source: str,
        lookup: SuffixLookup | None,
        length: DraftLength | None,
        grammars: GrammarDrafter | None = None,
        *,
        waiting_is_free: bool,
        is_ahead: bool = False,
        rests: bool = False,
    ) -> None:
        self.proposer = proposer
        self.source = source
        self.looks = lookup is not None
        self.looks_first = self.looks and waiting_is_free
        self.guides = grammars is not None and waiting_is_free
        own = proposer.lookahead.num_tokens
        self.max_drafts = own if lookup is None else max(lookup.max_drafts, own)
        self.tokens_lost_by_overlap: list[float] = []
        self._is_ahead = is_ahead
        self._lookup = lookup
        self._length = length
        self._learns = self.looks or length is not None
        self._rest = Rest() if length is not None and rests else None
        self._grammars = grammars
        # Of the step that was merged last.
        self._merged = DraftNumbers()
        # By row, most drafts of a sequence whose request says so.
        self._limits: dict[int, int] = {}
        # By row, the confidences of the drafts that were last made for its sequence: in that step,
        # and before it.
        self._pending: dict[int, list[float]] = {}
        self._verified: dict[int, list[float]] = {}
        # Those for the step behind one that was launched: made in that step, in the one before it,
        # and before that.
        self._later: tuple[dict[int, list[float]], ...] = ({}, {}, {})
        # Mean number of accepted drafts where the proposer made them, and its observations.
        self._accepted, self._num_observed = _FIRST_ACCEPTED, 1

    @property
    def num_lookup_tokens(self) -> int:
        """Tokens that the lookup holds."""
        return 0 if self._lookup is None else self._lookup.num_tokens

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is drafted in this step, since no drafts paid lately."""
        return self._rest is not None and self._rest.is_on

    def start(self, batch: ScheduledBatch) -> None:
        """A step starts: drop the state of rows that were freed, and learn of new sequences."""
        if self._rest is not None:
            self._rest.begin(batch.num_drafting, starts=self._rest.is_awaited(batch))
        if self._lookup is not None:
            self._lookup.forget(batch.freed_rows)
            self._lookup.start(batch.new)
        if self._grammars is not None:
            self._grammars.forget(batch.freed_rows)
        for row in batch.freed_rows:
            self._limits.pop(row, None)
        for new in batch.new:
            if (most := new.params.num_speculative_tokens) is not None:
                self._limits[new.row] = most

    def begin(self, num_sampled: int) -> DraftNumbers:
        """The numbers of the step that begins, unless the lookup runs first.

        Args:
            num_sampled: sequences that the step samples and that want drafts.
        """
        if self.is_at_rest:
            return DraftNumbers()
        return self._choose([self.source] * num_sampled, True)

    def begin_with(self, found: Found) -> DraftNumbers:
        """The numbers of a step whose lookup has run: its drafts decide them."""
        if self.is_at_rest:
            return DraftNumbers()
        needed = any(drafts is None for drafts in found)
        sources = [self._source_of(drafts) for drafts in found if drafts is not NO_DRAFTS]
        return self._choose(sources, needed)

    def follow(self, numbers: DraftNumbers, num_drafts: int) -> DraftNumbers:
        """The numbers of the step that begins, if another rank chose how many the proposer makes.

        Args:
            numbers: what this rank chose.
        """
        if num_drafts == numbers.made:
            return numbers
        choice = numbers.choice
        if choice is not None:
            verified = choice.verified if self._is_ahead else None
            choice = msgspec.structs.replace(
                choice, asked=num_drafts, made=num_drafts, verified=verified
            )
        return DraftNumbers(max(numbers.most, num_drafts), num_drafts, choice)

    def grammar_drafts(
        self, rows: Sequence[int], states: Sequence[SequenceState]
    ) -> AbstractContextManager[GrammarDrafts | None]:
        """Drafts of those of the sampled sequences that have grammars; None if none has."""
        grammars = [state.grammar for state in states]
        if self._grammars is None or not any(grammars):
            return _NO_GRAMMARS
        outputs = [state.output_token_ids for state in states]
        return self._grammars.drafts(rows, grammars, outputs)

    def look_up(
        self,
        rows: Sequence[int],
        histories: Sequence[History],
        launched: Launched | None = None,
    ) -> Found:
        """The lookup's drafts for the next step of each sampled sequence that is not launched yet;
        none at rest.

        Args:
            launched: None if no sequence has a step that is.
        """
        assert self._lookup is not None
        if self.is_at_rest:
            if self._lookup.shares:
                for row, own in zip(rows, histories, strict=True):
                    self._lookup.take_in(row, *own)
            return [None] * len(rows)
        rival = self._accepted if self.proposer.reads_steps else 0.0
        if not self._is_ahead:
            every = [self._lookup.find(row, *own) for row, own in zip(rows, histories, strict=True)]
            return [each if each.score > rival else None for each in every]
        found: list[Continuation | None] = []
        self.tokens_lost_by_overlap = []
        most = self._lookup.max_drafts
        launched = launched or [None] * len(rows)
        for row, history, drafts in zip(rows, histories, launched, strict=True):
            more = 1 + (most if drafts is None else len(drafts))
            longer = self._lookup.find(row, *history, more=more)
            now = longer.first(most)
            later = longer.behind(now.token_ids if drafts is None else drafts).first(most)
            lost = max(now.score, rival) - max(later.score, rival)
            self.tokens_lost_by_overlap.append(max(lost, 0.0))
            each = now if drafts is None else later
            found.append(each if each.score > rival else None)
        return found

    def merge(
        self,
        numbers: DraftNumbers,
        rows: Sequence[int],
        found: Found,
        made: Sequence[np.ndarray],
        allowed: GrammarDrafts | None = None,
        launched: Launched | None = None,
    ) -> list[tuple[list[int], str]]:
        """The drafts of each sampled sequence that are to be verified, and their source.

        With a step launched those that were looked up are for the one behind it; that one verifies
        the proposer's, and none are looked up behind them.

        Args:
            numbers: of the step that made them.
            rows: of the sampled sequences.
            made: the tensors of the proposer's drafts, if it made any.
            allowed: drafts of the sequences with grammars, if any has one.
            launched: as for `look_up`.
        """
        self._merged = numbers
        if self.is_at_rest and allowed is None:
            return [([], self.source)] * len(rows)
        own = by_sequence(made, len(found))
        ahead = [False] * len(found) if launched is None else [d is not None for d in launched]
        merged = [
            self._extend(row, drafts, 0 if is_ahead else numbers.most)
            if each is None
            else each.first(numbers.most)
            for row, drafts, each, is_ahead in zip(rows, own, found, ahead, strict=True)
        ]
        sources = [self._source_of(each) for each in found]
        if allowed is not None:
            for index, draft in allowed.finish([each.token_ids for each in merged]).items():
                sources[index] = GRAMMAR if draft.is_forced else sources[index]
                merged[index] = replaced(merged[index], draft.token_ids)
        if self._limits:
            merged = [
                each.first(self._limits.get(row, len(each.token_ids)))
                for row, each in zip(rows, merged, strict=True)
            ]
        if self._learns:
            self._remember(rows, own, merged, ahead)
        if self._length is not None and numbers.choice is not None:
            # What must follow is certain, and sequences that want no drafts do not count.
            which = [
                i
                for i, source in enumerate(sources)
                if source != GRAMMAR and found[i] is not NO_DRAFTS
            ]
            candidates = [Candidates(sources[i], merged[i].confidences) for i in which]
            kept = self._length.cut(numbers.choice, candidates)
            for i, count in zip(which, kept, strict=True):
                merged[i] = merged[i].first(count)
        return [(each.token_ids, source) for each, source in zip(merged, sources, strict=True)]

    def _remember(
        self,
        rows: Sequence[int],
        own: Sequence[Continuation],
        merged: Sequence[Continuation],
        ahead: Sequence[bool],
    ) -> None:
        """Keep the confidences of drafts until their verification is observed."""
        made: dict[int, list[float]] = {}
        later: dict[int, list[float]] = {}
        for row, drafts, each, is_ahead in zip(rows, own, merged, ahead, strict=True):
            made[row] = drafts.confidences if is_ahead else each.confidences
            if is_ahead:
                later[row] = each.confidences
        self._verified, self._pending = self._pending, {**self._pending, **made}
        self._later = later, *self._later[:2]

    def _extend(self, row: int, own: Continuation, most: int) -> Continuation:
        """The proposer's drafts of a sampled sequence, with what the lookup expects after them, up
        to `most`.
        """
        room = most - len(own.token_ids)
        if self._lookup is None or not own.token_ids or room <= 0:
            return own
        more = self._lookup.extend(row, own.token_ids, room)
        return Continuation(own.token_ids + more.token_ids, own.confidences + more.confidences)

    def observe(self, batch: ScheduledBatch, output: StepOutput, seconds: float | None) -> None:
        """Learn from a finished step, whose drafts were merged last.

        Args:
            seconds: that it took, drafting included; None if another like it would take another
                time.
        """
        choice = self._merged.choice
        if self._rest is not None and self._rest.is_on:
            is_decode = batch.num_drafting == batch.num_tokens
            self._rest.ended(seconds if is_decode else None)
            return
        if not self._learns or not (choice is None or choice.is_watched):
            return
        verifications, num_rows = [], 0
        for sequence, result in zip(batch.sequences, output.sequences, strict=True):
            if sequence.wants_sample and sequence.wants_drafts:
                accepted = max(min(len(result.token_ids) - 1, sequence.num_drafts), 0)
                where = self._later[-1] if sequence.knows_drafts else self._verified
                known = where[sequence.row] if sequence.num_drafts else []
                drafts = known[: sequence.num_drafts]
                verifications.append(Verification(sequence.draft_source, drafts, accepted))
                num_rows += sequence.num_drafts + 1
        for each in verifications:
            if each.source == self.source and each.confidences:
                self._num_observed = min(self._num_observed + 1, _ACCEPTED_WINDOW)
                self._accepted += (each.num_accepted - self._accepted) / self._num_observed
        if self._length is not None and choice is not None:
            is_decode = num_rows == batch.num_tokens
            measured = seconds if is_decode else None
            self._length.observe(choice, verifications, measured)

    def _choose(self, sources: Sequence[str], needed: bool) -> DraftNumbers:
        """Args:
        sources: of each sampled sequence's drafts.
        needed: whether the proposer makes any.
        """
        if not sources:
            return DraftNumbers()
        most, choice = self.max_drafts, None
        if self._length is not None:
            reads = self.proposer.reads_steps
            if self._rest is not None and (rested := self._rest.take()):
                self._length.rest(self._rest.num_sequences, rested)
            choice = self._length.choose(sources, drafts=needed and reads)
            most = choice.asked
            if self._rest is not None and reads and not choice.is_try:
                self._rest.chosen(most)
        own = min(most, self.proposer.lookahead.num_tokens)
        return DraftNumbers(most, own if needed else 0, choice)

    def _source_of(self, drafts: Continuation | None) -> str:
        if drafts is None or self._lookup is None:
            return self.source
        return self._lookup.source
