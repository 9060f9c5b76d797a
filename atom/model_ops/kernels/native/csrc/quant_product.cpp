// Products of few rows, with vectors.
#include <cstdlib>

#include "quant_span.h"
#include "quant_wide.h"

namespace atom {
namespace {

// Bytes between reading and prefetching codes.
constexpr int64_t kAheadCodes = 2048;

// Sums of P panels of weights with R rows.
template <class Sum, int R, int P>
struct Sums {
  Sum of[R][P];
};

// Whether all products have one sum, those of high bytes being with 16 times a code. Few rows would
// wait for it.
template <Inputs kKind, int R>
constexpr bool kOneSum = kKind == Inputs::kInt12 && kUnsignedProduct && R >= 4;

template <class C>
ATOM_INLINE void prefetch_unit(const uint8_t* codes) {
  for (int64_t i = 0; i < C::kBytes; i += 64) __builtin_prefetch(codes + i + kAheadCodes);
}

// sums += the products of so many units of codes, those of a panel `panel` bytes behind the one
// before, with rows that are `stride` apart.
template <class C, int R, int P>
ATOM_INLINE void sum_units(const uint8_t* codes, int64_t panel, int64_t units, const int8_t* x,
                           int64_t stride, Sums<vint, R, P>& sums) {
  constexpr bool kTwoChains = R * P <= 2;
  Sums<vint, R, P> others{};
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes, x += C::kUnit) {
    ATOM_UNROLL for (int p = 0; p < P; ++p) prefetch_unit<C>(codes + p * panel);
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      vint quads[P];
      ATOM_UNROLL for (int p = 0; p < P; ++p) quads[p] = C::quad(codes + p * panel, j);
      ATOM_UNROLL for (int r = 0; r < R; ++r) {
        const vint inputs = splat(raw<int32_t>(x + r * stride + 4 * j));
        ATOM_UNROLL for (int p = 0; p < P; ++p) {
          vint& sum = kTwoChains && j % 2 != 0 ? others.of[r][p] : sums.of[r][p];
          sum = dot4<C>(sum, quads[p], inputs);
        }
      }
    }
  }
  if (!kTwoChains) return;
  ATOM_UNROLL for (int r = 0; r < R; ++r) {
    ATOM_UNROLL for (int p = 0; p < P; ++p) sums.of[r][p] += others.of[r][p];
  }
}

// The same with wide inputs, so many in a row of weights.
template <class C, Inputs kKind, int R, int P>
ATOM_INLINE void sum_wide_units(const uint8_t* codes, int64_t panel, int64_t units,
                                const int8_t* x, int64_t inputs, int64_t stride,
                                Sums<vint, R, P>& sums) {
  Sums<vint, R, P> others{};
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes) {
    ATOM_UNROLL for (int p = 0; p < P; ++p) prefetch_unit<C>(codes + p * panel);
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      vint quads[P];
      ATOM_UNROLL for (int p = 0; p < P; ++p) quads[p] = C::quad(codes + p * panel, j);
      if constexpr (kOneSum<kKind, R>) {
        vint high_quads[P];
        ATOM_UNROLL for (int p = 0; p < P; ++p) {
          high_quads[p] = C::high_quad(codes + p * panel, j);
        }
        const int8_t* at = x + unit * C::kUnit + 4 * j;
        ATOM_UNROLL for (int r = 0; r < R; ++r) {
          const vint high = splat(raw<int32_t>(at + r * stride));
          const vint low = splat(raw<int32_t>(at + r * stride + inputs));
          ATOM_UNROLL for (int p = 0; p < P; ++p) {
            sums.of[r][p] = dot4<C>(sums.of[r][p], high_quads[p], high);
            sums.of[r][p] = dot4<C>(sums.of[r][p], quads[p], low);
          }
        }
      } else if constexpr (kSplitsWide) {
        const int8_t* at = x + unit * C::kUnit + 4 * j;
        ATOM_UNROLL for (int r = 0; r < R; ++r) {
          const vint high = splat(raw<int32_t>(at + r * stride));
          const vint low = splat(raw<int32_t>(at + r * stride + inputs));
          ATOM_UNROLL for (int p = 0; p < P; ++p) {
            others.of[r][p] = dot4<C>(others.of[r][p], quads[p], high);
            sums.of[r][p] = dot4<C>(sums.of[r][p], quads[p], low);
          }
        }
      } else {
        Halves parts[P];
        ATOM_UNROLL for (int p = 0; p < P; ++p) parts[p] = halves<C>(quads[p]);
        const int8_t* at = x + 2 * (unit * C::kUnit + 4 * j);
        ATOM_UNROLL for (int r = 0; r < R; ++r) {
          const vint even = splat(raw<int32_t>(at + r * stride));
          const vint odd = splat(raw<int32_t>(at + r * stride + 4));
          ATOM_UNROLL for (int p = 0; p < P; ++p) {
            sums.of[r][p] = dot2(sums.of[r][p], parts[p].even, even);
            others.of[r][p] = dot2(others.of[r][p], parts[p].odd, odd);
          }
        }
      }
    }
  }
  if (kOneSum<kKind, R>) return;
  ATOM_UNROLL for (int r = 0; r < R; ++r) {
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      sums.of[r][p] += kSplitsWide ? others.of[r][p] << low_bits(kKind) : others.of[r][p];
    }
  }
}

