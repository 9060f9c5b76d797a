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

// Tiles of 16 weight rows from `weight` on, `bytes` apart; `load<F>(step)` brings those of F blocks of
// 16 rows into registers 4 and 5. kFetch: whether the next steps are fetched from memory meanwhile.
template <bool kFetch>
struct RowTiles {
  const bfloat16* weight;
  int64_t bytes;

  template <int F>
  ATOM_INLINE void load(int64_t step) const {
    const char* w = reinterpret_cast<const char*>(weight) + step * amx::kRowBytes;
    if constexpr (kFetch) {
      const bool next = step * amx::kRowBytes + kAhead >= bytes;  // the next block of rows
      const char* ahead = w + kAhead + (next ? (amx::kSide - 1) * bytes : 0);
      ATOM_UNROLL for (int r = 0; r < amx::kSide; ++r) __builtin_prefetch(ahead + r * bytes);
    }
    amx::unrolled<F>([&](auto f) { amx::load<4 + f>(w + f * amx::kSide * bytes, bytes); });
  }

  // Bytes from what is read of a row to what is fetched of it.
  static constexpr int64_t kAhead = 512;
};

class TileProduct {
 public:
  using Weight = bfloat16;

  static constexpr int64_t kPackRows = amx::kSide;
  static constexpr int64_t kMostChunk = 4 * amx::kSide;
  static constexpr int64_t kBlockBytes = 512 * 1024;
  static constexpr int64_t kMostBlockRows = 1024;

  TileProduct(int64_t rows, int64_t size)
      : rows_(rows), size_(size), steps_((size + amx::kDepth - 1) / amx::kDepth) {}

  int64_t rows() const { return rows_; }
  int64_t packed_bytes() const {
    if (rows_ == 1) return group_bytes() / amx::kSide;
    return (rows_ + amx::kSide - 1) / amx::kSide * group_bytes();
  }

  const void* as_packed(const bfloat16*, int64_t) const { return nullptr; }

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
        transpose(lines);
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

  const bfloat16* prepare(const bfloat16* weight, int64_t) const { return weight; }

  // Calls `visit(first, rows)` for all rows, cut into what `multiply` takes at once.
  template <class Visit>
  void for_chunks(const Visit& visit) const {
    const int64_t most = rows_ <= kStreamUpTo ? kStreamUpTo : 2 * amx::kSide;
    for (int64_t row = 0; row < rows_; row += most) visit(row, std::min(most, rows_ - row));
  }

  // sums[i * kPanel + r] = weight[r] . x[first + i], for `count` rows of a chunk and `outs`
  // features, at most kPanel.
  // kInMemory: whether weights must be fetched, and the next ones lie behind them.
  template <bool kInMemory = true>
  void multiply(const void* packed, int64_t first, int64_t count, const bfloat16* weight,
                int64_t outs, float* sums) const {
    const char* x = static_cast<const char*>(packed) + first / amx::kSide * group_bytes();
    const bool whole = outs == kPanel && size_ % amx::kDepth == 0;
    if (kInMemory && rows_ > kStreamUpTo) fetch_next_panel(weight, size_, first, count, rows_);
    if (rows_ > kStreamUpTo && whole) {
      return blocks<2>(RowTiles<false>{weight, size_ * int64_t(sizeof(bfloat16))}, x, count, sums);
    }
    for (int64_t n = 0; n < outs; n += amx::kSide) {
      const bfloat16* w = weight + n * size_;
      int64_t stride = size_;
      if (outs - n < amx::kSide || size_ % amx::kDepth != 0) {
        w = padded(w, std::min(amx::kSide, outs - n));
        stride = steps_ * amx::kDepth;
      }
      blocks<1>(RowTiles<kInMemory>{w, stride * int64_t(sizeof(bfloat16))}, x, count, sums + n);
    }
  }

  // The same for a few rows and F blocks of 16 features, of which `tiles` loads what it makes.
  template <int F, class Tiles>
  void multiply_tiles(const void* packed, const Tiles& tiles, float* sums) const {
    blocks<F>(tiles, static_cast<const char*>(packed), rows_, sums);
  }
  // Rows that those may be.
  static constexpr int64_t kFewRows = 2 * amx::kSide;

 private:
  // Up to here weights are streamed from memory, 16 rows at a time.
  static constexpr int64_t kStreamUpTo = kMostChunk;

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

  // F blocks of 16 features times `count` rows.
  template <int F, class Tiles>
  void blocks(const Tiles& tiles, const char* x, int64_t count, float* sums) const {
    const int64_t groups = (count + amx::kSide - 1) / amx::kSide;
    if (groups == 1) return blocks<F, 1>(tiles, x, count, sums);
    if (F == 2 || groups == 2) return blocks<F, 2>(tiles, x, count, sums);
    if constexpr (F == 1) {
      if (groups == 3) return blocks<1, 3>(tiles, x, count, sums);
      blocks<1, 4>(tiles, x, count, sums);
    }
  }

  // The same with G groups of up to 16 rows.
  template <int F, int G, class Tiles>
  void blocks(const Tiles& tiles, const char* x, int64_t count, float* sums) const {
    using namespace amx;
    static_assert(F * G <= 4 && F <= 2);
    constexpr auto right = [](int g) { return F == 1 ? 5 + (g + 1) % 3 : 6 + g; };
    const int64_t columns = rows_ == 1 ? 1 : kSide, group = group_bytes();
    unrolled<F * G>([](auto i) { zero<i>(); });
    for (int64_t k = 0; k < steps_; ++k, x += kRowBytes * columns) {
      tiles.template load<F>(k);
      unrolled<G>([&](auto g) {
        amx::load<right(g)>(x + g * group, 4 * columns);
        unrolled<F>([&](auto f) { multiply_add<f * G + g, 4 + f, right(g)>(); });
      });
    }
    if (rows_ == 1) {
      unrolled<F>([&](auto f) { store<f * G>(sums + f * kSide, sizeof(float)); });
      return;
    }
    alignas(64) float results[F * G][kSide * kSide];
    unrolled<F * G>([&](auto i) { store<i>(results[i], kRowBytes); });
    ATOM_UNROLL for (int i = 0; i < F * G; ++i) {
      __m512i rows[16];
      ATOM_UNROLL for (int r = 0; r < 16; ++r) rows[r] = _mm512_load_si512(results[i] + r * kSide);
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
