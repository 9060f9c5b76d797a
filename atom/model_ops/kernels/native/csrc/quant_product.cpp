// Products of few rows, with vectors.
#include <cstdlib>

#include "quant_span.h"
#include "quant_wide.h"

namespace atom {
namespace {

// Bytes between reading and prefetching codes.
constexpr int64_t kAheadCodes = 2048;

// sums[r] += the products of so many units of codes with row r.
template <class C, int R>
ATOM_INLINE void sum_units(const uint8_t* codes, int64_t units, const int8_t* x, int64_t stride,
                           vint (&sums)[R]) {
  constexpr bool kTwoChains = R <= 2;
  vint others[R] = {};
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes, x += C::kUnit) {
    for (int64_t i = 0; i < C::kBytes; i += 64) __builtin_prefetch(codes + i + kAheadCodes);
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      const vint quad = C::quad(codes, j);
      ATOM_UNROLL for (int r = 0; r < R; ++r) {
        vint& sum = kTwoChains && j % 2 != 0 ? others[r] : sums[r];
        sum = dot4<C>(sum, quad, splat(raw<int32_t>(x + r * stride + 4 * j)));
      }
    }
  }
  if (kTwoChains) {
    ATOM_UNROLL for (int r = 0; r < R; ++r) sums[r] += others[r];
  }
}

// The same with wide inputs, so many in a row of weights.
template <class C, Inputs kKind, int R>
ATOM_INLINE void sum_wide_units(const uint8_t* codes, int64_t units, const int8_t* x,
                                int64_t inputs, int64_t stride, vint (&sums)[R]) {
  vint others[R] = {};
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes) {
    for (int64_t i = 0; i < C::kBytes; i += 64) __builtin_prefetch(codes + i + kAheadCodes);
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      const vint quad = C::quad(codes, j);
      if constexpr (kSplitsWide) {
        const int8_t* at = x + unit * C::kUnit + 4 * j;
        ATOM_UNROLL for (int r = 0; r < R; ++r) {
          others[r] = dot4<C>(others[r], quad, splat(raw<int32_t>(at + r * stride)));
          sums[r] = dot4<C>(sums[r], quad, splat(raw<int32_t>(at + r * stride + inputs)));
        }
      } else {
        const Halves parts = halves<C>(quad);
        const int8_t* at = x + 2 * (unit * C::kUnit + 4 * j);
        ATOM_UNROLL for (int r = 0; r < R; ++r) {
          sums[r] = dot2(sums[r], parts.even, splat(raw<int32_t>(at + r * stride)));
          others[r] = dot2(others[r], parts.odd, splat(raw<int32_t>(at + r * stride + 4)));
        }
      }
    }
  }
  ATOM_UNROLL for (int r = 0; r < R; ++r) sums[r] += kSplitsWide ? others[r] << low_bits(kKind) : others[r];
}

// As tiles of bfloat16 sum: of each unit the even inputs and the odd ones, then both.
template <class C, int R>
ATOM_INLINE void sum_units(const uint8_t* codes, int64_t units, const float* x, int64_t stride,
                           vfloat (&sums)[R]) {
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes, x += C::kUnit) {
    vfloat parts[2][R] = {};
    for (int64_t i = 0; i < C::kBytes; i += 64) __builtin_prefetch(codes + i + kAheadCodes);
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      const vint quad = C::quad(codes, j);
      ATOM_UNROLL for (int i = 0; i < 4; ++i) {
        vfloat w = number<C>(quad, i);
        ATOM_IN_REGISTER(w);
        ATOM_UNROLL for (int r = 0; r < R; ++r) {
          parts[i % 2][r] = fma(w, splat(x[r * stride + 4 * j + i]), parts[i % 2][r]);
        }
      }
    }
    ATOM_UNROLL for (int r = 0; r < R; ++r) sums[r] += parts[0][r] + parts[1][r];
  }
}