// As tiles of bfloat16 sum: of each unit the even inputs and the odd ones, then both.
template <class C, int R, int P>
ATOM_INLINE void sum_units(const uint8_t* codes, int64_t panel, int64_t units, const float* x,
                           int64_t stride, Sums<vfloat, R, P>& sums) {
  static_assert(P == 1);
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes, x += C::kUnit) {
    vfloat parts[2][R] = {};
    prefetch_unit<C>(codes);
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
    ATOM_UNROLL for (int r = 0; r < R; ++r) sums.of[r][0] += parts[0][r] + parts[1][r];
  }
}

// out[(r * P + p) * kLanes] = panel `panel` + p of the weights times row `first` + r.
template <class C, Inputs kKind, int R, int P>
void multiply_rows(const QuantMatrix& w, int64_t panel, const QuantRows& rows, int64_t first,
                   float* out) {
  constexpr bool kInteger = kKind != Inputs::kNumbers;
  using Input = std::conditional_t<kInteger, int8_t, float>;
  using Sum = std::conditional_t<kInteger, vint, vfloat>;
  const Input* x = static_cast<const Input*>(rows.inputs) + first * rows.stride;
  const int64_t spans = w.inputs / rows.span, units = rows.span / C::kUnit;
  const int64_t panel_bytes = w.panel_bytes();
  const uint8_t* codes = w.codes + panel * panel_bytes;
  const Span* of_spans = rows.spans + first * spans;
  const Shifts shifts(w);
  vfloat totals[R][P] = {};
  const int64_t span_inputs = rows.span * (is_wide(kKind) && !kSplitsWide ? 2 : 1);
  for (int64_t span = 0; span < spans; ++span, codes += units * C::kBytes, x += span_inputs) {
    Sums<Sum, R, P> sums;
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      const Span& of = of_spans[r * spans + span];
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        if constexpr (kInteger) sums.of[r][p] = splat(of.first_code);
        else sums.of[r][p] = Sum{};
      }
    }
    if constexpr (is_wide(kKind)) {
      sum_wide_units<C, kKind, R, P>(codes, panel_bytes, units, x, w.inputs, rows.stride, sums);
    } else {
      sum_units<C, R, P>(codes, panel_bytes, units, x, rows.stride, sums);
    }
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      const Factors factors = load_factors(w, panel + p, span * rows.span);
      ATOM_UNROLL for (int r = 0; r < R; ++r) {
        const Span& of = of_spans[r * spans + span];
        vfloat products;
        if constexpr (kInteger) products = convert(sums.of[r][p]);
        else products = sums.of[r][p] + of.first;
        totals[r][p] = add_span<kKind>(totals[r][p], products, factors, of, shifts);
      }
    }
  }
  ATOM_UNROLL for (int r = 0; r < R; ++r) {
    ATOM_UNROLL for (int p = 0; p < P; ++p) store(out + (r * P + p) * kLanes, totals[r][p]);
  }
}

template <class C, Inputs kKind, int P>
void multiply_panels(const QuantMatrix& w, int64_t panel, const QuantRows& rows, int64_t count,
                     float* out) {
  int64_t r = 0;
  const auto take = [&](auto size) {
    constexpr int R = decltype(size)::value;
    for (; r + R <= count; r += R) {
      multiply_rows<C, kKind, R, P>(w, panel, rows, r, out + r * P * kLanes);
    }
  };
  if constexpr (P == 1 && kPanelsTogether == 2) take(std::integral_constant<int, 8>{});
  if constexpr (P == 2 && kOneSum<kKind, 6>) {
    if (count >= 12) take(std::integral_constant<int, 6>{});
  }
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 3>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

template <class C, Inputs kKind>
void multiply_panels(const QuantMatrix& w, int64_t panel, int64_t panels, const QuantRows& rows,
                     int64_t count, float* out) {
  if constexpr (kPanelsTogether == 2 && kKind != Inputs::kNumbers) {
    if (panels == 2) return multiply_panels<C, kKind, 2>(w, panel, rows, count, out);
  }
  multiply_panels<C, kKind, 1>(w, panel, rows, count, out);
}

}  // namespace

void multiply_panels(const QuantMatrix& w, int64_t panel, int64_t panels, const QuantRows& rows,
                     int64_t count, float* out) {
  const auto of_codes = [&](auto codes) {
    using C = decltype(codes);
    switch (rows.kind) {
      case Inputs::kNumbers:
        return multiply_panels<C, Inputs::kNumbers>(w, panel, panels, rows, count, out);
      case Inputs::kInt8:
        return multiply_panels<C, Inputs::kInt8>(w, panel, panels, rows, count, out);
      case Inputs::kInt16:
        return multiply_panels<C, Inputs::kInt16>(w, panel, panels, rows, count, out);
      case Inputs::kInt12:
        return multiply_panels<Codes<4>, Inputs::kInt12>(w, panel, panels, rows, count, out);
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
