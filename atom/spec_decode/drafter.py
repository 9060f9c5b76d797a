"""Combines a proposer's drafts, a lookup's (host) and a policy for the number of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from atom.batch import ScheduledBatch, StepOutput
from atom.sampling.rows import SequenceState
from atom.spec_decode.draft_policy import (
    Candidates,
    DraftNumbers,
    DraftPolicy,
    FixedDrafts,
    Verification,
)
from atom.spec_decode.grammar import GRAMMAR, NO_GRAMMARS, GrammarDrafter, GrammarDrafts
from atom.spec_decode.proposers.base import Proposer
from atom.spec_decode.suffix_index import Continuation
from atom.spec_decode.suffix_lookup import NoLookup, SuffixLookup

# Prompt and output tokens of a sequence.
History = tuple[Sequence[int], Sequence[int]]
# The lookup's drafts for each sampled sequence; None where the proposer is expected to do better.
LookupDrafts = Sequence[Continuation | None]
# Of each sampled sequence: drafts that a step verifies which was launched already and goes on from
# its newest tokens; None if there is no such step.
LaunchedDrafts = Sequence[list[int] | None]

# Of a sequence that wants none.
NO_DRAFTS = Continuation([], [])
_WITHOUT_GRAMMARS = nullcontext(NO_GRAMMARS)
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
        lookup: one that finds nothing if there is none.
        has_lookup: whether there is one.
        drafts_after_lookup: whether the proposer runs after the lookup, and may be skipped. Not on
            a GPU, where the host would have to wait for the tokens in the middle of the step.
        drafts_within_grammars: whether the proposer follows grammars; not on a GPU, either.
        tokens_lost_by_overlap: of the sampled sequences that were looked up last, as in
            `SequenceResult`: if the next lookup finds as much as this one.

    Args:
        lookup: None if there is none.
        policy: chooses the numbers of drafts; None for the maximum.
        grammars: drafts for sequences with grammars; None if they have those of others alone.
        sync_is_free: whether a host sync costs nothing (the device is the CPU).
        is_ahead: whether steps are launched before the results of the last one are read.
    """

    def __init__(
        self,
        proposer: Proposer,
        source: str,
        lookup: SuffixLookup | None,
        policy: DraftPolicy | None,
        grammars: GrammarDrafter | None = None,
        *,
        sync_is_free: bool,
        is_ahead: bool = False,
    ) -> None:
        self.proposer = proposer
        self.source = source
        self.has_lookup = lookup is not None
        self.drafts_after_lookup = self.has_lookup and sync_is_free
        self._drafts_grammars = grammars is not None
        self.drafts_within_grammars = self._drafts_grammars and sync_is_free
        num_proposed = proposer.lookahead.num_tokens
        self.lookup = lookup or NoLookup(source)
        self.max_drafts = max(self.lookup.max_drafts, num_proposed)
        self.tokens_lost_by_overlap: list[float] = []
        self._is_ahead = is_ahead
        self._policy = policy or FixedDrafts(num_proposed, self.max_drafts)
        self._grammars = grammars or GrammarDrafter(most=0)
        # Of the step that was merged last.
        self._merged = DraftNumbers()
        # By row, most drafts of a sequence whose request says so.
        self._limits: dict[int, int] = {}
        # Mean number of accepted drafts where the proposer made them, and its observations.
        self._accepted, self._num_observed = _FIRST_ACCEPTED, 1

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is drafted in this step, since no drafts paid lately."""
        return self._policy.is_resting

    def start(self, batch: ScheduledBatch) -> None:
        """A step starts: drop the state of rows that were freed, and learn of new sequences."""
        num_drafting = batch.num_drafting
        # Each sequence goes on by a token, and none computes its prompt.
        is_steady = not batch.new and num_drafting == batch.num_tokens
        self._policy.begin(num_drafting, is_steady=is_steady)
        if batch.freed_rows or batch.new:
            self._change_rows(batch)

    def _change_rows(self, batch: ScheduledBatch) -> None:
        self.lookup.forget(batch.freed_rows)
        self.lookup.start(batch.new)
        self._grammars.forget(batch.freed_rows)
        for row in batch.freed_rows:
            self._limits.pop(row, None)
        for new in batch.new:
            if (most := new.params.num_speculative_tokens) is not None:
                self._limits[new.row] = most

    def begin(self, num_sampled: int, num_looked_up: int = 0) -> DraftNumbers:
        """The numbers of the step that begins, unless the lookup runs first.

        Args:
            num_sampled: sequences that the step samples and that want drafts.
            num_looked_up: of them, those whose drafts the lookup has found.
        """
        if self._policy.is_resting or not num_sampled:
            return DraftNumbers()
        return self._policy.choose(num_looked_up, num_sampled)

    def begin_with(self, found: LookupDrafts) -> DraftNumbers:
        """The numbers of a step whose lookup has run: what it has found decides them."""
        wanted = [drafts for drafts in found if drafts is not NO_DRAFTS]
        return self.begin(len(wanted), sum(drafts is not None for drafts in wanted))

    def follow(self, numbers: DraftNumbers, num_drafts: int) -> DraftNumbers:
        """The numbers of the step that begins, if another rank chose how many the proposer makes.

        Args:
            numbers: what this rank chose.
        """
        if num_drafts == numbers.made:
            return numbers
        asked, most = max(numbers.asked, num_drafts), max(numbers.most, num_drafts)
        return DraftNumbers(num_drafts, asked, most, numbers.least)

    def grammar_drafts(
        self, rows: Sequence[int], states: Sequence[SequenceState]
    ) -> AbstractContextManager[GrammarDrafts]:
        """Drafts of those of the sampled sequences that have grammars; `NO_GRAMMARS` if none has,
        or their grammars draft nothing.
        """
        grammars = [state.grammar for state in states]
        if not self._drafts_grammars or not any(grammars):
            return _WITHOUT_GRAMMARS
        outputs = [state.output_token_ids for state in states]
        return self._grammars.drafts(rows, grammars, outputs)

    def look_up(
        self,
        rows: Sequence[int],
        histories: Sequence[History],
        launched: LaunchedDrafts | None = None,
    ) -> LookupDrafts:
        """The lookup's drafts for the next step of each sampled sequence that is not launched yet;
        none at rest.

        Args:
            launched: None if no sequence has a step that is.
        """
        if self.is_at_rest:
            if self.lookup.shares:
                for row, history in zip(rows, histories, strict=True):
                    self.lookup.take_in(row, *history)
            return [None] * len(rows)
        rival = self._accepted if self.proposer.reads_steps else 0.0
        if not self._is_ahead:
            pairs = zip(rows, histories, strict=True)
            newest = [self.lookup.find(row, *history) for row, history in pairs]
            return [each if each.score > rival else None for each in newest]
        found: list[Continuation | None] = []
        self.tokens_lost_by_overlap = []
        most = self.lookup.max_drafts
        launched = launched or [None] * len(rows)
        for row, history, drafts in zip(rows, histories, launched, strict=True):
            more = 1 + (most if drafts is None else len(drafts))
            longer = self.lookup.find(row, *history, more=more)
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
        found: LookupDrafts,
        made: Sequence[np.ndarray],
        allowed: GrammarDrafts = NO_GRAMMARS,
        launched: LaunchedDrafts | None = None,
    ) -> list[tuple[list[int], str]]:
        """The drafts of each sampled sequence that are to be verified, and their source.

        With a step launched those that were looked up are for the one behind it; that one verifies
        the proposer's, and none are looked up behind them.

        Args:
            numbers: of the step that made them.
            rows: of the sampled sequences.
            made: the tensors of the proposer's drafts, if it made any.
            allowed: drafts of the sequences with grammars.
            launched: as for `look_up`.
        """
        self._merged = numbers
        if self._policy.is_resting and allowed is NO_GRAMMARS:
            return [([], self.source)] * len(rows)
        proposed = _of_proposer(made, len(rows), numbers.least)
        launched = launched or [None] * len(rows)
        drafts, sources = list(proposed), [self.source] * len(rows)
        expected = [0.0] * len(rows)
        for i, each in enumerate(found):
            if each is not None:
                likely = each.first(numbers.most).likely(numbers.least)
                drafts[i], expected[i] = likely.token_ids, likely.score
                sources[i] = self.lookup.source
            elif launched[i] is None:
                room = numbers.asked - len(proposed[i])
                if proposed[i] and room > 0:
                    more = self.lookup.extend(rows[i], proposed[i], room)
                    drafts[i] = proposed[i] + more.token_ids
        if allowed is not NO_GRAMMARS:
            for i, draft in allowed.finish(drafts).items():
                sources[i] = GRAMMAR if draft.is_forced else sources[i]
                drafts[i] = draft.token_ids
        if self._limits:
            drafts = [
                each[: self._limits.get(row, len(each))]
                for row, each in zip(rows, drafts, strict=True)
            ]
        # What must follow is certain, and sequences that want no drafts do not count.
        which = [
            i for i, source in enumerate(sources) if source != GRAMMAR and found[i] is not NO_DRAFTS
        ]
        candidates = [Candidates(sources[i], len(drafts[i]), expected[i]) for i in which]
        for i, count in zip(which, self._policy.fit(numbers, candidates), strict=True):
            drafts[i] = drafts[i][:count]
        return list(zip(drafts, sources, strict=True))

    def observe(self, batch: ScheduledBatch, output: StepOutput, seconds: float | None) -> None:
        """Learn from a finished step, whose drafts were merged last.

        Args:
            seconds: that it took, drafting included; None if another like it would take another
                time.
        """
        verified, num_rows = [], 0
        for sequence, result in zip(batch.sequences, output.sequences, strict=True):
            if sequence.wants_sample and sequence.wants_drafts:
                accepted = max(min(len(result.token_ids) - 1, sequence.num_drafts), 0)
                source, num_drafts = sequence.draft_source, sequence.num_drafts
                verified.append(Verification(source, num_drafts, accepted))
                num_rows += num_drafts + 1
                if source == self.source and num_drafts:
                    self._num_observed = min(self._num_observed + 1, _ACCEPTED_WINDOW)
                    self._accepted += (accepted - self._accepted) / self._num_observed
        usual = seconds if num_rows == batch.num_tokens else None
        self._policy.observe(self._merged, verified, usual)


def _of_proposer(
    made: Sequence[np.ndarray], num_sequences: int, least: float
) -> Sequence[list[int]]:
    """The proposer's drafts of each sequence, as far as it is sure enough of them if it says so.

    Args:
        made, least: as in `Drafter.merge`, and in its numbers.
    """
    if not made:
        return [[]] * num_sequences
    token_ids: list[list[int]] = made[0].tolist()
    if len(made) == 1 or not least:
        return token_ids
    return [
        Continuation(drafts, confidences).likely(least).token_ids
        for drafts, confidences in zip(token_ids, made[1].tolist(), strict=True)
    ]
