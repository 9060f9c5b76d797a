// Products of many rows of wide inputs on matrix tiles, where a span is one step of them.
#pragma once

#include "quant/tile_codes.h"
#include "quant/tiles.h"

#if defined(ATOM_QUANT_TILES)

namespace atom {

// Two panels times rows, some spans of all rows at a time, so that the weights' tiles stay in the first
// cache. A pass is a tile of rows times P panels: its totals are in registers.
template <class C, Inputs kKind, bool kUnsignedWeights>
class BlockProduct {
  static_assert(is_wide(kKind));

 public:
  BlockProduct(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows)
      : w_(w), x_(x), rows_(rows), spans_(w.inputs / x.span), panel_(panel),
        span_bytes_(x.span / C::kUnit * C::kBytes) {}

  // out [rows, 2, kTileSide]: from span 0 on it is set, else added to. `spans` are at least two.
  void multiply(SpanRange spans, float* out) {
    const int64_t count = spans.end - spans.begin, chunks = (count + kChunk - 1) / kChunk;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      first_ = spans.begin + count * chunk / chunks;
      count_ = spans.begin + count * (chunk + 1) / chunks - first_;
      prepare(spans);
      if (w_.has_shift()) multiply_chunk<true>(out);
      else multiply_chunk<false>(out);
    }
  }

 private:
  static constexpr int R = kKind == Inputs::kInt16 ? kTileSide / 2 : kTileSide;
  static constexpr int P = kTileSide / R;
  static constexpr int64_t kChunk = 8;
  using Tiles = TileSets<kUnsignedWeights, 1, P>;
  static constexpr int kHalves = 2 / P;  // passes of a tile of rows

  // Makes tiles and factors of a chunk's weights, and fetches those of the next one, at the end of the
  // panels those of the next two.
  void prepare(SpanRange spans) {
    const int64_t bytes = count_ * span_bytes_;
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t panel = std::min(panel_ + half, w_.panels() - 1);
      const uint8_t* codes = w_.codes + panel * w_.panel_bytes() + first_ * span_bytes_;
      const uint8_t* next = codes + bytes;
      if (first_ + count_ == spans.end) {
        next += 2 * w_.panel_bytes() - (spans.end - spans.begin) * span_bytes_;
      }
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
      for (int64_t i = 0; i < count_; ++i) {
        const int64_t input = (first_ + i) * x_.span;
        unpack_tile(codes + i * span_bytes_, tiles_[i][half]);
        factors_[i][half] = product_factors(w_, panel, input);
        fetch_factors(w_, panel_ + 2 + half, input);
      }
    }
  }

  void unpack_tile(const uint8_t* codes, uint8_t* tile) const {
    if constexpr (kKind == Inputs::kInt12 && !kUnsignedWeights) unpack_signed_pairs(codes, tile);
    else unpack<C, kKind>(w_, codes, x_.span, tile);
  }

  template <bool kShift>
  void multiply_chunk(float* out) {
    const int64_t passes = (rows_ + R - 1) / R * kHalves, steps = passes * count_;
    vfloat totals[R][P] = {};
    int64_t step = 0;
    // Products of a step begin, and sums of the one before leave their tiles. Inlined, since totals that a
    // call takes would be in memory.
    const auto begin = [&](auto set, int64_t pass, int64_t i) __attribute__((always_inline)) {
      constexpr int kSet = decltype(set)::value;
      if (step < steps) {
        const uint8_t* tiles[P];
        ATOM_UNROLL for (int p = 0; p < P; ++p) tiles[p] = tiles_[i][pass % kHalves + p];
        const uint8_t* const inputs[] = {tile_of_inputs(x_, pass / kHalves * R, first_ + i)};
        Tiles::template multiply<kSet>(inputs, tiles);
      }
      if (0 < step && step <= steps) Tiles::template store<1 - kSet>(sums_[1 - kSet]);
    };
    // The sums of two steps before are added.
    const auto work = [&](int64_t pass, int64_t i, int64_t added_pass,
                          int64_t added) __attribute__((always_inline)) {
      if (step % 2 == 0) begin(std::integral_constant<int, 0>{}, pass, i);
      else begin(std::integral_constant<int, 1>{}, pass, i);
      if (step > 1) add<kShift>(added_pass, added, sums_[step % 2], totals);
      ++step;
    };
    for (int64_t pass = 0;; ++pass) {
      work(pass, 0, pass - 1, count_ - 2);
      work(pass, 1, pass - 1, count_ - 1);
      if (pass > 0) store_totals(pass - 1, totals, out);
      if (pass == passes) break;
      load_totals(pass, out, totals);
      for (int64_t i = 2; i < count_; ++i) work(pass, i, pass, i - 2);
    }
  }

  template <bool kShift>
  ATOM_INLINE void add(int64_t pass, int64_t i, const TileSums<P>& sums, vfloat (&totals)[R][P]) const {
    const Factors* factors = factors_[i] + pass % kHalves;
    const Span* inputs = x_.spans + pass / kHalves * R * spans_ + first_ + i;
    ATOM_UNROLL for (int m = 0; m < R; ++m) {
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        const vfloat products = convert(sums.template codes<kKind>(p, m, R));
        totals[m][p] = add_span<kKind>(totals[m][p], products, factors[p], inputs[m * spans_], kShift);
      }
    }
  }

  // Where the total of a pass's row m and panel p lies.
  static float* place(float* out, int64_t pass, int64_t m, int64_t p) {
    return out + (2 * (pass / kHalves * R + m) + pass % kHalves + p) * kTileSide;
  }

  ATOM_INLINE void load_totals(int64_t pass, float* out, vfloat (&totals)[R][P]) const {
    ATOM_UNROLL for (int m = 0; m < R; ++m) {
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        totals[m][p] = first_ == 0 ? vfloat{} : load(place(out, pass, m, p));
      }
    }
  }

  // At the end with the rows' scales.
  ATOM_INLINE void store_totals(int64_t pass, const vfloat (&totals)[R][P], float* out) const {
    const Span* inputs = x_.spans + pass / kHalves * R * spans_;
    const bool is_last = first_ + count_ == spans_;
    ATOM_UNROLL for (int m = 0; m < R; ++m) {
      const vfloat scale = splat(is_last ? inputs[m * spans_].scale : 1.0f);
      ATOM_UNROLL for (int p = 0; p < P; ++p) store(place(out, pass, m, p), totals[m][p] * scale);
    }
  }

  const QuantMatrix& w_;
  const QuantRows& x_;
  const int64_t rows_, spans_, panel_;
  const int64_t span_bytes_;
  int64_t first_ = 0, count_ = 0;  // spans of the chunk, at least two
  TileSums<P> sums_[2];
  Factors factors_[kChunk][2];
  alignas(64) uint8_t tiles_[kChunk][2][kTileSide * kLineBytes];
};

}  // namespace atom

#endif
