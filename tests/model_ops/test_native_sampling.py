"""Native sampling: the tokens that torch chooses, in every batch and by any number of threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from one_thread import one_thread  # noqa: F401  # a fixture

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.sampling import choose_tokens
from atom.model_ops.kernels.torch import sampling

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

INF = math.inf
RANDOM = {"temperature", "seeds", "positions"}
FILTERS: list[set[str]] = [
    set(),
    {"top_k"},
    {"top_p"},
    {"min_p"},
    {"top_k", "top_p"},
    {"min_p", "top_p"},
    {"min_p", "top_k", "top_p"},
]


def options_of(
    filters: set[str], rows: int, vocab: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A quarter of the rows is greedy, and in other quarters a filter is off."""

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(rows, generator=generator)

    off = torch.rand(rows, generator=generator) < 0.25
    top_k = uniform(0, math.log(vocab)).exp().int()
    every = {
        "temperature": torch.where(off.roll(1), 0.0, uniform(0.05, 2)),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        "positions": torch.randint(0, 2**40, (rows,), generator=generator),
        "top_k": torch.where(off, vocab, top_k).int(),
        "top_p": torch.where(off.roll(2), 1.0, uniform(0.01, 1)),
        "min_p": torch.where(off.roll(3), 0.0, uniform(0, 0.5) ** 2),
    }
    return {name: every[name] for name in every if name in RANDOM | filters}


def check(scores: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    expected = sampling.choose_tokens(scores, SamplingMetadata(**options))
    got = choose_tokens(scores, SamplingMetadata(**options))
    assert got.tolist() == expected.tolist()
    return got


@pytest.mark.parametrize("filters", FILTERS, ids=lambda names: " ".join(sorted(names)) or "none")
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("grid", [None, 0.25])
def test_tokens_are_those_of_torch(filters: set[str], spread: float, grid: float | None) -> None:
    """Flat rows and steep ones, with ties and without, in parts of all lengths: 39 000 rows."""
    generator = torch.Generator().manual_seed(len(filters))
    for vocab, rows in ((1, 4), (7, 200), (100, 600), (2500, 100), (8192, 12), (20001, 8)):
        scores = torch.randn(rows, vocab, generator=generator) * spread
        if grid is not None:
            scores = (scores / grid).round() * grid
        scores[::5] = scores[::5].masked_fill(
            torch.rand(scores[::5].shape, generator=generator) < 0.8, -INF
        )
        check(scores, options_of(filters, rows, vocab, generator))


@pytest.mark.parametrize("vocab", [100, 8193, 30000])
def test_a_row_has_the_same_token_in_every_batch(vocab: int) -> None:
    """Alone it is split over the threads, in a large batch it is not."""
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(24, vocab, generator=generator) * 2
    options = options_of({"top_k", "top_p", "min_p"}, 24, vocab, generator)
    everything = check(scores, options)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for some in (slice(0, 24), slice(5, 8), *(slice(r, r + 1) for r in range(24))):
            own = SamplingMetadata(**{name: value[some] for name, value in options.items()})
            assert choose_tokens(scores[some], own).equal(everything[some])


def test_filters_beyond_the_likely_tokens() -> None:
    """A limit that falls among tokens with hardly any weight, or on none."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 9000, generator=generator) * 3
    scores[:, 17] += 30
    options = options_of({"top_k", "top_p"}, 64, 9000, generator)
    options["top_p"][:32] = 1 - 2**-24
    for top_k in (9000, 8999, 4000, 2):
        options["top_k"].fill_(top_k)
        check(scores, options)


def test_ties_are_kept_by_lowest_id() -> None:
    """Of eight equal tokens three, or half the mass, or half of the five that top_k leaves."""
    scores = torch.full((300, 20000), -INF)
    scores[:, 9995:10003] = 1.25
    scores[::2, 9995] = scores[::2, 10001] = -0.0
    scores[::2, 9996:10001] = scores[::2, 10002] = 0.0
    options = {
        "temperature": torch.ones(300),
        "seeds": torch.arange(300),
        "positions": torch.arange(300),
        "top_k": torch.tensor([3, 20000, 5] * 100, dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.5, 0.5] * 100),
    }
    got = check(scores, options).view(100, 3)
    assert got.amin(0).tolist() == [9995] * 3
    assert got.amax(0).tolist() == [9997, 9998, 9997]


@pytest.mark.parametrize("filters", [set(), {"top_k", "top_p", "min_p"}], ids=["none", "filters"])
def test_rows_without_an_admissible_token(filters: set[str]) -> None:
    scores = torch.zeros(6, 9000)
    scores[0] = -INF
    scores[1, 8700] = float("nan")
    scores[2, 8] = INF
    scores[3, :8999] = -INF
    scores[4] = -3e38
    scores[4, 70] = 3e38
    options = options_of(filters, 6, 9000, torch.Generator().manual_seed(3))
    for temperature in (1.0, 0.0, 1e-40, 1e4):
        options["temperature"] = torch.full((6,), temperature)
        assert check(scores, options)[:5].tolist() == [-1, -1, -1, 8999, 70]
    assert check(scores, {})[:5].tolist() == [-1, -1, -1, 8999, 70]
    if filters:
        for name, nothing in (("top_k", 0), ("top_p", 0.0)):
            none_left = options | {name: torch.full_like(options[name], nothing)}
            assert check(scores, none_left).tolist() == [-1] * 6


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    scores = torch.full((5, 20000), -1.0)
    for row, winners in enumerate(([0], [19999], [8191, 8192], [3, 4], [17, 17000])):
        scores[row, winners] = 0.0
    scores[3, 3] = -0.0
    expected = [0, 19999, 8191, 3, 17]
    assert check(scores, {}).tolist() == expected
    rows = torch.arange(5)
    greedy = {"temperature": torch.zeros(5), "seeds": rows, "positions": rows}
    assert check(scores, greedy).tolist() == expected


def test_what_does_not_fit_is_refused() -> None:
    scores, rows = torch.zeros(2, 64), torch.arange(2)
    with pytest.raises(ValueError, match="seeds and positions"):
        choose_tokens(scores, SamplingMetadata(temperature=torch.ones(2)))
    for bad in (torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(4)[::2]):
        with pytest.raises(ValueError, match="choose_tokens"):
            choose_tokens(scores, SamplingMetadata(temperature=bad, seeds=rows, positions=rows))
    for unfit in (scores.bfloat16(), scores.T.contiguous().T, scores[:, :0]):
        with pytest.raises(ValueError, match="choose_tokens"):
            choose_tokens(unfit, SamplingMetadata())
    assert choose_tokens(scores[:0], SamplingMetadata()).shape == (0,)
