"""The methods of speculation: what each takes, and who builds its proposer.

A new method is a line here and the file with its proposer (and one that loads its weights, if it
has any). The builder is named, not imported: this file lies below the configuration, which checks
options against it, and options are read before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SpeculativeMethod:
    """One method.

    Attributes:
        builder: `module:function` of a `spec_decode.factory.ProposerBuilder`.
        takes_draft_model: whether it needs the name of a draft, or has no use for one.
        takes_lookup: whether a lookup in the text so far can go before its own drafts; not when
            it is a lookup itself.
        takes_ngram_bounds: whether it looks suffixes up, without a lookup beside it.
    """

    builder: str
    takes_draft_model: bool = False
    takes_lookup: bool = True
    takes_ngram_bounds: bool = False


SPECULATIVE_METHODS = {
    "eagle3": SpeculativeMethod("atom.spec_decode.factory:create_eagle3", takes_draft_model=True),
    "mtp": SpeculativeMethod("atom.spec_decode.factory:create_mtp"),
    "ngram": SpeculativeMethod(
        "atom.spec_decode.factory:create_ngram", takes_lookup=False, takes_ngram_bounds=True
    ),
}


def methods_that(say: Callable[[SpeculativeMethod], bool]) -> str:
    """The names of the methods of which `say` is true, as a message lists them."""
    return " or ".join(name for name, method in SPECULATIVE_METHODS.items() if say(method))
