"""Rows of steps that decode, as a graph has them on the device alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom.sampling_params import Needs

_FILTERS = Needs.TOP_K | Needs.TOP_P | Needs.MIN_P
# How rows may be chosen, cheapest first: greedily, at a temperature, with filters.
KINDS = (Needs(0), Needs.TEMPERATURE, Needs.TEMPERATURE | _FILTERS)


def kind_of(needs: Needs) -> Needs:
    """The cheapest kind that chooses rows with these needs right; other needs do not count."""
    wanted = needs & KINDS[-1]
    return next(kind for kind in KINDS if wanted & kind == wanted)


@dataclass(frozen=True)
class DecodeRows:
    """B sequences with n rows each, T in all: a newest token, its drafts, and padding behind them.

    Attributes:
        rows: [B] int64, of the sampling state.
        input_ids, positions: [T] int64.
        places: [T] int64, 0 to T - 1.
        num_drafts: [B] int64.
        next_token_ids: [T] int64, which gets the sampled tokens; None if nobody reads them.
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    num_drafts: torch.Tensor
    next_token_ids: torch.Tensor | None

    @property
    def query_len(self) -> int:
        return len(self.input_ids) // len(self.rows)
