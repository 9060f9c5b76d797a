// The two products that latent attention is made of, on whatever the processor multiplies with:
//
//   dots: out[g][i] = row[i] . x[g]                 scores, and the way back to a head's values
//   mix:  out[g]    = sum over i of w[g][i] row[i]  the way into the latent space, and the values
//
// Here with vectors; latent_tiles.h has them with tiles of bfloat16. Every result is a sum in an
// order of its own, whatever stands beside it.
#pragma once

#include <algorithm>

#include "dot.h"

namespace atom {

// Rows come in groups of so many that lie `stride` elements apart. Those of the last group that are
// not in use can be read all the same.
constexpr int64_t kRowGroup = 16;

constexpr int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// The rows of a matrix.
template <class T>
struct MatrixRows {
  const T* first;
  int64_t count, stride;

  const T* group(int64_t i) const { return first + i * kRowGroup * stride; }
  const T* at(int64_t i) const { return first + i * stride; }
};

// Up to kChunk cached rows.
constexpr int64_t kChunk = 128;

template <class T>
struct CachedRows {
  const T* groups[kChunk / kRowGroup];
  int64_t count, stride;

  const T* group(int64_t i) const { return groups[i]; }
  const T* at(int64_t i) const { return groups[i / kRowGroup] + i % kRowGroup * stride; }
};

template <class T>
struct Vectors {
  using Weight = float;
  using PackedVectors = Packed<T>;

  struct Session {};

  // Elements of `count` packed vectors of `size` elements.
  static int64_t packed_size(int64_t count, int64_t size) { return count * size; }

  // Packs a vector of `size` elements, a multiple of kDotStep, to place g.
  static void pack_vector(const T* x, int64_t g, int64_t size, Packed<T>* out) {
    pack(x, out + g * size, size);
  }

  // out[g * out_stride + i] for all rows i and each of `count` vectors of `size` elements.
  template <class Rows>
  static void dots(const Rows& rows, const Packed<T>* x, int64_t count, int64_t size, float* out,
                   int64_t out_stride) {
    for_row_groups(count, [&](auto group, int64_t first) {
      constexpr int G = decltype(group)::value;
      const Packed<T>* vectors = x + first * size;
      float* to = out + first * out_stride;
      int64_t i = 0;
      for (; i + 2 <= rows.count; i += 2) tile<2, G>(rows, i, vectors, size, to, out_stride);
      if (i < rows.count) tile<1, G>(rows, i, vectors, size, to, out_stride);
    });
  }

  // Bytes that `mix` needs for `count` rows of `width` elements, and what puts them there.
  static int64_t mix_bytes(int64_t, int64_t) { return 0; }
  template <class Rows>
  static void pack_rows(const Rows&, int64_t, void*) {}

  // visit(g, d, first, second) with the mixture's elements from d on, as `put` wants them.
  // width: a multiple of kDotStep.
  template <class Rows, class Visit>
  static void mix(const float* weights, int64_t weight_stride, int64_t count, const Rows& rows,
                  int64_t width, const void*, const Visit& visit) {
    for_row_groups(count, [&](auto group, int64_t first) {
      constexpr int G = decltype(group)::value;
      const float* w = weights + first * weight_stride;
      for (int64_t d = 0; d < width; d += kDotStep) {
        vfloat sums[G][2] = {};
        for (int64_t i = 0; i < rows.count; ++i) {
          const T* row = rows.at(i) + d;
          const vfloat a = load_first(row), b = load_second(row);
          ATOM_UNROLL for (int g = 0; g < G; ++g) {
            const vfloat weight = splat(w[g * weight_stride + i]);
            sums[g][0] = fma(weight, a, sums[g][0]);
            sums[g][1] = fma(weight, b, sums[g][1]);
          }
        }
        ATOM_UNROLL for (int g = 0; g < G; ++g) visit(first + g, d, sums[g][0], sums[g][1]);
      }
    });
  }

  static void put(T* out, vfloat first, vfloat second) { store_pair(out, first, second); }

 private:
  template <int R, int G, class Rows>
  static void tile(const Rows& rows, int64_t i, const Packed<T>* x, int64_t size, float* out,
                   int64_t out_stride) {
    const T* row[R];
    for (int r = 0; r < R; ++r) row[r] = rows.at(i + r);
    float sums[R * G];
    dot_tile<T, R, G>(row, x, size, size, sums);
    ATOM_UNROLL for (int g = 0; g < G; ++g)
        std::memcpy(out + g * out_stride + i, sums + R * g, R * sizeof(float));
  }
};

}  // namespace atom
