"""Drafts from grammars: the text that must follow, and what a grammar leaves of other drafts.

Most of a document under a schema is known before it is written: keys, quotes, brackets. Only its
white space is free, and documents are regular in that. So what must follow apart from white space
is spelled in tokens, with the white space that the document had in such places before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from atom.structured_output.spelling import Spelling
from atom.structured_output.state import GrammarState, Walk
from atom.structured_output.white_space import WHITE_SPACE, WhiteSpace

# The source of drafts that had to follow.
GRAMMAR = "grammar"

# No grammar lets it follow unless it lets free text follow.
_LETTER = b"a"
_DIGIT = b"0"
# Bytes of a foreseen text per token that is still wanted.
_TOKEN_BYTES = 8
# Known bytes that are kept of each text: enough to spell what follows them.
_TAIL = 64


@dataclass
class _Text:
    """A sequence's text, as far as it has been read."""

    num_read: int = 0
    tail: bytes = b""
    space: WhiteSpace = field(default_factory=WhiteSpace)

    def read(self, text: bytes) -> None:
        self.tail = (self.tail + text)[-_TAIL:]
        self.space.read(text)

    def copy(self) -> _Text:
        return _Text(self.num_read, self.tail, self.space.copy())


@dataclass(frozen=True)
class GrammarDraft:
    """Attributes:
    token_ids: the drafts, which the grammar allows.
    is_forced: whether the first of them had to follow.
    """

    token_ids: list[int]
    is_forced: bool


@dataclass
class _Walker:
    """Drafts of one sequence, each of which its grammar allows.

    Attributes:
        index: of the sequence among those sampled.
        num_forced: how many of the first drafts had to follow.
        has_ended: whether the last token offered was refused, so that nothing can follow it.
        was_guided: whether its drafts were offered one by one.
    """

    index: int
    walk: Walk
    text: _Text
    drafts: list[int] = field(default_factory=list)
    num_forced: int = 0
    has_ended: bool = False
    was_guided: bool = False

    def follow(self, token_ids: Sequence[int]) -> None:
        """Go on by drafts that were made without the grammar, up to the first that it refuses."""
        for token_id in token_ids:
            if self.offer(token_id) != token_id:
                return

    def offer(self, token_id: int) -> int:
        """Go on by this token if it is allowed, or by what must follow; returns the token."""
        if not self.has_ended and not self.walk.is_finished:
            if forced := _forced(self.walk, self.text, 1):
                if self.num_forced == len(self.drafts):
                    self.num_forced += len(forced)
                self._take(forced)
                return forced[0]
            if self.walk.accept(token_id):
                self._take([token_id])
                return token_id
        self.has_ended = True
        return token_id

    def go_on(self, most: int) -> None:
        """Add what must follow, up to so many drafts in all."""
        while not self.has_ended and not self.walk.is_finished and len(self.drafts) < most:
            forced = _forced(self.walk, self.text, most - len(self.drafts))
            if not forced:
                return
            if self.num_forced == len(self.drafts):
                self.num_forced += len(forced)
            self._take(forced)

    def _take(self, token_ids: list[int]) -> None:
        self.drafts += token_ids
        self.text.read(self.walk.spelling.text(token_ids))


class GrammarGuide:
    """Lets a proposer draft what grammars allow, token by token."""

    def __init__(self, walkers: Sequence[_Walker]) -> None:
        self._walkers = walkers

    def restrict(self, logits: torch.Tensor, target_ids: torch.Tensor | None) -> None:
        """Write -inf for tokens that are not allowed, unless none is.

        Args:
            logits: [S, V_draft] on the CPU, of the next draft.
            target_ids: [V_draft] int64, the token ids; None if they are the indices.
        """
        for walker in self._walkers:
            if walker.has_ended or walker.walk.is_finished:
                continue
            with walker.walk.timed():
                allowed = torch.from_numpy(walker.walk.allowed())
            permitted = allowed[: logits.shape[1]] if target_ids is None else allowed[target_ids]
            if permitted.any():
                logits[walker.index].masked_fill_(~permitted, -torch.inf)

    def take(self, token_ids: torch.Tensor) -> None:
        """Write the drafts that follow from those that were chosen, [S] int64."""
        for walker in self._walkers:
            walker.was_guided = True
            with walker.walk.timed():
                token_ids[walker.index] = walker.offer(int(token_ids[walker.index]))


