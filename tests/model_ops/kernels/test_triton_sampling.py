"""Sampling through Triton: the noise bit for bit, the tokens as plain torch chooses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from model_ops import draft_rows

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch import sampling
from atom.model_ops.kernels.triton.sampling.choose_drafts import choose_drafts
from atom.model_ops.kernels.triton.sampling.choose_tokens import (
    choose_tokens,
    exponential,
    random_bits,
    refuses,
    row_keys,
)
from atom.model_ops.kernels.triton.sampling.mask_tokens import mask_tokens
from atom.model_ops.noise import random_bits as torch_random_bits
from atom.model_ops.noise import row_keys as torch_row_keys
from atom.model_ops.noise import token_hashes
from atom.model_ops.registry import OpQuery
from atom.platform import Platform

INF = float("inf")
INT64 = 2**63


@triton.jit
def _bits(seeds_ptr, positions_ptr, ids_ptr, bits_ptr, noise_ptr, TOKENS: tl.constexpr):
    row = tl.program_id(0)
    token_ids = tl.load(ids_ptr + tl.arange(0, TOKENS))
    k0, k1 = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    bits = random_bits(token_ids, k0, k1)
    places = row * TOKENS + tl.arange(0, TOKENS)
    tl.store(bits_ptr + places, bits.to(tl.int32, bitcast=True))
    tl.store(noise_ptr + places, exponential(bits))


@triton.jit
def _exponential(bits_ptr, noise_ptr, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    bits = tl.load(bits_ptr + places).to(tl.uint32, bitcast=True)
    tl.store(noise_ptr + places, exponential(bits))


def test_the_random_bits_are_those_of_torch(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    extremes = [0, 1, -1, INT64 - 1, -INT64, 2**31, -(2**31), 2**32, 42]
    seeds = torch.tensor(extremes * 2)
    positions = torch.randint(-(2**40), 2**40, seeds.shape, generator=generator)
    positions[: len(extremes)] = torch.tensor(extremes).flip(0)
    token_ids = torch.cat((torch.arange(128), torch.arange(2**18 - 128, 2**18))).int()
    bits = torch.empty(len(seeds), 256, dtype=torch.int32, device=device)
    noise = torch.empty(bits.shape, device=device)
    where = (t.to(device) for t in (seeds, positions, token_ids))
    _bits[(len(seeds),)](*where, bits, noise, TOKENS=256)
    hashes = token_hashes(2**18, torch.device("cpu"))[token_ids.long()]
    assert torch.equal(bits.cpu(), torch_random_bits(torch_row_keys(seeds, positions), hashes))
    assert noise.min() > 0


def test_the_noise_is_exponential_at_both_ends(device: torch.device) -> None:
    """Small variates win races: their relative error counts."""
    bits = torch.cat(
        [
            torch.tensor([0, 1, 2, 2**31 - 1]),
            2 ** torch.arange(2, 30),
            2**31 - 2 ** torch.arange(1, 31),
        ]
    )
    bits = torch.cat((bits, torch.arange(128 - len(bits)) * 15485863 % 2**31))
    noise = torch.empty(128, device=device)
    _exponential[(1,)](bits.int().to(device), noise, COUNT=128)
    uniform = (bits.float() * 2.0**-31 + 2.0**-32).clamp(max=1 - 2.0**-24).double()
    torch.testing.assert_close(noise.double().cpu(), -torch.log1p(-uniform), rtol=1e-6, atol=0)


def options_of(names: set[str], rows: int, vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """Every row is random but the first; a filter is off in the last."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(rows, generator=generator)

    every = {
        "temperature": uniform(0.3, 2).index_fill(0, torch.tensor([0]), 0.0),
        "seeds": torch.randint(-INT64, INT64 - 1, (rows,), generator=generator),
        "positions": torch.arange(rows) + 7,
        "top_k": torch.randint(1, vocab + 1, (rows,), generator=generator).int(),
        "top_p": uniform(0.1, 0.99),
        "min_p": uniform(0.001, 0.3),
    }
    for name, off in (("top_k", vocab), ("top_p", 1.0), ("min_p", 0.0)):
        every[name][-1] = off
    return {name: every[name] for name in every if name in names}


RANDOM = {"temperature", "seeds", "positions"}
FILTERS: list[set[str]] = [
    set(),
    {"top_k"},
    {"top_p"},
    {"min_p"},
    {"top_k", "top_p"},
    {"min_p", "top_k", "top_p"},
]


def check(logits: torch.Tensor, options: dict[str, Any], device: torch.device) -> torch.Tensor:
    expected = sampling.choose_tokens(logits, SamplingMetadata(**options))
    options = {name: value.to(device) for name, value in options.items()}
    got = choose_tokens(logits.to(device), SamplingMetadata(**options)).cpu()
    assert got.tolist() == expected.tolist()
    return got


