// Dot products of a few weight rows with a few activation rows, the one product behind
// linear layers and attention scores.
//
// Each sum has one accumulator, runs over its elements in order and folds its lanes in a fixed
// order at the end. So a result has the same bits whatever tile it was computed in, and a
// row of activations the same results in any batch.
#pragma once

#include "ahead.h"
#include "simd.h"

namespace atom {

// Rows of activations that one tile takes at most.
constexpr int kTileRows = 6;

// Elements of a row are consumed in steps of this many.
constexpr int64_t kDotStep = 2 * kLanes;

// Elements of a row of weights that are a line of memory, or a step.
template <class T>
constexpr int64_t kFetchStep = kDotStep * sizeof(T) < 64 ? 64 / sizeof(T) : kDotStep;

// Activations as the tile wants them: float32 in pair order, or, where the processor
// multiplies bfloat16 as fast, as they are.
template <class T>
using Packed = std::conditional_t<kFastPairs && std::is_same_v<T, bfloat16>, bfloat16, float>;

template <class T>
ATOM_INLINE void pack(const T* x, Packed<T>* out, int64_t count) {
  if constexpr (std::is_same_v<T, Packed<T>>) {
    std::memcpy(out, x, count * sizeof(T));
  } else {
    for (int64_t k = 0; k < count; k += kDotStep) {
      store(out + k, load_first(x + k));
      store(out + k + kLanes, load_second(x + k));
    }
  }
}

template <int R, int G>
ATOM_INLINE void multiply_add(vfloat (&acc)[R * G], const vfloat (&w)[R], const float* x,
                              int64_t x_stride) {
  vfloat wv[R];
  ATOM_UNROLL for (int r = 0; r < R; ++r) {
    wv[r] = w[r];
    ATOM_IN_REGISTER(wv[r]);
  }
  ATOM_UNROLL for (int g = 0; g < G; ++g) {
    vfloat xv = load(x + g * x_stride);
    if (R > 1) ATOM_IN_REGISTER(xv);
    ATOM_UNROLL for (int r = 0; r < R; ++r) acc[g * R + r] = fma(wv[r], xv, acc[g * R + r]);
  }
}

#if defined(ATOM_FAST_PAIRS)
template <int R, int G>
ATOM_INLINE void multiply_add(vfloat (&acc)[R * G], const bfloat16* const (&w)[R], int64_t k,
                              const bfloat16* x, int64_t x_stride) {
  __m512bh wv[R];
  ATOM_UNROLL for (int r = 0; r < R; ++r) wv[r] = raw<__m512bh>(w[r] + k);
  ATOM_UNROLL for (int g = 0; g < G; ++g) {
    const __m512bh xv = raw<__m512bh>(x + g * x_stride);
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      acc[g * R + r] = (vfloat)_mm512_dpbf16_ps((__m512)acc[g * R + r], wv[r], xv);
    }
  }
}
#endif

// One step of all sums, kDotStep elements of each row.
template <class T, int R, int G>
ATOM_INLINE void dot_step(vfloat (&acc)[R * G], const T* const (&w)[R], int64_t k,
                          const Packed<T>* x, int64_t x_stride) {
  if constexpr (std::is_same_v<T, Packed<T>> && !std::is_same_v<T, float>) {
    multiply_add<R, G>(acc, w, k, x, x_stride);
  } else {
    vfloat part[R];
    ATOM_UNROLL for (int r = 0; r < R; ++r) part[r] = load_first(w[r] + k);
    multiply_add<R, G>(acc, part, x, x_stride);
    ATOM_UNROLL for (int r = 0; r < R; ++r) part[r] = load_second(w[r] + k);
    multiply_add<R, G>(acc, part, x + kLanes, x_stride);
  }
}

// sums[g * R + r] = w[r] . x[g] over `count` elements; those of x are followed by zeros up to a
// multiple of kDotStep.
// `ahead` fetches with every kFetchStep elements.
template <class T, int R, int G>
ATOM_INLINE void dot_tile(const T* const (&w)[R], const Packed<T>* x, int64_t x_stride,
                          int64_t count, Ahead& ahead, float (&sums)[R * G]) {
  vfloat acc[R * G] = {};
  int64_t k = 0;
  for (; k + kDotStep <= count; k += kDotStep) {
    if (k % kFetchStep<T> == 0) ahead.fetch();
    dot_step<T, R, G>(acc, w, k, x + k, x_stride);
  }
  if (k < count) {
    T rest[R][kDotStep] = {};
    const T* rows[R];
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      std::memcpy(rest[r], w[r] + k, (count - k) * sizeof(T));
      rows[r] = rest[r];
    }
    dot_step<T, R, G>(acc, rows, 0, x + k, x_stride);
  }
  // Four sums or more are worth the shuffles of eight.
  constexpr int tile = R * G, wide = (tile + 4) / 8 * 8;
  ATOM_UNROLL for (int i = 0; i < wide; i += 8) {
    vfloat eight[8] = {};
    float out[8];
    ATOM_UNROLL for (int j = 0; j < 8; ++j) if (i + j < tile) eight[j] = acc[i + j];
    sum_eight(eight, out);
    std::memcpy(sums + i, out, sizeof(float) * (tile - i < 8 ? tile - i : 8));
  }
  ATOM_UNROLL for (int i = wide; i < tile; ++i) sums[i] = sum(acc[i]);
}

// The same of rows that are in a cache.
template <class T, int R, int G>
ATOM_INLINE void dot_tile(const T* const (&w)[R], const Packed<T>* x, int64_t x_stride,
                          int64_t count, float (&sums)[R * G]) {
  Ahead nothing{nullptr, 0};
  dot_tile<T, R, G>(w, x, x_stride, count, nothing, sums);
}

// Cuts `rows` activation rows into the fewest groups of at most `Most`, 6 or 8, and calls
// `tile(std::integral_constant<int, G>, first_row)` for each. All groups are full but the last
// two, which share what is left: a group of one row wastes most of a tile.
template <int Most = kTileRows, class Tile>
ATOM_INLINE void for_row_groups(int64_t rows, const Tile& tile) {
  static_assert(Most == 6 || Most == 8);
  const int64_t groups = (rows + Most - 1) / Most;
  for (int64_t i = 0, begin = 0; i < groups; ++i) {
    const int64_t left = rows - begin, count = groups - i;
    const int64_t size = count > 2 ? Most : left / count;
    switch (size) {
      case 1: tile(std::integral_constant<int, 1>{}, begin); break;
      case 2: tile(std::integral_constant<int, 2>{}, begin); break;
      case 3: tile(std::integral_constant<int, 3>{}, begin); break;
      case 4: tile(std::integral_constant<int, 4>{}, begin); break;
      case 5: tile(std::integral_constant<int, 5>{}, begin); break;
      case 7:
        if constexpr (Most == 8) tile(std::integral_constant<int, 7>{}, begin);
        break;
      case 8:
        if constexpr (Most == 8) tile(std::integral_constant<int, 8>{}, begin);
        break;
      default: tile(std::integral_constant<int, 6>{}, begin); break;
    }
    begin += size;
  }
}

}  // namespace atom
