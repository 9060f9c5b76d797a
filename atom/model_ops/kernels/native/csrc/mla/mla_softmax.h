// The softmax of latent attention, one chunk of scores after another (Milakov and Gimelshein,
// arXiv:1805.02867).
#pragma once

#include <algorithm>
#include <limits>

#include "simd.h"

namespace atom {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// Softmax so far of some rows: acc / total is the result, exp(peak) was divided out.
struct SoftmaxState {
  float* acc;    // [rows, width], in the order of the products' vectors
  float* peak;   // [rows]
  float* total;  // [rows]

  static int64_t padded(int64_t rows) { return (rows + 15) / 16 * 16; }
  static int64_t size(int64_t rows, int64_t width) { return padded(rows) * (width + 2); }

  SoftmaxState(float* memory, int64_t rows, int64_t width)
      : acc(memory), peak(acc + padded(rows) * width), total(peak + padded(rows)) {}

  void clear() {
    std::fill(acc, peak, 0.0f);
    std::fill(peak, total, kNoScore);
    std::fill(total, total + (total - peak), 0.0f);
  }
};

// What brings rows of a state, and what joins them, to their common peaks.
struct Joint {
  float *keep, *admit;  // [rows]

  void set(const float* peak, const float* total, int64_t rows, SoftmaxState& state) const {
    for (int64_t r = 0; r < rows; r += kLanes) {
      const vfloat old = load(state.peak + r), incoming = load(peak + r);
      const vfloat both = max(old, incoming);
      const vfloat kept = select(old == both, splat(1), exp(old - both));
      const vfloat admitted = select(incoming == both, splat(1), exp(incoming - both));
      store(keep + r, kept);
      store(admit + r, admitted);
      store(state.peak + r, both);
      store(state.total + r, fma(load(total + r), admitted, load(state.total + r) * kept));
    }
  }

  void merge(const SoftmaxState& part, int64_t rows, int64_t width, SoftmaxState& state) const {
    set(part.peak, part.total, rows, state);
    for (int64_t r = 0; r < rows; ++r) {
      const vfloat kept = splat(keep[r]), admitted = splat(admit[r]);
      for (int64_t d = r * width; d < (r + 1) * width; d += kLanes) {
        store(state.acc + d, fma(load(part.acc + d), admitted, load(state.acc + d) * kept));
      }
    }
  }
};

// One row: weights[i] = exp(scale * scores[i] - peak) for i < seen, 0 from there to `end`, a
// multiple of kLanes. The two arrays may be one.
template <class W>
ATOM_INLINE void softmax_row(float* scores, W* weights, int64_t end, int64_t seen, float scale,
                             float& peak_out, float& total_out) {
  vint lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const vint stop = vint{} + int32_t(seen);
  vfloat peak = splat(kNoScore), total = {};
  for (int64_t i = 0; i < end; i += kLanes) {
    vfloat x = load(scores + i) * scale;
    if (i + kLanes > seen) x = select(lane + int32_t(i) < stop, x, splat(kNoScore));
    store(scores + i, x);
    peak = max(x, peak);
  }
  peak_out = maximum(peak);
  // Where nothing is seen every exponent is -infinity, not NaN.
  const float shift = seen > 0 ? peak_out : 0.0f;
  for (int64_t i = 0; i < end; i += kLanes) {
    const vfloat p = exp(load(scores + i) - shift);
    store(weights + i, p);
    total += p;
  }
  total_out = sum(total);
}

}  // namespace atom
