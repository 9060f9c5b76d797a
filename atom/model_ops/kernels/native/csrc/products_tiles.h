// The products of products.h on tiles of bfloat16 (AMX): 16 rows of 32 elements times 16 pairs
// by 16 columns. A tile's sums do not depend on its other rows and columns, and all products take
// this way whatever their number, so results have the same bits in every batch.
#pragma once

#include "products.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && \
    defined(__AVX512BW__) && defined(__linux__)
#define ATOM_TILE_PRODUCTS 1
#include <sys/syscall.h>
#include <unistd.h>

namespace atom {

struct alignas(64) TileRegisters {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

ATOM_INLINE void transpose_tile(const float* from, __m512 (&out)[16]) {
  __m512 a[16], b[16];
  ATOM_UNROLL for (int i = 0; i < 16; i += 2) {
    const __m512 even = _mm512_load_ps(from + 16 * i), odd = _mm512_load_ps(from + 16 * i + 16);
    a[i] = _mm512_unpacklo_ps(even, odd);
    a[i + 1] = _mm512_unpackhi_ps(even, odd);
  }
  ATOM_UNROLL for (int i = 0; i < 16; i += 4) {
    ATOM_UNROLL for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  ATOM_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512 low = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88);
    const __m512 high = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0x88);
    const __m512 low2 = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xdd);
    const __m512 high2 = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0xdd);
    out[j] = _mm512_shuffle_f32x4(low, high, 0x88);
    out[j + 8] = _mm512_shuffle_f32x4(low, high, 0xdd);
    out[j + 4] = _mm512_shuffle_f32x4(low2, high2, 0x88);
    out[j + 12] = _mm512_shuffle_f32x4(low2, high2, 0xdd);
  }
}

struct Tiles {
  using Weight = bfloat16;
  using PackedVectors = uint32_t;
  static constexpr int64_t kSide = 16, kDepth = 32;
  static_assert(kSide == kRowGroup && kDepth == kDotStep);
  static constexpr int64_t kTile = kSide * kSide;

  static int64_t packed_size(int64_t count, int64_t size) {
    return round_up(count, kSide) * size / 2;
  }
  static int64_t mix_bytes(int64_t count, int64_t width) {
    return round_up(count, kDepth) * width * int64_t(sizeof(bfloat16));
  }

