"""The interface of a grammar library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from atom.structured_output.params import StructuredOutput
from atom.structured_output.spelling import Spelling

if TYPE_CHECKING:
    from atom.structured_output.vocabulary import Vocabulary

# [rows, ceil(V / 32)] int32; bit t % 32 of word t // 32 is set if token t is allowed.
TokenMask = NDArray[np.int32]


class GrammarError(ValueError):
    """The grammar cannot be compiled, or no text satisfies it; the message says why."""


class CompileStoppedError(GrammarError):
    """Compilation was stopped for lack of time or memory, or failed with its process; a retry may
    succeed.
    """


class Matcher(Protocol):
    """The position of one text in a grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether an end token was accepted, so that nothing can follow."""

    def fill(self, mask: TokenMask, row: int) -> None:
        """Write the mask of allowed next tokens to a row. End tokens are allowed only after a
        complete text. Must not be called when finished.
        """

    def accept(self, token_id: int) -> bool:
        """Advance by a token; false, with no change, if it is not allowed."""

    def accept_text(self, text: bytes) -> bool:
        """Advance by a text; false, with no change, if it is not allowed. It counts as one token
        for `rollback`.
        """

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""

    def forced_text(self) -> bytes:
        """The text that must follow, which may be empty."""


class Grammar(Protocol):
    """A grammar compiled for one vocabulary; shared by the sequences that use it.

    Attributes:
        spelling: of texts in the vocabulary's tokens; None if nobody will draft.
    """

    spelling: Spelling | None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""

    def create_matcher(self) -> Matcher: ...


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary. Thread-safe."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, for compiling in another process."""

    def compile(self, wanted: StructuredOutput) -> Grammar:
        """Raises:
        GrammarError: when the grammar is invalid, or no text satisfies it.
        """
        ...