class GrammarDrafts:
    """The drafts of a step's sequences with grammars."""

    def __init__(self, walkers: Sequence[_Walker], most: int) -> None:
        self._walkers = walkers
        self._most = most

    def guide(self, found: Sequence[object]) -> GrammarGuide:
        """For a proposer that drafts for the sequences for which nothing was found (None)."""
        return GrammarGuide([w for w in self._walkers if found[w.index] is None])

    def finish(self, drafts: Sequence[Sequence[int]]) -> dict[int, GrammarDraft]:
        """The drafts by index of the sequence, with what must follow them.

        Args:
            drafts: of each sampled sequence; where no guide was followed, they count as far as the
                grammar allows them.
        """
        for walker in self._walkers:
            with walker.walk.timed():
                if not walker.was_guided:
                    walker.follow(drafts[walker.index][: self._most])
                walker.go_on(self._most)
        return {w.index: GrammarDraft(w.drafts, w.num_forced > 0) for w in self._walkers}


# Of a step whose sequences have no grammars, or whose grammars draft nothing.
NO_GRAMMARS = GrammarDrafts([], 0)


class GrammarDrafter:
    """Drafts for sequences with grammars, by row.

    Args:
        most: drafts per step.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: dict[int, _Text] = {}

    def forget(self, rows: Sequence[int]) -> None:
        """Drop what is known of these rows' sequences."""
        for row in rows:
            self._texts.pop(row, None)

    @contextmanager
    def drafts(
        self,
        rows: Sequence[int],
        grammars: Sequence[GrammarState | None],
        outputs: Sequence[Sequence[int]],
    ) -> Iterator[GrammarDrafts]:
        """Drafts after the outputs of those of the sequences, each with its row, that have
        grammars.
        """
        with ExitStack() as walks:
            walkers = []
            for index, (row, state, output) in enumerate(zip(rows, grammars, outputs, strict=True)):
                walk = None if state is None else walks.enter_context(state.ahead())
                if walk is not None:
                    walkers.append(_Walker(index, walk, self._read(row, walk.spelling, output)))
            yield GrammarDrafts(walkers, self._most)

    def _read(self, row: int, spelling: Spelling, outputs: Sequence[int]) -> _Text:
        """A copy of the sequence's text, which may be read further."""
        known = self._texts.setdefault(row, _Text())
        known.read(spelling.text(outputs[known.num_read :]))
        known.num_read = len(outputs)
        return known.copy()


def _forced(walk: Walk, text: _Text, most: int) -> list[int]:
    """Go on by the tokens that must follow the text, as far as they are certain."""
    start = walk.num_steps
    foreseen, token_id, after = _foresee(walk, text.space.copy(), most * _TOKEN_BYTES)
    walk.back(start)
    if token_id is not None:
        return [token_id] if walk.accept(token_id) else []
    if not foreseen:
        return []
    accepted = []
    for t in walk.spelling.spell(text.tail, foreseen, after)[:most]:
        if not walk.accept(t):
            break
        accepted.append(t)
    return accepted


def _foresee(walk: Walk, space: WhiteSpace, most: int) -> tuple[bytes, int | None, bytes]:
    """Go on by all text that must follow, apart from white space.

    Returns:
        The text; if it is empty, the only token that is allowed, if there is only one; and a byte
        that may follow.
    """
    foreseen = b""
    while len(foreseen) < most:
        more = walk.forced_text()
        if not more:
            if walk.accept_text(_LETTER):
                return foreseen, None, _LETTER
            allowed = np.flatnonzero(walk.allowed())
            if len(allowed) == 1:
                return foreseen, None if foreseen else int(allowed[0]), b""
            following = set(walk.spelling.first_bytes[allowed].tolist())
            after = following.difference(WHITE_SPACE)
            if after == following or not after:
                return foreseen, None, _typical(after)
            if len(after) > 1:
                return foreseen + (space.guess(0) or b""), None, _typical(after)
            [byte] = after
            blank = space.guess(byte)
            if blank is None:
                return foreseen, None, b""
            more = blank + bytes((byte,))
        if not walk.accept_text(more):
            break
        space.read(more)
        foreseen += more
    return foreseen, None, b""


def _typical(following: set[int]) -> bytes:
    """One of the bytes that may follow, for spelling what precedes it."""
    if _DIGIT[0] in following:
        return _DIGIT
    highest = max(following, default=0)
    return bytes((highest,)) if 0 < highest < 128 else b""
