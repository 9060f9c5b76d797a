"""Sampling noise as a pure function of (seed, position, token id).

A token drawn with a seed is the same in any batch, after preemption, and with or without
speculation, because nothing here has state. The random bits use 32-bit unsigned arithmetic
only, so any kernel can reproduce them exactly:

    xs(h, n)  = h ^ (h >> n)                                    (logical shift)
    mix(h)    = xs(xs(xs(h, 16) * 0x21f0aaad, 15) * 0xd35a2d97, 15)

    Keys of a row, with s and p the two's complement 64-bit seed and position:
        for (key, start) in ((k0, 0x243f6a88), (k1, 0x85a308d3)):
            key = start
            for word in (s & 0xffffffff, s >> 32, p & 0xffffffff, p >> 32):
                key = mix(key ^ word) + start                   (modulo 2^32)

    Bits of a token:
        t = mix(token_id * 0x9e3779b1)                          (the same for every row)
        h = xs(t ^ k0, 16) * 0x21f0aaad + k1
        bits = xs(xs(h, 15) * 0xd35a2d97, 15)

    Exponential variate, in float32:
        v = min((bits & 0x7fffffff) * 2^-31 + 2^-32, 1 - 2^-24)
        E = -log(1 - v)                                         (as log1p(-v))

`mix` is the two-round 32-bit integer hash of C. Wellons' hash-prospector. Small E, which is
what wins a race, has a resolution of 2^-31; E lies in [2^-32, 16.7].
"""

from __future__ import annotations

import functools

import torch

_MASK = 0xFFFFFFFF
_MUL1 = 0x21F0AAAD
_MUL2 = 0xD35A2D97
_TOKEN_MUL = 0x9E3779B1
_STARTS = (0x243F6A88, 0x85A308D3)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The two 32-bit keys of every row.

    Args:
        seeds, positions: [R] int64.

    Returns:
        [R, 2] int32.
    """
    # Unsigned words live in int64, whose products wrap modulo 2^64: the low 32 bits are right.
    start = torch.tensor(_STARTS, dtype=torch.int64, device=seeds.device)
    key = start.expand(seeds.shape[0], 2)
    for words in (seeds, seeds >> 32, positions, positions >> 32):
        key = (_mix(key ^ (words & _MASK)[:, None]) + start) & _MASK
    return _as_int32(key)


@functools.lru_cache(maxsize=4)
def token_hashes(vocab_size: int, device: torch.device) -> torch.Tensor:
    """`t` of every token id: [vocab_size] int32. The cached tensor must not be written to."""
    token_ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
    return _as_int32(_mix((token_ids * _TOKEN_MUL) & _MASK))


def random_bits(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """32 random bits per row and token.

    Args:
        keys: [R, 2] int32 of `row_keys`.
        hashes: [N] or [R, N] int32, entries of `token_hashes`.

    Returns:
        [R, N] int32.
    """
    h = hashes ^ keys[:, :1]
    scratch = torch.empty_like(h)
    _xor_shift_(h, 16, scratch)
    h.mul_(_MUL1).add_(keys[:, 1:])
    _xor_shift_(h, 15, scratch)
    h.mul_(_MUL2 - 2**32)
    _xor_shift_(h, 15, scratch)
    return h


def exponential_noise(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates, finite and greater than 0.

    Args:
        keys, hashes: as for `random_bits`.

    Returns:
        [R, N] float32.
    """
    bits = random_bits(keys, hashes).bitwise_and_(0x7FFFFFFF)
    # -v; the clamp also catches the few bits that float32 rounds up to v = 1.
    negated = bits.to(torch.float32).mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=2.0**-24 - 1)
    return negated.log1p_().neg_()


def _mix(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * _MUL1) & _MASK
    h = ((h ^ (h >> 15)) * _MUL2) & _MASK
    return h ^ (h >> 15)


def _xor_shift_(h: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    # int32 shifts are arithmetic; the mask drops the copies of the sign.
    torch.bitwise_right_shift(h, bits, out=scratch)
    h.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def _as_int32(word: torch.Tensor) -> torch.Tensor:
    return ((word ^ 0x80000000) - 0x80000000).to(torch.int32)
