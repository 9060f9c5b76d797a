"""Rows of a draft's scores, and what a target would sample from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch import sampling

Choose = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def check(
    choose: Choose,
    scores: torch.Tensor,
    options: dict[str, torch.Tensor],
    num_tokens: int,
    device: torch.device | None = None,
    scale: float = 0.8,
    ahead: int = 2,
) -> None:
    """The drafts are what `choose_tokens` samples `ahead` positions later at `scale` times the
    temperature, if no other of the target's `num_tokens` tokens is possible; the confidences are
    the probabilities of that distribution.
    """
    rows, size = scores.shape
    generator = torch.Generator().manual_seed(size)
    ids = torch.randperm(num_tokens, generator=generator)[:size].sort().values
    race = SamplingMetadata(**options)
    there: dict[str, Any] = {name: value.to(device) for name, value in options.items()}
    arguments = scores.to(device), SamplingMetadata(**there), ids.int().to(device), scale, ahead
    drafts, confidences = choose(*arguments, True)
    full = torch.full((rows, num_tokens), -torch.inf).index_copy_(1, ids, scores.float())
    later = race
    if race.temperature is not None:
        assert race.positions is not None
        later = replace(
            race, temperature=race.temperature * scale, positions=race.positions + ahead
        )
    assert drafts.tolist() == sampling.choose_tokens(full, later).tolist()
    assert choose(*arguments, False)[1] is None
    assert choose(*arguments, False)[0].equal(drafts)
    expected = [_probability(full[i], later, i, int(drafts[i])) for i in range(rows)]
    assert confidences is not None
    torch.testing.assert_close(confidences.cpu(), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def _probability(scores: torch.Tensor, m: SamplingMetadata, row: int, token: int) -> float:
    """Of a token after temperature, min_p, top_k and top_p."""
    if m.temperature is None or not m.temperature[row] > 0:
        return float(scores.double().softmax(-1)[token])
    weights = (scores.double() / m.temperature[row]).softmax(-1)
    values, order = weights.sort(descending=True, stable=True)
    if m.min_p is not None:
        values = values * (values >= values[0] * m.min_p[row].double())
    if m.top_k is not None:
        values[m.top_k[row] :] = 0
    if m.top_p is not None and m.top_p[row] < 1:
        before = values.cumsum(-1) - values
        values = values * (before < m.top_p[row].double() * values.sum())
    return float(values[order == token] / values.sum())
