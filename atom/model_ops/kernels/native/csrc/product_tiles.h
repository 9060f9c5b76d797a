// Products of bfloat16 rows on matrix tiles, for any number of rows: see product.h.
//
// Weights are read as they lie, 16 rows of 32 elements. Activations are packed into what the
// other operand must be: 16 pairs of elements by 16 rows. So sums come as 16 features by 16
// rows, and are transposed on their way out.
#pragma once

#include "amx.h"

#if defined(ATOM_AMX)
#include <algorithm>

#include "parallel.h"

namespace atom {

class TileProduct {
 public:
  using Weight = bfloat16;

  static constexpr int64_t kPackRows = amx::kSide;
  static constexpr int64_t kMostChunk = 4 * amx::kSide;
  static constexpr int64_t kBlockBytes = 512 * 1024;
  static constexpr int64_t kMostBlockRows = 1024;

  TileProduct(int64_t rows, int64_t size)
      : rows_(rows), size_(size), steps_((size + amx::kDepth - 1) / amx::kDepth) {}

  int64_t packed_bytes() const {
    if (rows_ == 1) return group_bytes() / amx::kSide;
    return (rows_ + amx::kSide - 1) / amx::kSide * group_bytes();
  }

  // packed[group][step][pair][row]; of a single row that is the row. Absent ones are 0.
  void pack(const bfloat16* x, int64_t stride, int64_t first, int64_t last, void* packed) const {
    char* to = static_cast<char*>(packed) + first / amx::kSide * group_bytes();
    for (int64_t row = first; row < last; row += amx::kSide) {
      const int64_t count = std::min(amx::kSide, last - row);
      for (int64_t k = 0; k < size_; k += amx::kDepth) {
        __m512i lines[16];
        const __mmask32 mask = size_ - k < amx::kDepth ? (1u << (size_ - k)) - 1 : ~0u;
        ATOM_UNROLL for (int i = 0; i < 16; ++i) {
          lines[i] = i < count ? _mm512_maskz_loadu_epi16(mask, x + (row + i) * stride + k)
                               : _mm512_setzero_si512();
        }
        if (rows_ == 1) {
          _mm512_storeu_si512(to, lines[0]);
          to += amx::kRowBytes;
          continue;
        }
        amx::transpose(lines);
        ATOM_UNROLL for (int i = 0; i < 16; ++i, to += amx::kRowBytes)
            _mm512_storeu_si512(to, lines[i]);
      }
    }
  }

  // Kept by every thread while it multiplies.
  class Session : amx::Session {
   public:
    explicit Session(const TileProduct& product)
        : amx::Session(product.rows_ == 1 ? 1 : amx::kSide) {}
  };

  // Calls `visit(first, rows)` for all rows, cut into what `multiply` takes at once.
  template <class Visit>
  void for_chunks(const Visit& visit) const {
    const int64_t most = rows_ <= kStreamUpTo ? kStreamUpTo : 2 * amx::kSide;
    for (int64_t row = 0; row < rows_; row += most) visit(row, std::min(most, rows_ - row));
  }

  // sums[i * kPanel + r] = weight[r] . x[first + i], for `count` rows of a chunk and `outs`
  // features, at most kPanel.
  void multiply(const void* packed, int64_t first, int64_t count, const bfloat16* weight,
                int64_t outs, float* sums) const {
    const char* x = static_cast<const char*>(packed) + first / amx::kSide * group_bytes();
    const int64_t groups = (count + amx::kSide - 1) / amx::kSide;
    const bool whole = outs == kPanel && size_ % amx::kDepth == 0;
    if (rows_ > kStreamUpTo) fetch_next_panel(weight, size_, first, count, rows_);
    if (rows_ > kStreamUpTo && whole) {
      return groups == 1 ? blocks<2, 1, false>(weight, size_, x, count, sums)
                         : blocks<2, 2, false>(weight, size_, x, count, sums);
    }
    for (int64_t n = 0; n < outs; n += amx::kSide) {
      const bfloat16* w = weight + n * size_;
      int64_t stride = size_;
      if (outs - n < amx::kSide || size_ % amx::kDepth != 0) {
        w = padded(w, std::min(amx::kSide, outs - n));
        stride = steps_ * amx::kDepth;
      }
      switch (groups) {
        case 1: blocks<1, 1, true>(w, stride, x, count, sums + n); break;
        case 2: blocks<1, 2, true>(w, stride, x, count, sums + n); break;
        case 3: blocks<1, 3, true>(w, stride, x, count, sums + n); break;
        default: blocks<1, 4, true>(w, stride, x, count, sums + n);
      }
    }
  }

