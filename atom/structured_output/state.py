"""A sequence's position in its grammar, with masks for draft rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from atom.structured_output.base import Matcher, TokenMask
from atom.structured_output.spelling import Spelling

ALL_TOKENS = -1

# Limits of the processor time for the matcher of one sequence: per step and in total, in excess of
# an allowance per token. Some short patterns take exponential time.
_STEP_SECONDS, _SECONDS, _TOKEN_SECONDS = 0.25, 1.0, 0.01
# Of drafting, likewise: in total, in excess of an allowance per step.
_DRAFT_SECONDS, _DRAFT_STEP_SECONDS = 0.1, 0.002


class GrammarState:
    """A sequence's matcher, positioned after its known tokens.

    Attributes:
        is_too_slow: the matcher exceeded its time limit and would delay other sequences. From then
            on it is not called, and `advance` accepts nothing.
    """

    def __init__(self, matcher: Matcher, spelling: Spelling | None = None) -> None:
        self.is_too_slow = False
        self._spelling = spelling
        self._matcher = matcher
        self._seconds = self._draft_seconds = 0.0

    def advance(self, token_ids: Sequence[int]) -> int:
        """Append new tokens.

        Returns:
            How many of them the grammar accepts. Tokens after an end token count as accepted, since
            they are never part of the text.
        """
        with self._timed(len(token_ids)):
            for count, token_id in enumerate(token_ids):
                if self._matcher.is_finished:
                    break
                if self.is_too_slow or not self._matcher.accept(token_id):
                    return count
        return len(token_ids)

    def fill(self, mask: TokenMask, first_row: int, drafts: Sequence[int]) -> None:
        """Write the masks of row `first_row` and of the row after each draft.

        Rows after a draft that the grammar rejects, or after an end token, are left unchanged: a
        rejected draft cannot be sampled, and nothing after an end counts. A row without allowed
        tokens is set to allow all: a token must be sampled, and `advance` will reject it.
        """
        if self.is_too_slow:
            mask[first_row] = ALL_TOKENS
            return
        with self._timed(0):
            self._fill(mask, first_row, drafts)

    def _fill(self, mask: TokenMask, first_row: int, drafts: Sequence[int]) -> None:
        accepted = 0
        for row, draft in enumerate([*drafts, None], start=first_row):
            if self._matcher.is_finished:
                break
            self._matcher.fill(mask, row)
            if not mask[row].any():
                mask[row] = ALL_TOKENS
                break
            if draft is None or not is_allowed(mask, row, draft):
                break
            if not self._matcher.accept(draft):
                break
            accepted += 1
        if accepted:
            self._matcher.rollback(accepted)

    @contextmanager
    def ahead(self) -> Iterator[Walk | None]:
        """A walk ahead of the known tokens, which is undone at the end; None where nothing should
        be drafted: drafts take longer than they can save, or nothing can follow.
        """
        is_slow = self.is_too_slow or self._draft_seconds > _DRAFT_SECONDS
        if is_slow or self._spelling is None or self._matcher.is_finished:
            yield None
            return
        walk = Walk(self._matcher, self._spelling)
        try:
            yield walk
        finally:
            walk.back(0)
            taken = walk.seconds - _DRAFT_STEP_SECONDS
            self._draft_seconds = max(self._draft_seconds + taken, 0.0)

    @contextmanager
    def _timed(self, num_tokens: int) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            taken = time.thread_time() - started - num_tokens * _TOKEN_SECONDS
            self._seconds = max(self._seconds + taken, 0.0)
            self.is_too_slow |= taken > _STEP_SECONDS or self._seconds > _SECONDS


class Walk:
    """Tries what may follow a sequence's known tokens.

    Attributes:
        spelling: of texts in tokens.
        num_steps: tokens and texts accepted.
        seconds: processor time that it took, where it was `timed`.
    """

    def __init__(self, matcher: Matcher, spelling: Spelling) -> None:
        self.spelling = spelling
        self.num_steps = 0
        self.seconds = 0.0
        self._matcher = matcher
        self._mask = np.empty((1, -(-len(spelling.tokens) // 32)), dtype=np.int32)

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_finished

    def accept(self, token_id: int) -> bool:
        """Go on by a token; false, with no change, if it is not allowed."""
        return self._step(self._matcher.accept(token_id))

    def accept_text(self, text: bytes) -> bool:
        return self._step(self._matcher.accept_text(text))

    def _step(self, accepted: bool) -> bool:
        self.num_steps += accepted
        return accepted

    def back(self, num_steps: int) -> None:
        """Undo all but the first steps."""
        if self.num_steps > num_steps:
            self._matcher.rollback(self.num_steps - num_steps)
            self.num_steps = num_steps

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - started

    def forced_text(self) -> bytes:
        return self._matcher.forced_text()

    def allowed(self) -> NDArray[np.bool_]:
        """[V], the tokens that are allowed next."""
        self._matcher.fill(self._mask, 0)
        bits = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little")
        return bits[: len(self.spelling.tokens)].view(np.bool_)


def is_allowed(mask: TokenMask, row: int, token_id: int) -> bool:
    return bool(int(mask[row, token_id >> 5]) >> (token_id & 31) & 1)
