"""A sequence's position in its grammar, with masks for draft rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from atom.structured_output.base import Matcher, TokenMask

ALL_TOKENS = -1

# Limits of the processor time for the matcher of one sequence: per step and in total, in excess of
# an allowance per token. Some short patterns take exponential time.
_STEP_SECONDS, _SECONDS, _TOKEN_SECONDS = 0.25, 1.0, 0.01


class GrammarState:
    """A sequence's matcher, positioned after its known tokens.

    Attributes:
        is_too_slow: the matcher exceeded its time limit and would delay other sequences. From then
            on it is not called, and `advance` accepts nothing.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.is_too_slow = False
        self._matcher = matcher
        self._seconds = 0.0

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
    def _timed(self, num_tokens: int) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            taken = time.thread_time() - started - num_tokens * _TOKEN_SECONDS
            self._seconds = max(self._seconds + taken, 0.0)
            self.is_too_slow |= taken > _STEP_SECONDS or self._seconds > _SECONDS


def is_allowed(mask: TokenMask, row: int, token_id: int) -> bool:
    return bool(int(mask[row, token_id >> 5]) >> (token_id & 31) & 1)
