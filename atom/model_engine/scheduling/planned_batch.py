"""Builds a `ScheduledBatch` sequence by sequence."""

from __future__ import annotations

from atom.batch import LaunchedStep, NewSequence, ScheduledBatch, ScheduledSequence
from atom.model_engine.sequence import Sequence


class PlannedBatch:
    """The sequences of the step being scheduled, in order.

    Attributes:
        sequences: as objects, since by the time the results arrive an id may belong to another
            sequence.
        budget: how many more tokens the step may compute.

    Args:
        before: the step whose results are not known yet; None if there is none.
    """

    def __init__(self, budget: int, before: LaunchedStep | None = None) -> None:
        self.sequences: list[Sequence] = []
        self.budget = budget
        self._before = before
        self._scheduled: list[ScheduledSequence] = []
        self._new: list[NewSequence] = []
        self._num_decoding = 0

    def add(self, seq: Sequence, count: int, num_drafts: int = 0) -> None:
        """Schedule the next `count` known tokens and, after the last known one, `num_drafts`
        drafts.
        """
        start, known = seq.most_computed, seq.token_ids
        end, is_ahead = start + count, seq.launched.is_sampling
        is_last = is_ahead or end == len(known)
        num_sent, seq.num_sent_blocks = seq.num_sent_blocks, len(seq.block_ids)
        source, drafts = seq.draft_source, seq.draft_token_ids
        token_ids = known[start:end]
        if is_ahead:
            assert self._before is not None
            token_ids, source = [0] * count, self._before.draft_source
            drafts = [0] * num_drafts
            if seq.drafts_after_next is not None:
                drafts, source = seq.drafts_after_next
        if num_drafts:
            token_ids += drafts[:num_drafts]
        scheduled = ScheduledSequence(
            seq.request.id,
            seq.row,
            token_ids,
            start,
            seq.block_ids[num_sent:],
            seq.num_sent_blocks,
            is_last,
            num_drafts,
            source,
            None if is_last else known[end],
            seq.request.params.speculation,
            is_ahead,
            is_ahead and seq.drafts_after_next is not None,
            seq.new_windows,
            seq.load_state,
            seq.keep_state_behind(end) if not (is_ahead or num_drafts) else None,
        )
        seq.new_windows = seq.load_state = None
        seq.launched.add(scheduled)
        # A prompt's last token may be as alone as a newest token is.
        self._num_decoding += is_last and count == 1 and start >= seq.num_prompt_tokens
        self.sequences.append(seq)
        self._scheduled.append(scheduled)
        self.budget -= len(token_ids)

    def start(self, seq: Sequence, count: int) -> None:
        """Like `add`, for a sequence that starts or resumes."""
        self.add(seq, count)
        request, outputs = seq.request, seq.token_ids[seq.num_prompt_tokens :]
        self._new.append(
            NewSequence(
                request.id,
                seq.row,
                request.prompt_token_ids,
                outputs,
                request.params,
                request.seed,
                request.cache_salt,
                request.images,
            )
        )

    def finish(self, freed_rows: list[int]) -> ScheduledBatch:
        """The batch. `freed_rows` are the rows that the runner must clear before the step."""
        return ScheduledBatch(self._scheduled, self._new, freed_rows, self._num_decoding)
