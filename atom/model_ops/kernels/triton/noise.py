"""The sampling noise of `atom.model_ops.noise` inside Triton kernels, identical to the bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(h, key):
    h ^= h >> 16
    h = h * 0x21F0AAAD + key
    h ^= h >> 15
    h = h * 0xD35A2D97
    return h ^ (h >> 15)


@triton.jit
def _row_key(
    w0, w1, w2, w3, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr
):
    zero = w0 & 0
    mixed = _mix(w0 ^ C0, zero) + _mix(w1 ^ C1, zero) + _mix(w2 ^ C2, zero) + _mix(w3 ^ C3, zero)
    return _mix(mixed, zero)


@triton.jit
def row_keys(seed, position):
    """The two uint32 keys of a row, from int64."""
    w0 = seed.to(tl.uint32)
    w1 = (seed >> 32).to(tl.uint32)
    w2 = position.to(tl.uint32)
    w3 = (position >> 32).to(tl.uint32)
    k0 = _row_key(w0, w1, w2, w3, 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    k1 = _row_key(w0, w1, w2, w3, 0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)
    return k0, k1


@triton.jit
def random_bits(token_ids, k0, k1):
    """uint32 random bits of int32 token ids, in the row of these keys."""
    hashes = token_ids.to(tl.uint32) * 0x9E3779B1
    hashes = _mix(hashes, hashes & 0)
    return _mix(hashes ^ k0, k1)


@triton.jit
def exponential(bits):
    """Standard exponential variates from uint32 bits, float32."""
    v = (bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * (2.0**-31) + (2.0**-32)
    v = tl.minimum(v, 1.0 - 2.0**-24)
    # log1p by log: cancels the rounding error of u.
    u = 1.0 - v
    return tl.where(u == 1.0, v, v * (tl.log(u) / tl.where(u == 1.0, -1.0, u - 1.0)))
