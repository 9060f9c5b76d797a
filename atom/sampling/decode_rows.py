"""Sampling and verification of steps that decode, from what a graph has on the device alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.model_ops.metadata import SamplingMetadata
from atom.sampling.ops import TORCH_OPS, SamplingOps
from atom.sampling.rows import Needs, SamplingRows

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


class DecodeSampler:
    """Does for such rows what a `Sampler` does for any, without a plan of the host's.

    Args:
        compute_logits: of hidden states [R, hidden].
        group, choose_greedily: as for `Sampler`.
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        rows: SamplingRows,
        ops: SamplingOps = TORCH_OPS,
        group: ParallelGroup = SINGLE,
        choose_greedily: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._compute_logits = compute_logits
        self._rows = rows
        self._ops = ops
        self._group = group
        self._choose_greedily = choose_greedily

    def update(self) -> None:
        """Write new sequences' options to the device, after `staging.send`."""
        self._rows.update()

    def race(self, rows: torch.Tensor) -> SamplingMetadata:
        """What drafts of `rows` [B] int64 are chosen with, some of which are not greedy."""
        return self._rows.metadata(rows, None, KINDS[-1], self._ops.sampling_options)

    def sample(
        self,
        given: DecodeRows,
        hidden_states: torch.Tensor,
        kind: Needs,
        accepted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sample all rows, and verify the drafts.

        Args:
            hidden_states: [T, hidden].
            kind: one of `KINDS`.
            accepted: [B] int64, how many drafts count as accepted; None if the samples decide.

        Returns:
            Tokens [B, n] and accepted drafts [B], as in `Verified`; and [B] int64, the row from
            which each newest token was sampled.
        """
        query_len = given.query_len
        sampled = self._choose(given, hidden_states, kind)
        tokens, matching = sampled[:, None], given.num_drafts  # which is 0
        if query_len > 1:
            drafts = given.input_ids.view(-1, query_len)[:, 1:]
            # Padding may match, too.
            tokens, matching = self._ops.verify_drafts(sampled, drafts, None, given.num_drafts)
        accepted = matching if accepted is None else accepted
        if given.next_token_ids is not None:
            every = given.next_token_ids, given.places, sampled, accepted, None
            return tokens, accepted, self._ops.place_samples(*every)
        if query_len == 1:
            return tokens, accepted, given.places
        return tokens, accepted, given.places[::query_len] + accepted

    def _choose(self, given: DecodeRows, hidden_states: torch.Tensor, kind: Needs) -> torch.Tensor:
        """[T] int64, on all ranks what the first one chooses."""
        if not kind and self._choose_greedily is not None:
            return self._choose_greedily(hidden_states)
        logits = self._compute_logits(hidden_states)
        if self._group.rank:
            return self._group.broadcast(torch.empty_like(given.input_ids))
        options = SamplingMetadata()
        if kind:
            how = kind, self._ops.sampling_options, given.query_len
            options = self._rows.metadata(given.rows, given.positions + 1, *how)
        return self._group.broadcast(self._ops.choose_tokens(logits, options))
