"""Builds training batches from texts and their features."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from atom_train.data.dataset import Example
from atom_train.data.features import FeatureSource
from atom_train.data.target_probs import TargetProbabilities
from atom_train.networks.layers import TrainingBatch

# Texts are sorted by length within groups of this size, to reduce padding.
_SORT_GROUP = 256
# Greedy texts are learnt at a temperature that stresses the most likely token and has gradients.
GREEDY_TEMPERATURE = 0.5


def trained_rows(example: Example) -> int:
    """The number of rows of a text that draft."""
    return int(example.mask[1 : len(example) - 1].sum())


def plan_epoch(
    examples: Sequence[Example], rows_per_batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """The texts of every batch of an epoch: each text once; deterministic."""
    rng = random.Random(f"{seed} {epoch}")
    order = list(range(len(examples)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), _SORT_GROUP):
        group = sorted(order[start : start + _SORT_GROUP], key=lambda i: len(examples[i]))
        batch: list[int] = []
        rows = 0
        for i in group:
            batch.append(i)
            rows += trained_rows(examples[i])
            if rows >= rows_per_batch:
                batches.append(batch)
                batch, rows = [], 0
        if batch:
            batches.append(batch)
    rng.shuffle(batches)
    return batches


@dataclass(frozen=True)
class Targets:
    """The target's probabilities of the tokens that the draft knows, truncated to the largest.

    Attributes:
        ids: [n - 1, K] int32 draft token ids, most likely first.
        probs: [n - 1, K]; a row sums to 1 less what is left out.
    """

    ids: torch.Tensor
    probs: torch.Tensor


class BatchBuilder:
    """Builds training batches.

    Args:
        target: the distributions to learn.
        depth: number of unrolled draft steps.
        num_targets: K, the number of entries kept of a distribution.
    """

    def __init__(
        self,
        source: FeatureSource,
        target: TargetProbabilities,
        depth: int,
        num_targets: int,
        device: torch.device,
    ) -> None:
        self._source = source
        self._target = target
        self._hidden = target.hidden_size
        self._depth = depth
        self._num_targets = min(num_targets, len(target.vocabulary))
        self._device = device
        # Cached: small, and the same in every epoch.
        self._targets: dict[int, Targets] = {}

    def build(self, examples: Sequence[Example]) -> TrainingBatch:
        features = [f.to(self._device) for f in self._source.features(examples)]
        targets = [self._targets_of(e, f) for e, f in zip(examples, features, strict=True)]
        parts = [
            self._rows(e, f, b) for b, (e, f) in enumerate(zip(examples, features, strict=True))
        ]
        first_rows = torch.tensor([0] + [len(p.token_ids) for p in parts]).cumsum(0).tolist()
        first_targets = torch.tensor([0] + [len(t.ids) for t in targets]).cumsum(0).tolist()
        return TrainingBatch(
            token_ids=torch.cat([p.token_ids for p in parts]),
            aux=torch.cat([p.aux for p in parts]).float(),
            positions=torch.cat([p.positions for p in parts]),
            texts=torch.cat([p.texts for p in parts]),
            active=torch.cat([p.active + n for p, n in zip(parts, first_rows, strict=False)]),
            temperatures=torch.cat([p.temperatures for p in parts]),
            next_token_ids=torch.cat([p.next_token_ids for p in parts], dim=1),
            targets=torch.cat(
                [p.targets + n for p, n in zip(parts, first_targets, strict=False)], dim=1
            ),
            valid=torch.cat([p.valid for p in parts], dim=1),
            target_ids=torch.cat([t.ids for t in targets]).long(),
            target_probs=torch.cat([t.probs for t in targets]).float(),
            answer_ids=torch.cat([p.answer_ids for p in parts], dim=1),
            final=torch.cat([f[:, -self._hidden :] for f in features]),
        )

    def _rows(self, example: Example, features: torch.Tensor, text: int) -> TrainingBatch:
        """The rows 0 .. n - 3 of a text: the last token has no features and no next token."""
        ids, n = example.token_ids.long().to(self._device), len(example)
        rows = torch.arange(n - 2, device=self._device)
        active = example.mask[1 : n - 1].to(self._device).nonzero()[:, 0]
        steps = torch.arange(self._depth, device=self._device)[:, None]
        # Step j of row t predicts token t + 2 + j, with the target distribution of row t + 1 + j.
        sources = active + 1 + steps
        valid = sources <= n - 2
        sources = sources.clamp(max=n - 2)
        empty = features.new_empty(0)
        return TrainingBatch(
            token_ids=ids[1 : n - 1],
            aux=features[: n - 2, : -self._hidden],
            positions=rows,
            texts=torch.full_like(rows, text),
            active=active,
            temperatures=torch.full(
                active.shape, example.temperature or GREEDY_TEMPERATURE, device=self._device
            ),
            next_token_ids=ids[sources],
            targets=sources,
            valid=valid,
            target_ids=empty,
            target_probs=empty,
            answer_ids=ids[sources + 1],
            final=empty,
        )

    def _targets_of(self, example: Example, features: torch.Tensor) -> Targets:
        known = self._targets.get(example.index)
        if known is None:
            temperature = example.temperature or GREEDY_TEMPERATURE
            logprobs = self._target.logprobs(features[:, -self._hidden :], temperature)
            values, ids = logprobs.topk(self._num_targets, dim=-1)
            known = Targets(ids.int(), values.exp().to(torch.float16))
            self._targets[example.index] = known
        return known


def batches_from(
    examples: Sequence[Example], rows_per_batch: int, seed: int, epoch: int, skip: int
) -> Iterator[tuple[int, int, list[Example]]]:
    """Endless (epoch, index in the epoch, texts), starting after `skip` batches of `epoch`."""
    while True:
        plan = plan_epoch(examples, rows_per_batch, seed, epoch)
        for place in range(skip, len(plan)):
            yield epoch, place, [examples[i] for i in plan[place]]
        epoch, skip = epoch + 1, 0
