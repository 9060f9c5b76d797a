"""The speculative decoding methods and their options.

To add one, add a line here and a file with its proposer (and a weight loader if it has weights).
The builder is a name, not an import: the configuration reads this table before anything heavy is
imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SpeculativeMethod:
    """One method.

    Attributes:
        builder: `module:function` of a `spec_decode.factory.ProposerBuilder`.
        takes_draft_model: whether it needs a draft model; otherwise giving one is an error.
        is_lookup: whether all drafts come from a lookup; otherwise one can go beside it.
        may_read_images: whether its drafts may read embeddings of images, by option.
    """

    builder: str
    takes_draft_model: bool = False
    is_lookup: bool = False
    may_read_images: bool = False


_BLOCK = SpeculativeMethod(
    "atom.spec_decode.proposers.block_draft:create_block", takes_draft_model=True
)

SPECULATIVE_METHODS = {
    "eagle3": SpeculativeMethod(
        "atom.spec_decode.proposers.eagle3:create_eagle3",
        takes_draft_model=True,
        may_read_images=True,
    ),
    "dflash": _BLOCK,
    "dflash2": _BLOCK,
    "dspark": _BLOCK,
    "draft_model": SpeculativeMethod(
        "atom.spec_decode.proposers.draft_model:create_draft_model", takes_draft_model=True
    ),
    "mtp": SpeculativeMethod("atom.spec_decode.proposers.mtp:create_mtp"),
    "suffix": SpeculativeMethod("atom.spec_decode.factory:create_suffix", is_lookup=True),
}


def methods_that(say: Callable[[SpeculativeMethod], bool]) -> str:
    """The names of the methods for which `say` is true, joined by "or"."""
    return " or ".join(name for name, method in SPECULATIVE_METHODS.items() if say(method))
