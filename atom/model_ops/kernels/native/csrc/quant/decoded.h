// Products of many rows with wide inputs where processors multiply 16 bits, or bytes of pairs of rows: codes
// become 16 bits or bytes once for all rows, a piece of them at a time, which stays in the first cache. The
// sums are those of quant/product.cpp: exact within a span, then span by span.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "quant/span.h"
#include "quant/wide.h"

namespace atom {

// Whether so many rows are worth it.
inline bool takes_decoded(Inputs kind, int64_t rows) {
  return !kSplitsWide && is_wide(kind) && rows >= 8;
}

// P panels of the weights from `panel` on.
template <class C, Inputs kKind, int P>
class DecodedProduct {
 public:
  DecodedProduct(const QuantMatrix& w, int64_t panel, const QuantRows& rows)
      : w_(w), panel_(panel), rows_(rows), spans_(w.inputs / rows.span) {}

  // out[(r * P + p) * kLanes] = panel p times row r.
  void multiply(int64_t count, float* out) {
    static thread_local Scratch scratch;
    open_ = rows_.span <= kPiece ? nullptr : scratch.get<vint>(count * P);
    const int64_t whole = std::max<int64_t>(1, kPiece / rows_.span) * rows_.span;
    for (int64_t begin = 0, end; begin < w_.inputs; begin = end) {
      end = std::min(begin + whole, w_.inputs);
      if (open_ != nullptr) end = std::min(begin + kPiece, (begin / rows_.span + 1) * rows_.span);
      decode(begin, end);
      int64_t r = 0;
      const auto take = [&](auto size) {
        constexpr int R = decltype(size)::value;
        for (; r + R <= count; r += R) add<R>(begin, end, r, out + r * P * kLanes);
      };
      take(std::integral_constant<int, 4>{});
      take(std::integral_constant<int, 3>{});
      take(std::integral_constant<int, 2>{});
      take(std::integral_constant<int, 1>{});
    }
  }

 private:
  static constexpr int64_t kPiece = 256, kFewestInputs = 16;
  static constexpr bool kPaired = is_paired(kKind);
  // Vectors that a quad becomes.
  static constexpr int kParts = kPaired ? 1 : 2;
  // Bytes from what is decoded to what is fetched.
  static constexpr int64_t kNearBytes = 2048;