 private:
  // Up to here weights are streamed from memory, 16 rows at a time.
  static constexpr int64_t kStreamUpTo = kMostChunk;

  // From what is read of a weight row to what is fetched of it.
  static constexpr int64_t kAheadBytes = 512;

  int64_t group_bytes() const { return steps_ * amx::kTileBytes; }

  // 16 rows of whole tiles: a copy of `count` rows, and zeros.
  const bfloat16* padded(const bfloat16* weight, int64_t count) const {
    static thread_local Scratch scratch;
    const int64_t stride = steps_ * amx::kDepth;
    auto* to = scratch.get<bfloat16>(amx::kSide * stride);
    std::memset(to, 0, amx::kSide * stride * sizeof(bfloat16));
    for (int64_t r = 0; r < count; ++r) {
      std::memcpy(to + r * stride, weight + r * size_, size_ * sizeof(bfloat16));
    }
    return to;
  }

  // F blocks of 16 features times G groups of up to 16 rows.
  template <int F, int G, bool kStream>
  void blocks(const bfloat16* weight, int64_t stride, const char* x, int64_t count,
              float* sums) const {
    using namespace amx;
    static_assert(F * G <= 4 && F <= 2);
    constexpr auto right = [](int g) { return F == 1 ? 5 + g % 3 : 6 + g; };
    const int64_t bytes = stride * sizeof(bfloat16), columns = rows_ == 1 ? 1 : kSide;
    const int64_t group = group_bytes();
    const auto* w = reinterpret_cast<const char*>(weight);
    unrolled<F * G>([](auto i) { zero<i>(); });
    for (int64_t k = 0; k < steps_; ++k, w += kRowBytes, x += kRowBytes * columns) {
      if constexpr (kStream) {
        const bool next = k * kRowBytes + kAheadBytes >= bytes;  // the next block of features
        const char* ahead = w + kAheadBytes + (next ? (kSide - 1) * bytes : 0);
        ATOM_UNROLL for (int r = 0; r < kSide; ++r) __builtin_prefetch(ahead + r * bytes);
      }
      unrolled<F>([&](auto f) { load<4 + f>(w + f * kSide * bytes, bytes); });
      unrolled<G>([&](auto g) {
        load<right(g)>(x + g * group, 4 * columns);
        unrolled<F>([&](auto f) { multiply_add<f * G + g, 4 + f, right(g)>(); });
      });
    }
    if (rows_ == 1) {
      unrolled<F>([&](auto f) { store<f * G>(sums + f * kSide, sizeof(float)); });
      return;
    }
    alignas(64) float tiles[F * G][kSide * kSide];
    unrolled<F * G>([&](auto i) { store<i>(tiles[i], kRowBytes); });
    ATOM_UNROLL for (int i = 0; i < F * G; ++i) {
      __m512i rows[16];
      ATOM_UNROLL for (int r = 0; r < 16; ++r) rows[r] = _mm512_load_si512(tiles[i] + r * kSide);
      transpose(rows);
      float* to = sums + i % G * kSide * kPanel + i / G * kSide;
      const int64_t most = std::min(kSide, count - i % G * kSide);
      for (int64_t r = 0; r < most; ++r) _mm512_storeu_si512(to + r * kPanel, rows[r]);
    }
  }

  int64_t rows_, size_, steps_;
};

}  // namespace atom
#endif
