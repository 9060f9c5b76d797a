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
    const int64_t pairs = (spans.end - spans.begin) / 2, chunks = (pairs + kChunkPairs - 1) / kChunkPairs;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t end = chunk + 1 == chunks ? spans.end : spans.begin + pairs * (chunk + 1) / chunks * 2;
      first_ = spans.begin + pairs * chunk / chunks * 2;
      count_ = end - first_;
      prepare(spans);
      if (w_.has_shift()) multiply_chunk<true>(out);
      else multiply_chunk<false>(out);
    }
  }

 private:
  static constexpr int R = kKind == Inputs::kInt16 ? kTileSide / 2 : kTileSide;
  static constexpr int P = kTileSide / R;
  static constexpr int64_t kChunkPairs = 4, kMostSpans = 2 * kChunkPairs + 1;
  using Totals = vfloat[R][P];
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

  // Most chunks have three or four pairs of spans, and no branches then.
  template <bool kShift>
  void multiply_chunk(float* out) {
    if (count_ == 2 * kChunkPairs) return multiply_pairs<kShift, kChunkPairs>(out);
    if (count_ == 2 * kChunkPairs - 2) return multiply_pairs<kShift, kChunkPairs - 1>(out);
    multiply_pairs<kShift, 0>(out);
  }

  // kPairs: of spans in the chunk, or 0 for any number of spans. Of an odd one the last is multiplied twice
  // and added once, since spans take turns with two sets of tiles.
  template <bool kShift, int kPairs>
  void multiply_pairs(float* out) {
    const int64_t passes = (rows_ + R - 1) / R * kHalves;
    const int64_t turns = kPairs > 0 ? 2 * kPairs : (count_ + 1) / 2 * 2;
    Totals totals = {};
    begin_span<0>(0, 0);
    begin_span<1>(0, 1);
    Tiles::template store<0>(sums_[0]);
    for (int64_t pass = 0; pass < passes; ++pass) {
      load_totals(pass, out, totals);
      if constexpr (kPairs > 0) {
        amx::unrolled<kPairs - 1>([&](auto pair) __attribute__((always_inline)) {
          work<0, kShift, kPairs>(pass, 2 * pair + 2, pass, 2 * pair, totals);
          work<1, kShift, kPairs>(pass, 2 * pair + 3, pass, 2 * pair + 1, totals);
        });
      } else {
        for (int64_t i = 2; i < turns; i += 2) {
          work<0, kShift, kPairs>(pass, i, pass, i - 2, totals);
          work<1, kShift, kPairs>(pass, i + 1, pass, i - 1, totals);
        }
      }
      const int64_t next = pass + 1 < passes ? pass + 1 : pass;  // in vain at the end
      work<0, kShift, kPairs>(next, 0, pass, turns - 2, totals);
      work<1, kShift, kPairs>(next, 1, pass, turns - 1, totals);
      store_totals(pass, totals, out);
    }
  }

  // Products of a span begin, the sums of the one before leave their tiles, and those of two before are
  // added: of span `added`.
  template <int kSet, bool kShift, int kPairs>
  ATOM_INLINE void work(int64_t pass, int64_t i, int64_t added_pass, int64_t added, Totals& totals) {
    begin_span<kSet>(pass, kPairs > 0 ? i : std::min(i, count_ - 1));
    Tiles::template store<1 - kSet>(sums_[1 - kSet]);
    if (kPairs > 0 || added < count_) add<kShift>(added_pass, added, sums_[kSet], totals);
  }

  template <int kSet>
  ATOM_INLINE void begin_span(int64_t pass, int64_t i) const {
    const uint8_t* tiles[P];
    ATOM_UNROLL for (int p = 0; p < P; ++p) tiles[p] = tiles_[i][pass % kHalves + p];
    const uint8_t* const inputs[] = {tile_of_inputs(x_, pass / kHalves * R, first_ + i)};
    Tiles::template multiply<kSet>(inputs, tiles);
  }

  template <bool kShift>
  ATOM_INLINE void add(int64_t pass, int64_t i, const TileSums<P>& sums, Totals& totals) const {
    const Factors* factors = factors_[i] + pass % kHalves;
    const float* inputs = x_.sums + (pass / kHalves * spans_ + first_ + i) * R;
    ATOM_UNROLL for (int m = 0; m < R; ++m) {
      const Span of{0, inputs[m], {}};
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        const vfloat products = convert(sums.template codes<kKind>(p, m, R));
        totals[m][p] = add_span<kKind>(totals[m][p], products, factors[p], of, kShift);
      }
    }
  }

  // Where the total of a pass's row m and panel p lies.
  static float* place(float* out, int64_t pass, int64_t m, int64_t p) {
    return out + (2 * (pass / kHalves * R + m) + pass % kHalves + p) * kTileSide;
  }

  ATOM_INLINE void load_totals(int64_t pass, float* out, Totals& totals) const {
    ATOM_UNROLL for (int m = 0; m < R; ++m) {
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        totals[m][p] = first_ == 0 ? vfloat{} : load(place(out, pass, m, p));
      }
    }
  }

  // At the end with the rows' scales.
  ATOM_INLINE void store_totals(int64_t pass, const Totals& totals, float* out) const {
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
  Factors factors_[kMostSpans][2];
  alignas(64) uint8_t tiles_[kMostSpans][2][kTileSide * kLineBytes];
};

}  // namespace atom

#endif
