"""Scores inside kernels: their order as integers, and their weights in a race."""

from __future__ import annotations

import triton
import triton.language as tl

INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)
ORDER_OF_INFINITY = tl.constexpr(0x7F800000)
ORDER_OF_NEGATIVE_INFINITY = tl.constexpr(-0x7F800001)
# A weight is at most 1: 2^18 of them fit in 62 bits. Weights below 2^-44 count as 0.
MASS = tl.constexpr(2.0**44)
# The smallest normal float32, since denormals may be flushed to 0 and must not be a divisor.
LEAST_TEMPERATURE = tl.constexpr(2.0**-126)


@triton.jit
def order_of(scores):
    """int32 that sorts like the float32 scores; NaN is highest, -0 next to 0."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(scores != scores, INT_MAX, ordered)


@triton.jit
def score_of(order):
    """The float32 score of an `_order` value."""
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_scores(scores_ptr, token_ids, vocab_size):
    """Scores as float32; -inf past the end."""
    scores = tl.load(scores_ptr + token_ids, mask=token_ids < vocab_size, other=float("-inf"))
    return scores.to(tl.float32)


@triton.jit
def row_maximum(maxima_ptr, row, num_parts, PARTS: tl.constexpr):
    """The order of a row's maximum score, and whether it is finite."""
    parts = tl.arange(0, PARTS)
    maxima = tl.load(maxima_ptr + row * num_parts + parts, mask=parts < num_parts, other=INT_MIN)
    largest = tl.max(maxima, axis=0)
    is_finite = (largest < ORDER_OF_INFINITY) & (largest > ORDER_OF_NEGATIVE_INFINITY)
    return largest, is_finite


@triton.jit
def weights_of(scores, maximum, temperature, min_p):
    """Probabilities relative to the most likely token, after temperature and min_p."""
    weights = tl.exp((scores - maximum) / tl.maximum(temperature, LEAST_TEMPERATURE))
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def mass_of(order, maximum, temperature, min_p):
    """int64 mass of one token; 0 below the order of -inf."""
    score = score_of(tl.maximum(order, ORDER_OF_NEGATIVE_INFINITY))
    return (weights_of(score, maximum, temperature, min_p) * MASS).to(tl.int64)


@triton.jit
def read_options(temperature_ptr, min_p_ptr, row, scale, MIN_P: tl.constexpr):
    temperature = tl.load(temperature_ptr + row) * scale
    min_p = temperature * 0.0
    if MIN_P:
        min_p = tl.load(min_p_ptr + row)
    return temperature, min_p
