// Products of few rows of wide inputs on matrix tiles, where a span is one step of them.
#pragma once

#include "quant/tile_codes.h"

#if defined(ATOM_QUANT_TILES)

namespace atom {

// T tiles of at most R rows each times P panels: two products a span, which is kUnits units of codes. While
// tiles multiply a span, the sums of one before are added to the totals, which stay in registers, and the
// codes of one to come become tiles.
template <class C, Inputs kKind, int kUnits, int R, int T, int P>
class StepProduct {
  static_assert(is_wide(kKind));

 public:
  StepProduct(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows)
      : w_(w), x_(x), rows_(rows), spans_(w.inputs / x.span), panel_(panel),
        next_panel_(std::min(panel + P - 1, w.panels() - 1)), factors_(w, panel, x.span, true) {}

  // Of row m and panel p to out[(2 * m + p) * kTileSide].
  void multiply(float* out) {
    if (w_.has_shift()) multiply<true>(out);
    else multiply<false>(out);
  }

 private:
  using Tiles = TileSets<kUnsigned<C, kKind>, T, P>;
  using Near = NearFactors<P>;
  // Spans from the codes that become tiles to those that are multiplied, and places of tiles.
  static constexpr int64_t kLead = 2, kPlaces = 4;
  // From the codes that become tiles to those that are fetched meanwhile.
  static constexpr int64_t kNearBytes = 2048;
  static constexpr int64_t kSpanBytes = kUnits * C::kBytes;  // of a panel's codes
  static constexpr int64_t kTileBytes = kTileSide * kLineBytes;

  // All is in variables of its own, since instructions of tiles may change what lies in memory.
  template <bool kShift>
  void multiply(float* out) {
    const int64_t spans = spans_, depth = depth_bytes(x_);
    const int64_t panel_bytes = w_.panel_bytes(), line = tile_lines_of(kKind, x_.tile_rows) * kLineBytes;
    const uint8_t* const codes = w_.codes + panel_ * panel_bytes;
    const int64_t apart = (next_panel_ - panel_) * panel_bytes;
    const uint8_t* const x = static_cast<const uint8_t*>(x_.inputs);
    const int64_t tile_apart = R * x_.stride, middle = w_.middle;
    vfloat totals[T * R][P] = {};
    TileSums<T * P> sums[2];

    const uint8_t *prepared = codes, *prepared_end = codes + spans * kSpanBytes;
    const uint8_t *multiplied = codes, *fetched = codes + kNearBytes;
    int64_t place = 0, multiplied_place = 0;
    uint64_t at = 0;
    // Makes tiles of the next span's codes, and fetches codes behind them.
    const auto prepare = [&]() __attribute__((always_inline)) {
      const uint8_t* ahead = fetched < prepared_end ? fetched : fetched + (P - 1) * panel_bytes;
      ATOM_UNROLL for (int64_t i = 0; i < kSpanBytes; i += kLineBytes) {
        ATOM_UNROLL for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + p * panel_bytes + i);
      }
      if constexpr (!kAreTiles<C, kKind>) {
        constexpr int64_t kUnitBytes = C::kQuads * kQuadBytes * (kKind == Inputs::kInt12 ? 2 : 1);
        ATOM_UNROLL for (int i = 0; i < kUnits * P; ++i) {
          const int64_t unit = i / P, p = i % P;
          unpack_unit<C, kKind>(middle, prepared + p * apart + unit * C::kBytes,
                                tiles_ + place + p * kTileBytes + unit * kUnitBytes);
        }
      }
      prepared += kSpanBytes;
      fetched += kSpanBytes;
      place = (place + P * kTileBytes) % (kPlaces * P * kTileBytes);
    };
    const auto begin = [&](auto set) __attribute__((always_inline)) {
      const uint8_t *tiles[P], *inputs[T];
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        if constexpr (kAreTiles<C, kKind>) tiles[p] = multiplied + p * apart;
        else tiles[p] = tiles_ + multiplied_place + p * kTileBytes;
      }
      const uint8_t* from = x + at / kLineBytes * line + at % kLineBytes;
      ATOM_UNROLL for (int t = 0; t < T; ++t) inputs[t] = from + t * tile_apart;
      Tiles::template multiply<decltype(set)::value>(inputs, tiles);
      at += depth;
      multiplied += kSpanBytes;
      multiplied_place = (multiplied_place + P * kTileBytes) % (kPlaces * P * kTileBytes);
    };
    const Span* spans_of[T * R];  // of each row; beyond the last one its once more
    for (int64_t m = 0; m < T * R; ++m) spans_of[m] = x_.spans + std::min(m, rows_ - 1) * spans;
    int64_t added = 0;
    const int64_t low = (T == 1 ? x_.tile_rows : R) * kTileSide;
    const auto add = [&](auto set, const Factors* factors) __attribute__((always_inline)) {
      const int32_t* high_sums = sums[decltype(set)::value].of[0];
      const int32_t* low_sums = high_sums + low;
      asm("" : "+r"(low_sums));
      ATOM_UNROLL for (int m = 0; m < T * R; ++m) {
        const Span& of = spans_of[m][added];
        const vint first = splat(of.first_code);
        ATOM_UNROLL for (int p = 0; p < P; ++p) {
          const int64_t i = (m / R * P + p) * TileSums<1>::kTile + m % R * kTileSide;
          vint sum = raw<vint>(high_sums + i);
          if constexpr (kKind == Inputs::kInt16) sum = (sum << 8) + raw<vint>(low_sums + i);
          if constexpr (kUnsigned<C, kKind>) sum += first;
          totals[m][p] = add_span<kKind>(totals[m][p], convert(sum), factors[p], of, kShift);
        }
      }
      ++added;
    };
    constexpr std::integral_constant<int, 0> kEven{};
    constexpr std::integral_constant<int, 1> kOdd{};
    int64_t left = spans - kLead;  // to be multiplied
    const auto step = [&](auto set, const Factors* factors) __attribute__((always_inline)) {
      constexpr int kSet = decltype(set)::value;
      if (left > 0) begin(set);
      if (left > kLead) prepare();
      if (left >= 0) Tiles::template store<1 - kSet>(sums[1 - kSet]);
      --left;
      add(set, factors);
    };
    for (int64_t span = 0; span < std::min(2 * kLead, spans); ++span) prepare();
    begin(kEven);
    begin(kOdd);
    Tiles::template store<0>(sums[0]);
    for (int64_t first = 0; first < spans; first += Near::kSpans) {
      const Factors* factors = factors_.of_span(first);
      const Factors* end = factors + std::min(Near::kSpans, spans - first) * P;
      for (; factors < end; factors += 2 * P) {
        step(kEven, factors);
        if (factors + P < end) step(kOdd, factors + P);
      }
    }
    ATOM_UNROLL for (int m = 0; m < T * R; ++m) {
      if (m == rows_) break;
      const vfloat scale = splat(spans_of[m]->scale);
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        store(out + (2 * m + p) * kTileSide, totals[m][p] * scale);
      }
    }
  }

  const QuantMatrix& w_;
  const QuantRows& x_;
  const int64_t rows_, spans_, panel_, next_panel_;
  Near factors_;
  alignas(64) uint8_t tiles_[kPlaces * P * kTileBytes];
};

}  // namespace atom

#endif
