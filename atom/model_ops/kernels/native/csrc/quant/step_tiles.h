// Products of few rows of wide inputs on matrix tiles, where a span is one step of them.
#pragma once

#include "quant/tile_codes.h"

#if defined(ATOM_QUANT_TILES)

namespace atom {

// P panels times at most R rows. While tiles multiply a span, the sums of one before are added to the
// totals, which stay in registers, and the codes of one to come become tiles.
template <class C, Inputs kKind, int R, int P>
class StepProduct {
  static_assert(is_wide(kKind));

 public:
  StepProduct(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows)
      : w_(w), x_(x), rows_(rows), spans_(w.inputs / x.span), panel_(panel),
        span_bytes_(x.span / C::kUnit * C::kBytes) {
    for (int64_t p = 0; p < P; ++p) codes_[p] = w.codes + panel_of(p) * w.panel_bytes();
    for (int64_t m = 0; m < R; ++m) spans_of_[m] = x.spans + std::min(m, rows - 1) * spans_;
  }

  // Of row m and panel p to out[(2 * m + p) * kTileSide].
  void multiply(float* out) {
    if (w_.has_shift()) multiply<true>(out);
    else multiply<false>(out);
  }

 private:
  using Tiles = TileSets<kUnsigned<C, kKind>, P>;
  // Spans from the codes that become tiles to those that are multiplied, and places of tiles.
  static constexpr int64_t kLead = 2, kPlaces = 4;
  // From the codes that become tiles to those that are fetched meanwhile.
  static constexpr int64_t kNearBytes = 2048;

  template <bool kShift>
  void multiply(float* out) {
    vfloat totals[R][P] = {};
    TileSums<P> sums[2];
    for (int64_t span = 0; span < kLead; ++span) prepare(span);
    const auto step = [&](auto set, int64_t span) {
      constexpr int kSet = decltype(set)::value;
      if (span < spans_) multiply_span<kSet>(span);
      if (0 < span && span <= spans_) Tiles::template store<1 - kSet>(sums[1 - kSet]);
      prepare(span + kLead);
      if (1 < span && span < spans_ + 2) add<kShift>(span - 2, sums[kSet], totals);
    };
    for (int64_t span = 0; span < spans_ + 2; span += 2) {
      step(std::integral_constant<int, 0>{}, span);
      step(std::integral_constant<int, 1>{}, span + 1);
    }
    ATOM_UNROLL for (int m = 0; m < R; ++m) {
      if (m == rows_) break;
      const vfloat scale = splat(spans_of_[m]->scale);
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        store(out + (2 * m + p) * kTileSide, totals[m][p] * scale);
      }
    }
  }

  int64_t panel_of(int64_t p) const { return std::min(panel_ + p, w_.panels() - 1); }

  // Makes tiles of a span's codes, and fetches codes behind them.
  ATOM_INLINE void prepare(int64_t span) {
    if (span >= spans_) return;
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      const int64_t at = span * span_bytes_, near = at + kNearBytes;
      const uint8_t* next = codes_[p] + near + (near < w_.panel_bytes() ? 0 : (P - 1) * w_.panel_bytes());
      for (int64_t i = 0; i < span_bytes_; i += 64) __builtin_prefetch(next + i);
      fetch_factors(w_, panel_ + P + p, span * x_.span);
      if constexpr (!kAreTiles<C, kKind>) {
        unpack<C, kKind>(w_, codes_[p] + at, x_.span, tiles_[span % kPlaces][p]);
      }
    }
  }

  template <int kSet>
  ATOM_INLINE void multiply_span(int64_t span) const {
    const uint8_t* tiles[P];
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      if constexpr (kAreTiles<C, kKind>) tiles[p] = codes_[p] + span * span_bytes_;
      else tiles[p] = tiles_[span % kPlaces][p];
    }
    Tiles::template multiply<kSet>(tile_of_inputs(x_, 0, span), tiles);
  }

  template <bool kShift>
  ATOM_INLINE void add(int64_t span, const TileSums<P>& sums, vfloat (&totals)[R][P]) const {
    Factors factors[P];
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      factors[p] = product_factors(w_, panel_of(p), span * x_.span);
    }
    ATOM_UNROLL for (int m = 0; m < R; ++m) {
      const Span& inputs = spans_of_[m][span];
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        const vfloat products = sums.template products<C, kKind>(p, m, x_.tile_rows, inputs);
        totals[m][p] = add_span<kKind>(totals[m][p], products, factors[p], inputs, kShift);
      }
    }
  }

  const QuantMatrix w_;
  const QuantRows x_;
  const int64_t rows_, spans_, panel_;
  const int64_t span_bytes_;  // of a panel's codes
  const uint8_t* codes_[P];
  const Span* spans_of_[R];  // of each row; beyond the last one its once more
  alignas(64) uint8_t tiles_[kPlaces][P][kTileSide * kLineBytes];
};

}  // namespace atom

#endif