  void decode(int64_t begin, int64_t end) {
    const int64_t bytes = w_.panel_bytes();
    vint* to = codes_;
    for (int64_t i = begin; i < end; i += C::kUnit, to += C::kQuads * kParts * P) {
      const int64_t at = i / C::kUnit * C::kBytes;
      const int64_t near = at + kNearBytes + (at + kNearBytes < bytes ? 0 : (P - 1) * bytes);
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        const uint8_t* panel = w_.codes + (panel_ + p) * bytes;
        for (int64_t j = 0; j < C::kBytes; j += 64) __builtin_prefetch(panel + near + j);
        ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
          const vint quad = C::quad(panel + at, j);
          if (kPaired) {
            to[j * P + p] = quad;
            continue;
          }
          const Halves both = halves(quad);
          to[2 * (j * P + p)] = both.even;
          to[2 * (j * P + p) + 1] = both.odd;
        }
      }
    }
    for (int64_t i = begin, n = 0; i < end; i += rows_.span, ++n) {
      for (int p = 0; p < P; ++p) {
        fetch_factors(w_, panel_ + P + p, i);
        factors_[n][p] = product_factors(w_, panel_ + p, i);
      }
    }
  }

  // Adds the piece to the results of R rows from `first` on.
  template <int R>
  void add(int64_t begin, int64_t end, int64_t first, float* out) const {
    const int8_t* x = static_cast<const int8_t*>(rows_.inputs) + first * rows_.stride + (kPaired ? 3 : 2) * begin;
    const int64_t size = std::min(rows_.span, end - begin);
    const bool is_first = begin == 0, is_last = end == w_.inputs;
    const bool opens = begin % rows_.span == 0, closes = end % rows_.span == 0;
    const PairFactors pair_factors;
    vfloat totals[R][P];
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        totals[r][p] = is_first ? vfloat{} : load(out + (r * P + p) * kLanes);
      }
    }
    const vint* codes = codes_;
    const Span* spans = rows_.spans + first * spans_ + begin / rows_.span;
    for (int64_t i = begin, n = 0; i < end; i += size, ++n, ++spans) {
      vint sums[R][P];
      ATOM_UNROLL for (int r = 0; r < R; ++r) {
        ATOM_UNROLL for (int p = 0; p < P; ++p) {
          sums[r][p] = opens ? splat(spans[r * spans_].first_code) : open_[(first + r) * P + p];
        }
      }
      if constexpr (kPaired) {
        ATOM_IN_MEMORY(totals);
        for (int64_t j = 0; j < size; j += C::kUnit, codes += C::kQuads * P, x += 3 * C::kUnit) {
          sum_unit<R>(codes, x, pair_factors, sums);
        }
      } else {
        for (int64_t j = 0; j < size; j += 8, codes += 4 * P, x += 16) {
          sum_quad<R>(codes, x, sums);
          sum_quad<R>(codes + 2 * P, x + 8, sums);
        }
      }
      if (!closes) {
        ATOM_UNROLL for (int r = 0; r < R; ++r) {
          ATOM_UNROLL for (int p = 0; p < P; ++p) open_[(first + r) * P + p] = sums[r][p];
        }
        break;
      }
      const auto close = [&](auto has_shift) {
        ATOM_UNROLL for (int p = 0; p < P; ++p) {
          ATOM_UNROLL for (int r = 0; r < R; ++r) {
            totals[r][p] = add_span<kKind>(totals[r][p], convert(sums[r][p]), factors_[n][p],
                                           spans[r * spans_], has_shift);
          }
        }
      };
      if (w_.has_shift()) close(std::true_type{});
      else close(std::false_type{});
    }
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      const float scale = is_last ? rows_.spans[(first + r) * spans_].scale : 1.0f;
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        store(out + (r * P + p) * kLanes, is_last ? totals[r][p] * scale : totals[r][p]);
      }
    }
  }

  template <int R>
  ATOM_INLINE void sum_quad(const vint* codes, const int8_t* x, vint (&sums)[R][P]) const {
    ATOM_UNROLL for (int half = 0; half < 2; ++half) {
      vint of_panels[P];
      ATOM_UNROLL for (int p = 0; p < P; ++p) of_panels[p] = codes[2 * p + half];
      ATOM_UNROLL for (int r = 0; r < R; ++r) {
        const vint inputs = splat(raw<int32_t>(x + r * rows_.stride + 4 * half));
        ATOM_UNROLL for (int p = 0; p < P; ++p) sums[r][p] = dot2(sums[r][p], of_panels[p], inputs);
      }
    }
  }

  template <int R>
  ATOM_INLINE void sum_unit(const vint* codes, const int8_t* x, const PairFactors& factors,
                            vint (&sums)[R][P]) const {
    ATOM_IN_MEMORY(sums);
    PairSums<R, P> of_unit;
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      vint quads[P];
      ATOM_UNROLL for (int p = 0; p < P; ++p) quads[p] = codes[j * P + p];
      of_unit.add(quads, x + 12 * j, 2 * rows_.stride, j == 0);
    }
    of_unit.add_to(sums, factors);
  }

  const QuantMatrix& w_;
  const int64_t panel_;
  const QuantRows& rows_;
  const int64_t spans_;
  vint* open_ = nullptr;  // [rows, P]: sums of a span that goes on behind a piece
  vint codes_[kPiece / 4 * kParts * P];  // of each quad and panel: of 16 bits the even ones, then the odd ones
  Factors factors_[kPiece / kFewestInputs][P];
};

}  // namespace atom
