"""Sampling noise as a pure function of (seed, position, token id).

Stateless, so a token sampled with a seed does not depend on the batch, preemption or speculation.
The random bits use 32-bit unsigned arithmetic only, so any kernel can reproduce them exactly:

    xs(h, n)  = h ^ (h >> n)                                    (logical shift)
    mix(h)    = xs(xs(xs(h, 16) * 0x21f0aaad, 15) * 0xd35a2d97, 15)

    Keys of a row, with s and p the two's complement 64-bit seed and position:
        w = (s & 0xffffffff, s >> 32, p & 0xffffffff, p >> 32)
        k_i = mix(sum over j of mix(w_j ^ C_ij))                (i = 0, 1; modulo 2^32)
        C = ((0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
             (0xa4093822, 0x299f31d0, 0x082efa98, 0xec4e6c89))

    Bits of a token:
        t = mix(token_id * 0x9e3779b1)                          (the same for every row)
        h = xs(t ^ k0, 16) * 0x21f0aaad + k1
        bits = xs(xs(h, 15) * 0xd35a2d97, 15)

    Exponential variate, in float32:
        v = min((bits & 0x7fffffff) * 2^-31 + 2^-32, 1 - 2^-24)
        E = -log(1 - v)                                         (as log1p(-v))

`mix` is the two-round 32-bit integer hash of C. Wellons' hash-prospector. Small E, which win races,
have a resolution of 2^-31; E is in [2^-32, 16.7].
"""

from __future__ import annotations

import functools

import torch


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


_MUL1 = _signed(0x21F0AAAD)
_MUL2 = _signed(0xD35A2D97)
_TOKEN_MUL = _signed(0x9E3779B1)
_KEY_CONSTANTS = (
    tuple(map(_signed, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))),
    tuple(map(_signed, (0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89))),
)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The two 32-bit keys of every row.

    Args:
        seeds, positions: [R] int64.

    Returns:
        [R, 2] int32.
    """
    # The int32 view of an int64 is (low word, high word): supported machines are little-endian.
    words = torch.stack((seeds, positions), dim=-1).view(torch.int32)
    mixed = _mix_(words[:, None, :] ^ _key_constants(seeds.device))
    return _mix_(mixed.sum(-1, dtype=torch.int32))


@functools.cache
def _key_constants(device: torch.device) -> torch.Tensor:
    return torch.tensor(_KEY_CONSTANTS, dtype=torch.int32, device=device)


@functools.cache
def token_hashes(vocab_size: int, device: torch.device) -> torch.Tensor:
    """`t` of every token id: [vocab_size] int32, never freed: do not modify.

    Captured graphs read it where it was at capture.
    """
    return hash_tokens(torch.arange(vocab_size, dtype=torch.int32, device=device))


def hash_tokens(token_ids: torch.Tensor) -> torch.Tensor:
    """`t` of token ids [N] int32: [N] int32."""
    return _mix_(token_ids.mul(_int32(_TOKEN_MUL)))


def random_bits(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """32 random bits per row and token.

    Args:
        keys: [R, 2] int32 of `row_keys`.
        hashes: [N] or [R, N] int32, entries of `token_hashes`.

    Returns:
        [R, N] int32.
    """
    h = hashes ^ keys[:, :1]
    return _mix_(h, torch.empty_like(h), keys[:, 1:])


def exponential_noise(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates, finite and greater than 0.

    Args:
        keys, hashes: as for `random_bits`.

    Returns:
        [R, N] float32.
    """
    h = hashes ^ keys[:, :1]
    scratch = torch.empty_like(h)
    bits = _mix_(h, scratch, keys[:, 1:]).bitwise_and_(_int32(0x7FFFFFFF))
    # -v; the clamp also covers values that float32 rounds up to v = 1. The scratch buffer is reused
    # because new memory pages cost more than the arithmetic.
    negated = scratch.view(torch.float32).copy_(bits)
    negated.mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=2.0**-24 - 1)
    return negated.log1p_().neg_()


def _mix_(
    h: torch.Tensor, scratch: torch.Tensor | None = None, key: torch.Tensor | None = None
) -> torch.Tensor:
    """`mix` in place; `key`, if any, is added after the first multiplication."""
    if scratch is None:
        scratch = torch.empty_like(h)
    _xor_shift_(h, 16, scratch)
    h.mul_(_int32(_MUL1))
    if key is not None:
        h.add_(key)
    _xor_shift_(h, 15, scratch)
    h.mul_(_int32(_MUL2))
    _xor_shift_(h, 15, scratch)
    return h


def _xor_shift_(h: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    # int32 shifts are arithmetic; the mask clears the sign bits.
    torch.bitwise_right_shift(h, _int32(bits), out=scratch)
    h.bitwise_xor_(scratch.bitwise_and_(_int32((1 << (32 - bits)) - 1)))


@functools.cache
def _int32(value: int) -> torch.Tensor:
    """A constant as a tensor, which is three times faster than passing a Python number."""
    return torch.tensor(value, dtype=torch.int32)
