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
  static constexpr int64_t kBlockBytes = 1024 * 1024;
  static constexpr int64_t kMostBlockRows = 512;
  static constexpr bool kOverlaps = true;

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
    const int64_t most = rows_ <= kStreamUpTo ? kStreamUpTo : kRows;
    for (int64_t row = 0; row < rows_; row += most) visit(row, std::min(most, rows_ - row));
  }

  // Steps of kDepth inputs.
  struct Range {
    int64_t begin, end;
  };
  // Of many rows the second cache has room for a range of their inputs.
  int64_t ranges() const {
    if (!overlaps(kPanel)) return 1;
    return std::min(steps_, (packed_bytes() + kBlockBytes - 1) / kBlockBytes);
  }
  Range range(int64_t index, int64_t count) const {
    return {steps_ * index / count, steps_ * (index + 1) / count};
  }
  // Floats that the sums of a panel have between two ranges.
  int64_t totals() const { return (rows_ + kRows - 1) / kRows * kRows * kPanel; }

  // Calls `use(first, count, sums)` with the sums of all rows, a chunk after the other, as `multiply`
  // gives them. Of many rows, those of a chunk leave their tiles and are used while the next one's
  // products are computed.
  // kInMemory: whether weights must be fetched, and the next ones lie behind them.
  template <bool kInMemory = true, class Use>
  void for_sums(const void* packed, const bfloat16* weight, int64_t outs, const Use& use) const {
    for_sums<kInMemory>(packed, weight, outs, {0, steps_}, nullptr, use);
  }

  // The same, a range after the other. totals: the sums of those before; `use` is called in the last one.
  template <bool kInMemory, class Use>
  void for_sums(const void* packed, const bfloat16* weight, int64_t outs, Range range, float* totals,
                const Use& use) const {
    alignas(64) float sums[kMostChunk * kPanel];
    const bool is_last = range.end == steps_;
    if (!overlaps(outs)) {
      if (!is_last) return;
      return for_chunks([&](int64_t first, int64_t count) {
        multiply<kInMemory>(packed, first, count, weight, outs, sums);
        use(first, count, sums);
      });
    }
    // What is done with a chunk's sums: four tiles of them become rows, which `use` takes.
    constexpr int kParts = 5;
    alignas(64) float results[4][kTileFloats];
    const int64_t bytes = size_ * int64_t(sizeof(bfloat16));
    const int64_t every = (range.end - range.begin) / kParts + 1;
    const char* next_panel = reinterpret_cast<const char*>(weight) + kPanel * bytes;
    const auto finish = [&](int part, int64_t begin, int64_t groups, int64_t count) {
      if (part == kParts - 1) return use(begin, count, sums);
      if (part < 2 * groups) turn(results[part], sums + turned(part, groups));
    };
    int64_t first = 0;
    for (int part = kParts; first < rows_; first += kRows, part = is_last ? 0 : kParts) {
      const int64_t fetched = kPanel * first / rows_;
      const int64_t fetch_to = kPanel * std::min(rows_, first + kRows) / rows_;
      int64_t due = range.begin;
      const auto between = [&](int64_t step) {
        for (int64_t r = fetched; kInMemory && r < fetch_to; ++r) {
          __builtin_prefetch(next_panel + r * bytes + step * amx::kRowBytes, 0, 2);
        }
        if (part == kParts || step < due) return;
        finish(part++, first - kRows, 2, kRows);
        due += every;
      };
      const RowTiles<false> tiles{weight, bytes};
      const char* x = static_cast<const char*>(packed) + first / amx::kSide * group_bytes();
      const float* const from = range.begin == 0 ? nullptr : totals + first * kPanel;
      const bool both = rows_ - first > amx::kSide;
      if (both) products<2, 2>(tiles, x, range, from, between);
      else products<2, 1>(tiles, x, range, from, between);
      while (part < kParts) finish(part++, first - kRows, 2, kRows);
      float* const to = is_last ? results[0] : totals + first * kPanel;
      amx::unrolled<4>([&](auto i) {
        if (both || i < 2) amx::store<i>(to + i * kTileFloats, amx::kRowBytes);
      });
    }
    if (!is_last) return;
    first -= kRows;
    const int64_t count = rows_ - first;
    for (int part = 0; part < kParts; ++part) finish(part, first, count > amx::kSide ? 2 : 1, count);
  }

  // sums[i * kPanel + r] = weight[r] . x[first + i], for `count` rows of a chunk and `outs`
  // features, at most kPanel.
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
  // Of more, so many are multiplied at once.
  static constexpr int64_t kRows = 2 * amx::kSide;
  static constexpr int64_t kTileFloats = amx::kSide * amx::kSide;

  bool overlaps(int64_t outs) const {
    return rows_ > kStreamUpTo && outs == kPanel && size_ % amx::kDepth == 0;
  }

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
    products<F, G>(tiles, x, {0, steps_}, nullptr, [](int64_t) {});
    if (rows_ == 1) {
      unrolled<F>([&](auto f) { store<f * G>(sums + f * kSide, sizeof(float)); });
      return;
    }
    alignas(64) float results[F * G][kSide * kSide];
    unrolled<F * G>([&](auto i) { store<i>(results[i], kRowBytes); });
    ATOM_UNROLL for (int i = 0; i < F * G; ++i) {
      turn(results[i], sums + turned(i, G), std::min(kSide, count - i % G * kSide));
    }
  }

  // Sums of F blocks of 16 features times G groups of rows, in tiles f * G + g, added to those `from`
  // memory or to 0. `between(step)` is called after each step.
  template <int F, int G, class Tiles, class Between>
  ATOM_INLINE void products(const Tiles& tiles, const char* x, Range range, const float* from,
                            const Between& between) const {
    using namespace amx;
    static_assert(F * G <= 4 && F <= 2);
    constexpr auto right = [](int g) { return F == 1 ? 5 + (g + 1) % 3 : 6 + g; };
    const int64_t columns = rows_ == 1 ? 1 : kSide, group = group_bytes();
    unrolled<F * G>([&](auto i) {
      if (from == nullptr) zero<i>();
      else amx::load<i>(from + i * kTileFloats, kRowBytes);
    });
    x += range.begin * kRowBytes * columns;
    for (int64_t k = range.begin; k < range.end; ++k, x += kRowBytes * columns) {
      tiles.template load<F>(k);
      unrolled<G>([&](auto g) {
        amx::load<right(g)>(x + g * group, 4 * columns);
        unrolled<F>([&](auto f) { multiply_add<f * G + g, 4 + f, right(g)>(); });
      });
      between(k);
    }
  }

  // Where the sums of tile f * G + g begin.
  static int64_t turned(int64_t tile, int64_t groups) {
    return tile % groups * amx::kSide * kPanel + tile / groups * amx::kSide;
  }
  // 16 features by `count` rows become rows of sums.
  ATOM_INLINE static void turn(const float* results, float* sums, int64_t count = amx::kSide) {
    __m512i rows[16];
    ATOM_UNROLL for (int r = 0; r < 16; ++r) rows[r] = _mm512_load_si512(results + r * amx::kSide);
    transpose(rows);
    for (int64_t r = 0; r < count; ++r) _mm512_storeu_si512(sums + r * kPanel, rows[r]);
  }

  int64_t rows_, size_, steps_;
};

}  // namespace atom
#endif
