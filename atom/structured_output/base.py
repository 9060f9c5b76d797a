"""What the engine needs of a grammar library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from atom.structured_output.params import StructuredOutput

if TYPE_CHECKING:
    from atom.structured_output.vocabulary import Vocabulary

# [rows, ceil(vocabulary / 32)] int32: bit t % 32 of word t // 32 tells whether token t is allowed.
TokenMask = NDArray[np.int32]


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that no text fulfils; the message says why."""


class CompileStoppedError(GrammarError):
    """Compiling did not end, for lack of time, memory or a process; another time it may."""


class Matcher(Protocol):
    """One text's place in a grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether an end token was accepted; nothing can follow."""

    def fill(self, mask: TokenMask, row: int) -> None:
        """Write the allowed next tokens to a row; end tokens are among them only after a text
        that is complete. Not to be called when finished."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token; false, with nothing changed, when it is not allowed."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""


class Grammar(Protocol):
    """Compiled for one vocabulary; shared by all sequences that obey it."""

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""

    def create_matcher(self) -> Matcher: ...


class GrammarBackend(Protocol):
    """Compiles for one vocabulary; called from several threads."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What another process needs to compile the same."""

    def compile(self, wanted: StructuredOutput) -> Grammar:
        """Raises:
        GrammarError: when it is wrong, or no text fulfils it.
        """
        ...