  // The kernel hands out the tiles' registers on request, to the whole process.
  static bool is_permitted() {
    constexpr int64_t kRequest = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return granted;
  }
  static void begin() {
    const TileRegisters config;
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  // out[g / 16][p][g % 16]: elements 2 p and 2 p + 1 of vector g. What stands in the places of
  // absent vectors does not matter.
  static void pack_vector(const bfloat16* x, int64_t g, int64_t at, int64_t count, int64_t size,
                          uint32_t* out) {
    uint32_t* to = out + g / kSide * kSide * (size / 2) + at / 2 * kSide + g % kSide;
    for (int64_t p = 0; p < count / 2; ++p) to[p * kSide] = raw<uint32_t>(x + 2 * p);
  }

  template <class Rows>
  static void dots(const Rows& rows, const uint32_t* x, int64_t count, int64_t size, float* out,
                   int64_t out_stride, const void* next = nullptr) {
    const int64_t groups = (rows.count + kSide - 1) / kSide;
    const char* fetch = static_cast<const char*>(next);
    for (int64_t g = 0; g < count; g += 2 * kSide, fetch = nullptr) {
      const uint32_t* vectors = x + g * (size / 2);
      const int64_t most = count - g;
      float* to = out + g * out_stride;
      int64_t i = 0;
      if (most > kSide) {
        for (; i + 2 <= groups; i += 2) dot_tiles<2, 2>(rows, i, vectors, most, size, to, out_stride, fetch);
        if (i < groups) dot_tiles<1, 2>(rows, i, vectors, most, size, to, out_stride, fetch);
      } else {
        for (; i + 4 <= groups; i += 4) dot_tiles<4, 1>(rows, i, vectors, most, size, to, out_stride, fetch);
        if (i + 2 <= groups) {
          dot_tiles<2, 1>(rows, i, vectors, most, size, to, out_stride, fetch);
          i += 2;
        }
        if (i < groups) dot_tiles<1, 1>(rows, i, vectors, most, size, to, out_stride, fetch);
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
  template <int N>
  static void zero() {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) _tile_zero(2);
    if constexpr (N > 2) _tile_zero(3);
  }
  template <int N>
  static void save(float* to) {
    _tile_stored(0, to, 64);
    if constexpr (N > 1) _tile_stored(1, to + kTile, 64);
    if constexpr (N > 2) _tile_stored(2, to + 2 * kTile, 64);
    if constexpr (N > 2) _tile_stored(3, to + 3 * kTile, 64);
  }

  // N groups of rows from group i on, with G groups of vectors: at most four tiles of sums.
  template <int N, int G, class Rows>
  static void dot_tiles(const Rows& rows, int64_t i, const uint32_t* x, int64_t most, int64_t size,
                        float* out, int64_t out_stride, const char*& fetch) {
    const bfloat16* row[N];
    for (int n = 0; n < N; ++n) row[n] = rows.group(i + n);
    const int64_t stride = rows.stride * int64_t(sizeof(bfloat16));
    const uint32_t* second = x + kSide * (size / 2);
    zero<N * G>();
    for (int64_t k = 0; k < size; k += kDepth) {
      if (fetch != nullptr) {
        ATOM_UNROLL for (int j = 0; j < N * kSide; ++j) __builtin_prefetch(fetch + j * 64, 0, 2);
        fetch += N * kSide * 64;
      }
      _tile_loadd(4, x + k / 2 * kSide, 64);
      _tile_loadd(5, row[0] + k, stride);
      _tile_dpbf16ps(0, 5, 4);
      if constexpr (G == 2) {
        _tile_loadd(6, second + k / 2 * kSide, 64);
        if constexpr (N == 1) {
          _tile_dpbf16ps(1, 5, 6);
        } else {
          _tile_dpbf16ps(2, 5, 6);
        }
      }
      if constexpr (N > 1) {
        _tile_loadd(7, row[1] + k, stride);
        _tile_dpbf16ps(1, 7, 4);
        if constexpr (G == 2) _tile_dpbf16ps(3, 7, 6);
      }
      if constexpr (N > 2) {
        _tile_loadd(6, row[2] + k, stride);
        _tile_dpbf16ps(2, 6, 4);
        _tile_loadd(5, row[3] + k, stride);
        _tile_dpbf16ps(3, 5, 4);
      }
    }
    alignas(64) float sums[N * G * kTile];
    save<N * G>(sums);
    for (int t = 0; t < N * G; ++t) {
      __m512 columns[16];
      transpose_tile(sums + t * kTile, columns);
      const int64_t first = t / N * kSide;
      for (int64_t g = first; g < std::min(most, first + kSide); ++g) {
        store(out + g * out_stride + (i + t % N) * kSide, (vfloat)columns[g - first]);
      }
    }
  }

  template <int N, class Visit>
  ATOM_INLINE static void mix_columns(const bfloat16* weights, int64_t weight_stride,
                                      const uint32_t* pairs, int64_t depths, int64_t d,
                                      const Visit& visit) {
    const int64_t column = depths * kTile;
    const uint32_t* at = pairs + d / kSide * column;
    zero<N>();
    for (int64_t k = 0; k < depths; ++k, at += kTile) {
      _tile_loadd(4, weights + k * kDepth, weight_stride * sizeof(bfloat16));
      _tile_loadd(5, at, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, at + column, 64);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (N > 2) {
        _tile_loadd(7, at + 2 * column, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, at + 3 * column, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    alignas(64) float sums[N * kTile];
    save<N>(sums);
    for (int n = 0; n < N; n += 2) {
      for (int64_t r = 0; r < kSide; ++r) {
        visit(r, d + n * kSide, load(sums + n * kTile + r * kSide),
              load(sums + (n + 1) * kTile + r * kSide));
      }
    }
  }
};

}  // namespace atom
#endif