// out[r * kLanes] = one panel of weights times row `first` + r.
template <class C, Inputs kKind, int R>
void multiply_rows(const QuantMatrix& w, int64_t panel, const QuantRows& rows, int64_t first,
                   float* out) {
  constexpr bool kInteger = kKind != Inputs::kNumbers;
  using Input = std::conditional_t<kInteger, int8_t, float>;
  using Sum = std::conditional_t<kInteger, vint, vfloat>;
  const Input* x = static_cast<const Input*>(rows.inputs) + first * rows.stride;
  const int64_t spans = w.inputs / rows.span, units = rows.span / C::kUnit;
  const uint8_t* codes = w.codes + panel * w.panel_bytes();
  const Span* of_spans = rows.spans + first * spans;
  const Shifts shifts(w);
  vfloat totals[R] = {};
  const int64_t span_inputs = rows.span * (is_wide(kKind) && !kSplitsWide ? 2 : 1);
  for (int64_t span = 0; span < spans; ++span, codes += units * C::kBytes, x += span_inputs) {
    Sum sums[R];
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      const Span& of = of_spans[r * spans + span];
      if constexpr (kInteger) sums[r] = splat(of.first_code);
      else sums[r] = Sum{};
    }
    if constexpr (is_wide(kKind)) {
      sum_wide_units<C, kKind, R>(codes, units, x, w.inputs, rows.stride, sums);
    } else {
      sum_units<C, R>(codes, units, x, rows.stride, sums);
    }
    const Factors factors = load_factors(w, panel, span * rows.span);
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      const Span& of = of_spans[r * spans + span];
      vfloat products;
      if constexpr (kInteger) products = convert(sums[r]);
      else products = sums[r] + of.first;
      totals[r] = add_span<kKind>(totals[r], products, factors, of, shifts);
    }
  }
  ATOM_UNROLL for (int r = 0; r < R; ++r) store(out + r * kLanes, totals[r]);
}

template <class C, Inputs kKind>
void multiply_panel(const QuantMatrix& w, int64_t panel, const QuantRows& rows, int64_t first,
                    int64_t count, float* out) {
  int64_t r = 0;
#if defined(__AVX512F__) || defined(__aarch64__)
  for (; r + 8 <= count; r += 8) {
    multiply_rows<C, kKind, 8>(w, panel, rows, first + r, out + r * kLanes);
  }
#endif
  for (; r + 4 <= count; r += 4) {
    multiply_rows<C, kKind, 4>(w, panel, rows, first + r, out + r * kLanes);
  }
  for (; r + 2 <= count; r += 2) {
    multiply_rows<C, kKind, 2>(w, panel, rows, first + r, out + r * kLanes);
  }
  if (r < count) multiply_rows<C, kKind, 1>(w, panel, rows, first + r, out + r * kLanes);
}

}  // namespace

void multiply_panel(const QuantMatrix& w, int64_t panel, const QuantRows& rows, int64_t first,
                    int64_t count, float* out) {
  const auto of_codes = [&](auto codes) {
    using C = decltype(codes);
    switch (rows.kind) {
      case Inputs::kNumbers:
        return multiply_panel<C, Inputs::kNumbers>(w, panel, rows, first, count, out);
      case Inputs::kInt8:
        return multiply_panel<C, Inputs::kInt8>(w, panel, rows, first, count, out);
      case Inputs::kInt16:
        return multiply_panel<C, Inputs::kInt16>(w, panel, rows, first, count, out);
      case Inputs::kInt12:
        return multiply_panel<Codes<4>, Inputs::kInt12>(w, panel, rows, first, count, out);
      case Inputs::kBfloat16: std::abort();  // quant_numbers.cpp has those
    }
  };
  switch (w.bits) {
    case 4: return of_codes(Codes<4>{});
    case 6: return of_codes(Codes<6>{});
    default: return of_codes(Codes<8>{});
  }
}

}  // namespace atom
