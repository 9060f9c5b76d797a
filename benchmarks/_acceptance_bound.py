"""How often drafts could be accepted at best, on the rows that a coupled draft model drafts for.

A draft is verified only where all before it were accepted. On those rows, with the target's
distribution p and the draft's q after temperature and filters: a likeliest token is sampled with
the probability that p gives it; rejection sampling accepts a sample of q with probability
sum(min(p, q)), 1 - total variation, and no way of drafting one token from q can be better.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from _acceptance_report import bound_line
from _arms import Conversation, OfflineArm, Sampling

from atom.config import ConfigError
from atom.model_engine.arg_utils import EngineOptions
from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch.draft_choice import filtered
from atom.sampling.plan import SamplePlan
from atom.sampling.sampler import Sampler
from atom.spec_decode.proposers.base import Chosen, DraftSampler, Guide


@dataclass
class _Place:
    """Sums over the rows of one place among the drafts."""

    rows: int = 0
    likeliest: float = 0.0
    coupled: float = 0.0
    bound: float = 0.0


@dataclass
class RowLog:
    """Compares what was drafted with what is verified in the next step, of one sequence."""

    places: list[_Place] = field(default_factory=list)
    _drafted: list[tuple[torch.Tensor, torch.Tensor | None, int]] = field(default_factory=list)

    def draft(self, q: torch.Tensor, token_ids: torch.Tensor | None, token_id: int) -> None:
        """The next draft.

        Args:
            q: [V_draft], its distribution.
            token_ids: [V_draft], the target's tokens of q; None if these are the same.
            token_id: that was chosen.
        """
        self._drafted.append((q, token_ids, token_id))

    def verify(self, probabilities: torch.Tensor, sampled: list[int]) -> None:
        """The target's distributions [R, V] behind R - 1 drafts, and its samples."""
        drafted, self._drafted = self._drafted, []
        pairs = zip(drafted[: len(sampled) - 1], probabilities, sampled, strict=False)
        for i, ((q, token_ids, token_id), p, sample) in enumerate(pairs):
            if token_ids is not None:
                p = p[token_ids]
            if i == len(self.places):
                self.places.append(_Place())
            place = self.places[i]
            place.rows += 1
            place.likeliest += float(p[int(q.argmax())])
            place.coupled += token_id == sample
            place.bound += float(torch.minimum(p, q).sum())
            if token_id != sample:
                break

    def summary(self) -> dict[str, list[float]]:
        """Shares of the drafts, by place, that are accepted once all before them are."""
        return {
            name: [getattr(place, name) / place.rows for place in self.places]
            for name in ("likeliest", "coupled", "bound")
        }


def tokens_per_forward(rates: list[float]) -> float:
    """Expected, if a draft at place i is accepted with rates[i] once all before it are."""
    expected, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        expected += reached
    return expected


def distribution(
    scores: torch.Tensor, options: SamplingMetadata, scale: float = 1.0
) -> torch.Tensor:
    """What rows of scores [R, V] are sampled from -> [R, V] float32.

    Args:
        options: none of the rows is greedy.
        scale: of the temperatures.
    """
    assert options.temperature is not None
    scores = scores.float()
    relative = scores - scores.amax(-1, keepdim=True)
    weights = (relative / (options.temperature * scale)[:, None]).exp()
    weights = filtered(scores, weights, options)
    return weights / weights.sum(-1, keepdim=True)


@contextmanager
def rows_logged() -> Iterator[RowLog]:
    """Logs the drafts of engines in this process that run one request at a time, op by op.

    Greedy requests log nothing: their drafts are the likeliest tokens. Edits of the logits, such as
    penalties, are not seen.
    """
    log = RowLog()
    choose, choose_draft = Sampler._choose, DraftSampler.choose

    def choose_and_log(self: Sampler, plan: SamplePlan, logits: torch.Tensor) -> Any:
        sampled, logprobs = choose(self, plan, logits)
        if plan.rows is not None:
            gather = self._ops.sampling_options
            options = self._rows.metadata(plan.rows, plan.positions, plan.filters, gather)
            log.verify(distribution(logits, options), sampled.tolist())
        return sampled, logprobs

    def draft_and_log(
        self: DraftSampler,
        logits: torch.Tensor,
        race: SamplingMetadata | None,
        positions: torch.Tensor,
        guide: Guide | None = None,
        ahead: int = 2,
    ) -> Chosen:
        chosen = choose_draft(self, logits, race, positions, guide, ahead)
        if race is not None:
            (q,) = distribution(logits, race, self.temperature_scale)
            log.draft(q, self.token_ids, int(chosen.token_ids[0]))
        return chosen

    with (
        patch.object(Sampler, "_choose", choose_and_log),
        patch.object(DraftSampler, "choose", draft_and_log),
    ):
        yield log


def measure_bounds(
    args: argparse.Namespace,
    plan_arms: Callable[[argparse.Namespace], dict[str, EngineOptions]],
    read_prompts: Callable[[argparse.Namespace], dict[str, list[Conversation]]],
) -> list[dict[str, Any]]:
    """What the first drafting arm's drafts reach and could reach, at each temperature above 0.

    Raises:
        ConfigError: for servers, and when no temperature is above 0.
    """
    temperatures = [t for t in args.temperature if t > 0]
    if args.base_url is not None or not temperatures:
        raise ConfigError("--bound needs engines in this process and a --temperature above 0")
    name, options = list(plan_arms(args).items())[1]
    arm = OfflineArm(name, {**options, "enforce_eager": True})
    results = []
    try:
        for prompts, conversations in read_prompts(args).items():
            for temperature in temperatures:
                with rows_logged() as log:
                    for i, conversation in enumerate(conversations):
                        sampling = Sampling(
                            temperature, args.sampling_seed + i, args.max_tokens, args.top_p
                        )
                        arm.answer([conversation], [sampling])
                rates = log.summary()
                reached = {f"{n}_tokens_per_forward": tokens_per_forward(rates[n]) for n in rates}
                where = {
                    "prompts": prompts,
                    "temperature": temperature,
                    "top_p": args.top_p,
                    "arm": name,
                }
                results.append({**where, **rates, **reached})
                print(bound_line(results[-1]), flush=True)
    finally:
        arm.close()
    return results
