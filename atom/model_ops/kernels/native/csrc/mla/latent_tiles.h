// The products of latent_products.h on tiles of bfloat16 (AMX): 16 rows of 32 elements times 16 pairs
// by 16 columns. A tile's sums do not depend on its other rows and columns, and all products take
// this way whatever their number, so results have the same bits in every batch.
#pragma once

#include "amx.h"
#include "mla/latent_products.h"

#if defined(ATOM_AMX)
namespace atom {

struct Tiles {
  using Weight = bfloat16;
  using PackedVectors = uint32_t;
  using Session = amx::Session;
  static constexpr int64_t kSide = amx::kSide, kDepth = amx::kDepth;
  static_assert(kSide == kRowGroup && kDepth == kDotStep);
  static constexpr int64_t kTile = kSide * kSide;

  static int64_t packed_size(int64_t count, int64_t size) {
    return round_up(count, kSide) * size / 2;
  }
  static int64_t mix_bytes(int64_t count, int64_t width) {
    return round_up(count, kDepth) * width * int64_t(sizeof(bfloat16));
  }

  // out[g / 16][p][g % 16]: elements 2 p and 2 p + 1 of vector g. What stands in the places of
  // absent vectors does not matter.
  static void pack_vector(const bfloat16* x, int64_t g, int64_t size, uint32_t* out) {
    uint32_t* to = out + g / kSide * kSide * (size / 2) + g % kSide;
    for (int64_t p = 0; p < size / 2; ++p) to[p * kSide] = raw<uint32_t>(x + 2 * p);
  }

  template <class Rows>
  static void dots(const Rows& rows, const uint32_t* x, int64_t count, int64_t size, float* out,
                   int64_t out_stride) {
    const int64_t groups = (rows.count + kSide - 1) / kSide;
    for (int64_t g = 0; g < count; g += 2 * kSide) {
      const uint32_t* vectors = x + g * (size / 2);
      const int64_t most = count - g;
      float* to = out + g * out_stride;
      int64_t i = 0;
      for (; i + 2 <= groups; i += 2) {
        most > kSide ? dot_tiles<2, 2>(rows, i, vectors, most, size, to, out_stride)
                     : dot_tiles<2, 1>(rows, i, vectors, most, size, to, out_stride);
      }
      if (i < groups) {
        most > kSide ? dot_tiles<1, 2>(rows, i, vectors, most, size, to, out_stride)
                     : dot_tiles<1, 1>(rows, i, vectors, most, size, to, out_stride);
      }
    }
  }

  // Rows 2 p and 2 p + 1, element by element beside each other; absent rows are 0.
  // pairs[column / 16][p][column % 16]
  template <class Rows>
  static void pack_rows(const Rows& rows, int64_t width, void* packed) {
    auto* pairs = static_cast<uint32_t*>(packed);
    const int64_t depths = (rows.count + kDepth - 1) / kDepth;
    const __m512i zero = _mm512_setzero_si512();
    const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    const int64_t column = depths * kTile;
    for (int64_t p = 0; p < depths * kSide; ++p) {
      const bfloat16* a = 2 * p < rows.count ? rows.at(2 * p) : nullptr;
      const bfloat16* b = 2 * p + 1 < rows.count ? rows.at(2 * p + 1) : nullptr;
      uint32_t* to = pairs + p * kSide;
      for (int64_t d = 0; d < width; d += 2 * kSide, to += 2 * column) {
        const __m512i even = a == nullptr ? zero : raw<__m512i>(a + d);
        const __m512i odd = b == nullptr ? zero : raw<__m512i>(b + d);
        const __m512i lo = _mm512_unpacklo_epi16(even, odd);
        const __m512i hi = _mm512_unpackhi_epi16(even, odd);
        const __m512i first = _mm512_permutex2var_epi64(lo, low, hi);
        const __m512i second = _mm512_permutex2var_epi64(lo, high, hi);
        _mm512_store_si512(to, first);
        _mm512_store_si512(to + column, second);
      }
    }
  }

