"""Constraints on single tokens: allowed tokens, bad words, logits processors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atom.sampling_params import LogitsProcessor
from atom.structured_output.base import TokenMask


@dataclass(frozen=True, eq=False)
class TokenValues:
    """Tokens and the values to add to their logits, on the device.

    Attributes:
        token_ids: [n] int64.
        values: [n] float32.
    """

    token_ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class BadWords:
    """Tokens that are banned after a prefix.

    Attributes:
        prefix: the generated tokens that must precede them; empty for always.
        bans: the banned tokens.
    """

    prefix: list[int]
    bans: TokenValues

    def rows(self, outputs: list[int], drafts: Sequence[int]) -> list[int]:
        """The rows of a sequence that follow the prefix; row j follows the first j drafts."""
        size = len(self.prefix)
        if size == 0:
            return list(range(len(drafts) + 1))
        text = [*outputs[-size:], *drafts]
        first = len(text) - len(drafts)  # where the text of row 0 ends
        return [
            j
            for j in range(len(drafts) + 1)
            if first + j >= size and text[first + j - size : first + j] == self.prefix
        ]


def read_bad_words(
    words: Sequence[Sequence[int]],
    vocab_size: int,
    create_values: Callable[[dict[int, float]], TokenValues],
) -> list[BadWords]:
    """Bad words grouped by prefix; words with tokens outside the vocabulary are left out."""
    by_prefix: dict[tuple[int, ...], dict[int, float]] = {}
    for word in words:
        if max(word) < vocab_size:
            by_prefix.setdefault(tuple(word[:-1]), {})[word[-1]] = -torch.inf
    return [BadWords(list(prefix), create_values(bans)) for prefix, bans in by_prefix.items()]


def allowed_mask(token_ids: Sequence[int], vocab_size: int) -> TokenMask:
    """Bit mask [ceil(V / 32)] int32 with the bits of these tokens set."""
    mask = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    ids = np.array(token_ids)
    np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return mask.view(np.int32)


@dataclass(frozen=True)
class ProcessedRow:
    """One row of logits that logits processors change on the host.

    Attributes:
        row: index into the edited rows.
        prompt, outputs: the tokens before it, drafts included.
    """

    row: int
    processors: Sequence[LogitsProcessor]
    prompt: list[int]
    outputs: list[int]

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply all processors to [V] float32; the result is on the CPU.

        Raises:
            ValueError: when one returns anything but a tensor of that shape.
        """
        logits = scores.cpu()
        for processor in self.processors:
            wants_prompt = len(inspect.signature(processor).parameters) == 3
            tokens = (self.prompt, self.outputs) if wants_prompt else (self.outputs,)
            changed = processor(*tokens, logits)
            if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
                raise ValueError(
                    f"a logits processor must return the logits, [{logits.shape[0]}], "
                    f"got {getattr(changed, 'shape', type(changed).__name__)}"
                )
            logits = changed
        return logits
