// What experts and MLPs have between their products, besides silu.
#pragma once

#include "simd.h"

namespace atom {

// (up + 1) * gate * sigmoid(alpha * gate), both cut off at the limit, gate only above.
ATOM_INLINE vfloat clamped_gate(vfloat gate, vfloat up, float alpha, float limit) {
  const vfloat g = min(splat(limit), gate);
  const vfloat u = min(splat(limit), max(splat(-limit), up));
  return (u + 1.0f) * g / (exp(g * -alpha) + 1.0f);
}

// beta * tanh(x / beta): near 0, where it is nearly x, by the series of tanh.
ATOM_INLINE vfloat bounded(vfloat x, float beta) {
  const vfloat y = x / beta, square = y * y;
  vfloat series = splat(62.0f / 2835.0f);
  series = fma(series, square, splat(-17.0f / 315.0f));
  series = fma(series, square, splat(2.0f / 15.0f));
  series = fma(series, square, splat(-1.0f / 3.0f));
  const vfloat near = fma(series * square, x, x);
  return select(square < splat(1.0f / 16.0f), near, tanh(y) * beta);
}

// bounded(gate) * sigmoid(gate) * bounded(up) (Kimi-K3).
ATOM_INLINE vfloat situ_gate(vfloat gate, vfloat up, float beta, float linear_beta) {
  return bounded(gate, beta) / (exp(-gate) + 1.0f) * bounded(up, linear_beta);
}

}  // namespace atom