  // weights: as many rows as a tile has can be read, and up to a whole tile's columns, all finite.
  template <class Rows, class Visit>
  static void mix(const bfloat16* weights, int64_t weight_stride, int64_t count, const Rows& rows,
                  int64_t width, const void* packed, const Visit& visit) {
    const auto* pairs = static_cast<const uint32_t*>(packed);
    const int64_t depths = (rows.count + kDepth - 1) / kDepth;
    for (int64_t g = 0; g < count; g += kSide) {
      const bfloat16* w = weights + g * weight_stride;
      const int64_t most = std::min(kSide, count - g);
      int64_t d = 0;
      for (; d + 4 * kSide <= width; d += 4 * kSide) {
        mix_columns<4>(w, weight_stride, pairs, depths, d, [&](int64_t r, int64_t at, auto... v) {
          if (r < most) visit(g + r, at, v...);
        });
      }
      if (d < width) {
        mix_columns<2>(w, weight_stride, pairs, depths, d, [&](int64_t r, int64_t at, auto... v) {
          if (r < most) visit(g + r, at, v...);
        });
      }
    }
  }

  static void put(bfloat16* out, vfloat first, vfloat second) {
    store(out, first);
    store(out + kLanes, second);
  }

 private:
  // N groups of rows from group i on, with G groups of vectors.
  template <int N, int G, class Rows>
  static void dot_tiles(const Rows& rows, int64_t i, const uint32_t* x, int64_t most, int64_t size,
                        float* out, int64_t out_stride) {
    const bfloat16* row[N];
    for (int n = 0; n < N; ++n) row[n] = rows.group(i + n);
    const int64_t stride = rows.stride * int64_t(sizeof(bfloat16)), next = kSide * (size / 2);
    amx::unrolled<N * G>([](auto t) { amx::zero<t>(); });
    for (int64_t k = 0; k < size; k += kDepth) {
      amx::unrolled<N>([&](auto n) { amx::load<4 + n>(row[n] + k, stride); });
      amx::unrolled<G>([&](auto g) {
        amx::load<6 + g>(x + g * next + k / 2 * kSide, amx::kRowBytes);
        amx::unrolled<N>([&](auto n) { amx::multiply_add<n * G + g, 4 + n, 6 + g>(); });
      });
    }
    alignas(64) float sums[N * G][kTile];
    amx::unrolled<N * G>([&](auto t) { amx::store<t>(sums[t], amx::kRowBytes); });
    ATOM_UNROLL for (int t = 0; t < N * G; ++t) {
      __m512i columns[16];
      ATOM_UNROLL for (int r = 0; r < 16; ++r) columns[r] = _mm512_load_si512(sums[t] + r * kSide);
      transpose(columns);
      const int64_t first = t % G * kSide;
      for (int64_t g = first; g < std::min(most, first + kSide); ++g) {
        _mm512_storeu_si512(out + g * out_stride + (i + t / G) * kSide, columns[g - first]);
      }
    }
  }

  // N columns of tiles, from element d on.
  template <int N, class Visit>
  ATOM_INLINE static void mix_columns(const bfloat16* weights, int64_t weight_stride,
                                      const uint32_t* pairs, int64_t depths, int64_t d,
                                      const Visit& visit) {
    const int64_t column = depths * kTile;
    const uint32_t* at = pairs + d / kSide * column;
    amx::unrolled<N>([](auto n) { amx::zero<n>(); });
    for (int64_t k = 0; k < depths; ++k, at += kTile) {
      amx::load<4>(weights + k * kDepth, weight_stride * sizeof(bfloat16));
      amx::unrolled<N>([&](auto n) {
        amx::load<5 + n % 3>(at + n * column, amx::kRowBytes);
        amx::multiply_add<n, 4, 5 + n % 3>();
      });
    }
    alignas(64) float sums[N][kTile];
    amx::unrolled<N>([&](auto n) { amx::store<n>(sums[n], amx::kRowBytes); });
    for (int n = 0; n < N; n += 2) {
      for (int64_t r = 0; r < kSide; ++r) {
        visit(r, d + n * kSide, load(sums[n] + r * kSide), load(sums[n + 1] + r * kSide));
      }
    }
  }
};

}  // namespace atom
#endif
