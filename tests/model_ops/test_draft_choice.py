"""Which token a draft proposes: the one that its target would sample from the draft's scores."""

from __future__ import annotations

import pytest
import torch
from model_ops import draft_rows
from model_ops.test_native_sampling import FILTERS, options_of

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.native import sampling as native
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.torch import draft_choice

REASON = native_build().reason
NATIVE = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
OPS = pytest.mark.parametrize(
    "choose",
    [draft_choice.choose_drafts, pytest.param(native.choose_drafts, marks=NATIVE)],
    ids=["torch", "native"],
)


@OPS
@pytest.mark.parametrize("filters", FILTERS, ids=lambda names: " ".join(sorted(names)) or "none")
def test_drafts_are_what_the_target_would_sample(
    choose: draft_rows.Choose, filters: set[str]
) -> None:
    generator = torch.Generator().manual_seed(len(filters))
    for size, num_tokens, rows in ((1, 3, 4), (37, 100, 90), (2500, 9000, 24), (9001, 9001, 6)):
        scores = torch.randn(rows, size, generator=generator) * 3
        draft_rows.check(
            choose, scores, options_of(filters, rows, num_tokens, generator), num_tokens
        )
    draft_rows.check(choose, torch.randn(5, 70, generator=generator), {}, 90)


@OPS
def test_every_row_gets_a_token(choose: draft_rows.Choose) -> None:
    """The next draft step looks it up, whatever the scores are."""
    scores = torch.tensor([[0.0, torch.nan, 1.0], [-torch.inf] * 3, [0.0, torch.inf, 1.0]])
    ids = torch.tensor([4, 6, 9], dtype=torch.int32)
    rows = torch.arange(3)
    for temperature in (0.0, 1.0):
        race = SamplingMetadata(
            temperature=torch.full((3,), temperature), seeds=rows, positions=rows
        )
        drafts, confidences = choose(scores, race, ids, 1.0, 2, True)
        assert drafts.tolist() == [6, 4, 6]
        assert confidences.tolist() == [0, 0, 0]


@OPS
def test_a_temperature_needs_seeds_and_positions(choose: draft_rows.Choose) -> None:
    with pytest.raises(ValueError, match="needs seeds and positions"):
        choose(torch.zeros(1, 4), SamplingMetadata(temperature=torch.ones(1)), None, 1.0, 0, False)


@NATIVE
def test_a_token_map_that_does_not_fit_is_refused() -> None:
    for bad in (torch.arange(3).int(), torch.arange(4)):
        with pytest.raises(ValueError, match="choose_drafts"):
            native.choose_drafts(torch.zeros(1, 4), SamplingMetadata(), bad, 1.0, 0, False)
