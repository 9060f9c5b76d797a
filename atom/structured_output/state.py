"""Where a sequence stands in its grammar, also at rows that follow drafts."""

from __future__ import annotations

from collections.abc import Sequence

from atom.structured_output.base import Matcher, TokenMask

ALL_TOKENS = -1


class GrammarState:
    """One sequence's matcher, kept at the end of its known tokens."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def advance(self, token_ids: Sequence[int]) -> int:
        """Take in new tokens.

        Returns:
            How many of them obey the grammar. What follows an end token counts: it is never
            part of the text.
        """
        for count, token_id in enumerate(token_ids):
            if self._matcher.is_finished:
                break
            if not self._matcher.accept(token_id):
                return count
        return len(token_ids)

    def fill(self, mask: TokenMask, first_row: int, drafts: Sequence[int]) -> None:
        """Write the allowed tokens of row `first_row` and of the rows behind each draft.

        Rows behind a draft that the grammar refuses stay as they are, as do rows behind an end
        token: the refused draft cannot be sampled, and what follows an end is dropped. A row
        where nothing is allowed becomes one where everything is: a token must be sampled, and
        `advance` will refuse it.
        """
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


def is_allowed(mask: TokenMask, row: int, token_id: int) -> bool:
    return bool(int(mask[row, token_id >> 5]) >> (token_id & 31) & 1)
