"""Which tokens a draft model proposes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch.draft_choice import choose_drafts
from atom.model_ops.layer_context import LayerContext
from atom.spec_decode.proposers.base import Chosen, Guide

# The op `choose_drafts`.
ChooseOp = Callable[
    [torch.Tensor, SamplingMetadata, torch.Tensor | None, float, int, bool],
    tuple[torch.Tensor, torch.Tensor | None],
]
_ALL_GREEDY = SamplingMetadata()


class DraftSampler:
    """Chooses drafts from a draft model's logits: those that the target is likely to sample.

    The target's sample is the winner of a race with noise that is known before: a function of the
    request's seed, the position and the token. A draft wins the same race among the draft's logits.
    Verification keeps a draft if it is the sample, so the race can only raise its chance.

    Attributes:
        token_ids: [V_draft] int32, the target's token of each logit; None if these are the same.
        temperature_scale: of the requests' temperatures, at which drafts race.
        confident: whether confidences are computed.
    """

    def __init__(
        self,
        token_ids: torch.Tensor | None = None,
        temperature_scale: float = 1.0,
        *,
        op: ChooseOp = choose_drafts,
        confident: bool = False,
    ) -> None:
        self.confident = confident
        self.token_ids = None if token_ids is None else token_ids.int()
        self.temperature_scale = temperature_scale
        self._op = op

    def choose(
        self,
        logits: torch.Tensor,
        draft_sampling: SamplingMetadata | None,
        positions: torch.Tensor,
        guide: Guide | None = None,
        ahead: int = 2,
    ) -> Chosen:
        """One draft for each row of logits [S, V_draft].

        Args:
            logits: a guide writes to them.
            draft_sampling, guide: as in `VerifiedStep`.
            positions: [S] int64; the drafts' positions are `ahead` more.
        """
        options = (
            _ALL_GREEDY if draft_sampling is None else replace(draft_sampling, positions=positions)
        )
        if guide is not None:
            guide.restrict(logits, self.token_ids)
        token_ids, scale = self.token_ids, self.temperature_scale
        chosen = Chosen(*self._op(logits, options, token_ids, scale, ahead, self.confident))
        if guide is not None:
            guide.take(chosen.token_ids)
        return chosen


def create_choice(
    context: LayerContext,
    vocab_size: int,
    token_ids: torch.Tensor | None = None,
    temperature_scale: float = 1.0,
    *,
    confident: bool = False,
) -> DraftSampler:
    """The choice of drafts from logits [S, vocab_size], with this platform's op."""
    op = context.ops.resolve("choose_drafts", torch.float32, vocab_size=vocab_size)
    return DraftSampler(token_ids, temperature_scale, op=op, confident=confident)