@pytest.mark.parametrize("filters", FILTERS, ids=lambda names: " ".join(sorted(names)) or "none")
@pytest.mark.parametrize(
    ("vocab", "grid", "dtype"), [(90, 0.5, torch.float32), (600, 0.03, torch.bfloat16)], ids=str
)
def test_tokens_are_those_of_torch(
    filters: set[str], vocab: int, grid: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Ties are frequent: neighbouring scores are `grid` apart."""
    generator = torch.Generator().manual_seed(len(filters))
    logits = ((torch.randn(3, vocab, generator=generator) * 2 / grid).round() * grid).to(dtype)
    check(logits, options_of(RANDOM | filters, 3, vocab, vocab), device)


@pytest.mark.parametrize(
    "filters", [None, set(), {"min_p"}, {"top_k", "top_p"}], ids=["greedy", "none", "min_p", "top"]
)
def test_drafts_are_what_the_target_would_sample(
    filters: set[str] | None, device: torch.device
) -> None:
    """From a row in two parts, by greedy rows and random ones."""
    options = {} if filters is None else options_of(RANDOM | filters, 3, 6000, 5)
    scores = torch.randn(3, 4100, generator=torch.Generator().manual_seed(3)) * 2
    draft_rows.check(choose_drafts, scores, options, 6000, device)


@pytest.mark.parametrize("spread", [0.01, 4.0], ids=["flat", "peaked"])
def test_filters_find_their_limits_in_long_rows(spread: float, device: torch.device) -> None:
    """In two parts of a row: in one group or most of them, and for more tokens than groups."""
    scores = torch.randn(4, 5000, generator=torch.Generator().manual_seed(9)) * spread
    scores[:, 4990:] = scores[:, 10:20]  # ties in distant groups
    options = options_of(RANDOM | {"top_k", "top_p"}, 4, 5000, 9)
    options["temperature"].fill_(1.0)
    options["top_k"] = torch.tensor([3, 700, 5000, 5000], dtype=torch.int32)
    options["top_p"] = torch.tensor([1.0, 0.999, 0.3, 0.9999])
    check(scores, options, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_greedy_takes_the_lowest_of_equal_tokens(dtype: torch.dtype, device: torch.device) -> None:
    vocab = 5000  # two parts of a row
    logits = torch.full((5, vocab), -1.0, dtype=dtype)
    for row, winners in enumerate(([0], [4999], [4095, 4096], [3, 4], [17, 4500])):
        logits[row, winners] = 0.0
    logits[3, 3] = -0.0
    wider = torch.cat((logits, logits + 9), dim=1).to(device)
    for given in (wider[:, :vocab], logits.T.contiguous().T):
        assert check(given.cpu(), {}, device).tolist() == [0, 4999, 4095, 3, 17]
        assert choose_tokens(given.to(device), SamplingMetadata()).tolist() == [
            0,
            4999,
            4095,
            3,
            17,
        ]


def test_several_parts_of_a_random_row(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 9000, generator=generator).bfloat16()
    got = check(logits, options_of(RANDOM | {"top_k", "top_p"}, 3, 9000, 1), device)
    assert got.max() > 4096


def test_ties_are_kept_by_lowest_id(device: torch.device) -> None:
    """Of eight equal tokens three, or half the mass, or half of the five that top_k leaves."""
    rows = 12
    logits = torch.full((rows, 20), -INF)
    logits[:, 5:13] = 1.25
    options = {
        "temperature": torch.ones(rows),
        "seeds": torch.arange(rows),
        "positions": torch.arange(rows),
        "top_k": torch.tensor([3, 20, 5] * 4, dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.5, 0.5] * 4),
    }
    got = check(logits, options, device).view(4, 3)
    assert got.min() >= 5
    assert (got.amax(0) < torch.tensor([8, 9, 8])).all()


@pytest.mark.parametrize("filters", [set(), {"top_k", "top_p"}], ids=["none", "filters"])
def test_rows_without_an_admissible_token(filters: set[str], device: torch.device) -> None:
    logits = torch.zeros(5, 40)
    logits[0] = -INF
    logits[1, 7] = float("nan")
    logits[2, 8] = INF
    logits[3, :39] = -INF
    options = options_of(RANDOM | filters, 5, 40, 3)
    for temperature in (torch.ones(5), torch.zeros(5), torch.full((5,), 1e-40)):
        got = check(logits, options | {"temperature": temperature}, device)
        assert got[:4].tolist() == [-1, -1, -1, 39]
    assert check(logits, {}, device)[:4].tolist() == [-1, -1, -1, 39]


@pytest.mark.parametrize("vocab", [1, 33, 1100])
@pytest.mark.parametrize("rows", [None, [3, 0]])
def test_masks(vocab: int, rows: list[int] | None, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(4, vocab, generator=generator)
    count = 4 if rows is None else len(rows)
    words = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), generator=generator).int()
    index = None if rows is None else torch.tensor(rows)
    got = scores.to(device, copy=True)
    mask_tokens(got, words.to(device), None if index is None else index.to(device))
    sampling.mask_tokens(scores, words, index)
    assert torch.equal(got.cpu(), scores)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    scores = torch.zeros(2, 64, device=device)
    with pytest.raises(ValueError, match="mask_tokens wants"):
        mask_tokens(scores, torch.zeros(1, 2, dtype=torch.int32, device=device), None)
    with pytest.raises(ValueError, match="seeds and positions"):
        choose_tokens(scores, SamplingMetadata(temperature=torch.ones(2, device=device)))
    assert choose_tokens(scores[:0], SamplingMetadata()).shape == (0,)
    query = OpQuery(Platform("cuda", "sm90", True), torch.bfloat16, {"vocab_size": 2**18 + 1})
    assert refuses(query) is not None
