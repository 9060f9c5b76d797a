// Products of few rows of wide inputs on matrix tiles, where a span is one step of them.
#pragma once

#include "quant/tile_codes.h"

#if defined(ATOM_QUANT_TILES)

namespace atom {

// Two panels times at most kTileSide rows. While tiles multiply a span, the sums of the one before are added
// to the totals, which stay in registers, and the codes of one to come become tiles.
template <class C, Inputs kKind, int R>
class StepProduct {
  static_assert(is_wide(kKind));

 public:
  StepProduct(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows)
      : w_(w), x_(x), rows_(rows), spans_(w.inputs / x.span), panel_(panel),
        span_bytes_(x.span / C::kUnit * C::kBytes) {
    for (int64_t half = 0; half < 2; ++half) {
      codes_[half] = w.codes + panel_of(half) * w.panel_bytes();
    }
    for (int64_t m = 0; m < R; ++m) spans_of_[m] = x.spans + std::min(m, rows - 1) * spans_;
  }

  // out [rows, 2, kTileSide]
  void multiply(float* out) {
    if (w_.has_shift()) multiply<true>(out);
    else multiply<false>(out);
  }

 private:
  // Whether high and low bytes have sums of their own.
  static constexpr bool kTwoBytes = kKind == Inputs::kInt16;
  // Spans from the codes that become tiles to those that are multiplied, and places of tiles.
  static constexpr int64_t kLead = 2, kPlaces = 4;
  // From the codes that become tiles to those that are fetched meanwhile.
  static constexpr int64_t kNearBytes = 2048;

  template <bool kShift>
  void multiply(float* out) {
    vfloat totals[R][2] = {};
    TileSums sums[2];
    for (int64_t span = 0; span < kLead; ++span) prepare(span);
    for (int64_t span = 0; span < spans_; ++span) {
      if (kTwoBytes || span % 2 == 0) multiply_span<0>(span, sums[span % 2]);
      else multiply_span<2>(span, sums[span % 2]);
      prepare(span + kLead);
      if (span > 0) add<kShift>(span - 1, sums[(span - 1) % 2], totals);
    }
    add<kShift>(spans_ - 1, sums[(spans_ - 1) % 2], totals);
    ATOM_UNROLL for (int m = 0; m < R; ++m) {
      if (m == rows_) break;
      const vfloat scale = splat(spans_of_[m]->scale);
      ATOM_UNROLL for (int half = 0; half < 2; ++half) {
        store(out + (2 * m + half) * kTileSide, totals[m][half] * scale);
      }
    }
  }

  int64_t panel_of(int64_t half) const { return std::min(panel_ + half, w_.panels() - 1); }

  // Makes tiles of a span's codes, and fetches codes behind them.
  ATOM_INLINE void prepare(int64_t span) {
    if (span >= spans_) return;
    ATOM_UNROLL for (int half = 0; half < 2; ++half) {
      const int64_t at = span * span_bytes_, near = at + kNearBytes;
      const uint8_t* next = codes_[half] + near + (near < w_.panel_bytes() ? 0 : w_.panel_bytes());
      for (int64_t i = 0; i < span_bytes_; i += 64) __builtin_prefetch(next + i);
      fetch_factors(w_, panel_ + 2 + half, span * x_.span);
      if constexpr (!kAreTiles<C, kKind>) {
        unpack<C, kKind>(w_, codes_[half] + at, x_.span, tiles_[span % kPlaces][half]);
      }
    }
  }

  const uint8_t* tile(int64_t span, int64_t half) const {
    if constexpr (kAreTiles<C, kKind>) return codes_[half] + span * span_bytes_;
    else return tiles_[span % kPlaces][half];
  }

  template <int kFirst>
  ATOM_INLINE void multiply_span(int64_t span, TileSums& sums) const {
    const int64_t at = span * depth_bytes(x_), block = x_.tile_rows * kLineBytes;
    const auto* x = static_cast<const uint8_t*>(x_.inputs);
    x += at / kLineBytes * block * (kTwoBytes ? 2 : 1) + at % kLineBytes;
    amx::zero<kFirst>();
    amx::zero<kFirst + 1>();
    amx::load<4>(x, kLineBytes);
    amx::load<6>(tile(span, 0), kLineBytes);
    amx::load<7>(tile(span, 1), kLineBytes);
    multiply_tile<C, kKind, kFirst, 4, 6>();
    multiply_tile<C, kKind, kFirst + 1, 4, 7>();
    if constexpr (kTwoBytes) {
      amx::zero<2>();
      amx::zero<3>();
      amx::load<5>(x + block, kLineBytes);
      multiply_tile<C, kKind, 2, 5, 6>();
      multiply_tile<C, kKind, 3, 5, 7>();
    }
    amx::store<kFirst>(sums.of[0], kLineBytes);
    amx::store<kFirst + 1>(sums.of[1], kLineBytes);
    if constexpr (kTwoBytes) {
      amx::store<2>(sums.of[2], kLineBytes);
      amx::store<3>(sums.of[3], kLineBytes);
    }
  }

  template <bool kShift>
  ATOM_INLINE void add(int64_t span, const TileSums& sums, vfloat (&totals)[R][2]) const {
    Factors factors[2];
    ATOM_UNROLL for (int half = 0; half < 2; ++half) {
      factors[half] = product_factors(w_, panel_of(half), span * x_.span);
    }
    ATOM_UNROLL for (int m = 0; m < R; ++m) {
      const Span& inputs = spans_of_[m][span];
      ATOM_UNROLL for (int half = 0; half < 2; ++half) {
        const vfloat products = sums.template products<C, kKind>(half, m, inputs);
        totals[m][half] = add_span<kKind>(totals[m][half], products, factors[half], inputs, kShift);
      }
    }
  }

  const QuantMatrix w_;
  const QuantRows x_;
  const int64_t rows_, spans_, panel_;
  const int64_t span_bytes_;  // of a panel's codes
  const uint8_t* codes_[2];
  const Span* spans_of_[R];  // of each row; beyond the last one its once more
  alignas(64) uint8_t tiles_[kPlaces][2][kTileSide * kLineBytes];
};

}  // namespace atom

#endif
