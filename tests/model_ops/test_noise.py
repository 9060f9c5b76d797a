"""The noise against a reference written from its specification, and its statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops import noise as noise_module
from atom.model_ops.noise import exponential_noise, random_bits, row_keys, token_hashes

CPU = torch.device("cpu")
M32 = 0xFFFFFFFF
C = (
    (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
    (0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89),
)
int64s = st.integers(-(2**63), 2**63 - 1)


def mix(h: int, key: int = 0) -> int:
    h ^= h >> 16
    h = (h * 0x21F0AAAD + key) & M32
    h ^= h >> 15
    h = (h * 0xD35A2D97) & M32
    return h ^ (h >> 15)


def reference_bits(seed: int, position: int, token_id: int) -> int:
    s, p = seed & (2**64 - 1), position & (2**64 - 1)
    words = (s & M32, s >> 32, p & M32, p >> 32)
    k0, k1 = (mix(sum(mix(w ^ c) for w, c in zip(words, row, strict=True)) & M32) for row in C)
    return mix(mix((token_id * 0x9E3779B1) & M32) ^ k0, k1)


def bits_of(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    bits = random_bits(row_keys(seeds, positions), token_hashes(vocab_size, CPU))
    return bits.to(torch.int64) & M32


def noise_of(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return exponential_noise(row_keys(seeds, positions), token_hashes(vocab_size, CPU))


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(int64s, int64s), min_size=1, max_size=5), vocab=st.integers(1, 70))
def test_bits_follow_the_specification(rows: list[tuple[int, int]], vocab: int) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    expected = [[reference_bits(s, p, t) for t in range(vocab)] for s, p in rows]
    assert bits_of(seeds, positions, vocab).tolist() == expected


def test_the_bits_never_change() -> None:
    """A seed must give the same text in every release."""
    bits = bits_of(torch.tensor([0, 42, -1]), torch.tensor([0, 1000, 2**40]), 49152)
    assert bits[:, [0, 1, 49151]].tolist() == [
        [1256773376, 2023485220, 2072803504],
        [2689216377, 3341545691, 786797483],
        [1850382193, 4073260248, 380814991],
    ]


def test_noise_of_chosen_tokens_equals_that_of_all() -> None:
    keys = row_keys(torch.arange(5), torch.arange(5) + 100)
    hashes = token_hashes(1003, CPU)
    ids = torch.randint(0, 1003, (5, 37), generator=torch.Generator().manual_seed(0))
    chosen = exponential_noise(keys, hashes[ids])
    assert torch.equal(chosen, exponential_noise(keys, hashes).gather(-1, ids))


def test_noise_is_exponential_and_never_zero_nor_infinite() -> None:
    noise = noise_of(torch.arange(64), torch.full((64,), 9), 49152).double().flatten()
    n = noise.numel()
    assert 0 < noise.min() < 10 / n
    assert math.log(n) - 3 < noise.max() < 16.7
    assert noise.mean() == pytest.approx(1, abs=5 / math.sqrt(n))
    assert noise.var() == pytest.approx(1, abs=5 * math.sqrt(8 / n))


def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, 0x7FFFFFFF, -1, -(2**31)]], dtype=torch.int32)
    monkeypatch.setattr(noise_module, "_mix_", lambda h, scratch, key: h.copy_(extremes))
    noise = exponential_noise(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(4).int())
    low, high = 2**-32, 24 * math.log(2)
    assert noise[0].tolist() == pytest.approx([low, high, high, low], rel=1e-6)


def chi_square_z(counts: torch.Tensor, expected: torch.Tensor | float) -> float:
    """The chi-square statistic as a standard normal deviate (Wilson and Hilferty)."""
    counts = counts.double().flatten()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    k = counts.numel() - 1
    return ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


# Practical patterns: seeds count up, positions count up, or both are fixed and tokens count.
PATTERNS = {
    "tokens": (torch.arange(16), torch.full((16,), 5), 49152),
    "positions": (torch.full((40000,), 7), torch.arange(40000), 16),
    "seeds": (torch.arange(40000), torch.full((40000,), 7), 16),
    "high seeds": (torch.arange(40000) << 32, torch.full((40000,), 7), 16),
    "both": (torch.arange(200).repeat(200), torch.arange(200).repeat_interleave(200), 16),
}


@pytest.mark.parametrize("shift", [0, 8, 16, 23])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_bits_are_uniform(pattern: str, shift: int) -> None:
    bits = bits_of(*PATTERNS[pattern]) >> shift & 0xFF
    assert abs(chi_square_z(torch.bincount(bits.flatten(), minlength=256), bits.numel() / 256)) < 4


@pytest.mark.parametrize("shift", [0, 27])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("lag", [1, 2, 3, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_neighbours_are_independent(pattern: str, lag: int, axis: int, shift: int) -> None:
    """Neighbouring rows (seeds or positions) and neighbouring token ids."""
    bits = bits_of(*PATTERNS[pattern]) >> shift & 0xF
    length = bits.shape[axis] - lag
    pairs = bits.narrow(axis, 0, length) * 16 + bits.narrow(axis, lag, length)
    assert (
        abs(chi_square_z(torch.bincount(pairs.flatten(), minlength=256), pairs.numel() / 256)) < 4
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_neighbouring_noise_is_uncorrelated(pattern: str) -> None:
    noise = noise_of(*PATTERNS[pattern]).double() - 1
    for axis in (0, 1):
        length = noise.shape[axis] - 1
        products = noise.narrow(axis, 0, length) * noise.narrow(axis, 1, length)
        assert abs(float(products.mean())) < 4 / math.sqrt(products.numel())


def test_hashes_stay_where_graphs_have_read_them() -> None:
    first = token_hashes(7, CPU)
    for size in range(8, 40):
        token_hashes(size, CPU)
    assert token_hashes(7, CPU) is first
