// Products of few rows, with vectors.
#include <algorithm>
#include <cstdlib>

#include "ahead.h"
#include "parallel.h"
#include "quant/decoded.h"
#include "quant/span.h"
#include "quant/wide.h"

namespace atom {
namespace {

// How far the only pass over a panel fetches ahead. One row waits for memory the most. Its codes come to the
// second cache first and from there to the first one where that gained more from memory (2 to 6 %) than twice
// as many fetches cost from a cache: 4 and 6 bits where bytes are multiplied with bytes, and 8 bits elsewhere.
template <class C, int R>
struct Near {
  static constexpr bool kTwice = R == 1 && kSplitsWide != C::kFillsByte;
  static constexpr int64_t kBytes = R == 1 && (kTwice || !kSplitsWide) ? 4096 : 2048, kSoon = 1536;
};
// Whether several passes share the next panels: with few registers products are slower than memory.
constexpr bool kFetchesPanels = kManyRegisters;

// So many rows at a time are worth a table of factors; fewer convert factors as they need them.
constexpr int kTableRows = 6;

// Sums of P panels of weights with R rows.
template <class Sum, int R, int P>
struct Sums {
  Sum of[R][P];
};

// Whether all products have one sum, those of high bytes being with 16 times a code. Few rows would
// wait for it.
template <Inputs kKind, int R>
constexpr bool kOneSum = kKind == Inputs::kInt12 && kUnsignedProduct && R >= 4;

// What a pass over P panels fetches with its units: codes near behind those that it reads, at the end
// of the panels those of the next; or, of several passes, a share of the next panels.
struct Fetching {
  bool is_near;
  int64_t near_units;  // until the next panels
  Ahead share;

  template <class C, int R, int P>
  ATOM_INLINE void fetch(const uint8_t* codes, int64_t panel) {
    if (is_near) {
      codes += near_units-- > 0 ? 0 : (P - 1) * panel;
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        const uint8_t* at = codes + p * panel;
        ATOM_UNROLL for (int64_t i = 0; i < C::kBytes; i += 64) {
          __builtin_prefetch(at + Near<C, R>::kBytes + i, 0, Near<C, R>::kTwice ? 2 : 3);
          if (Near<C, R>::kTwice) __builtin_prefetch(at + Near<C, R>::kSoon + i);
        }
      }
    } else if (kFetchesPanels && R < kTableRows) {
      share.fetch();
    }
  }
};

// sums += the products of so many units of codes, those of a panel `panel` bytes behind the one
// before, with rows that are `stride` apart.
template <class C, int R, int P>
ATOM_INLINE void sum_units(const uint8_t* codes, int64_t panel, int64_t units, const int8_t* x,
                           int64_t stride, Fetching& fetching, Sums<vint, R, P>& sums) {
  constexpr bool kTwoChains = R * P <= 2;
  Sums<vint, R, P> others{};
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes, x += C::kUnit) {
    fetching.template fetch<C, R, P>(codes, panel);
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
                                Fetching& fetching, Sums<vint, R, P>& sums) {
  constexpr bool kTwoChains = R * P <= 2;
  Sums<vint, R, P> others{};
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes) {
    fetching.template fetch<C, R, P>(codes, panel);
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
        ATOM_UNROLL for (int p = 0; p < P; ++p) parts[p] = halves(quads[p]);
        const int8_t* at = x + 2 * (unit * C::kUnit + 4 * j);
        ATOM_UNROLL for (int r = 0; r < R; ++r) {
          const vint even = splat(raw<int32_t>(at + r * stride));
          const vint odd = splat(raw<int32_t>(at + r * stride + 4));
          ATOM_UNROLL for (int p = 0; p < P; ++p) {
            sums.of[r][p] = dot2(sums.of[r][p], parts[p].even, even);
            vint& sum = kTwoChains ? others.of[r][p] : sums.of[r][p];
            sum = dot2(sum, parts[p].odd, odd);
          }
        }
      }
    }
  }
  if (kSplitsWide ? kOneSum<kKind, R> : !kTwoChains) return;
  ATOM_UNROLL for (int r = 0; r < R; ++r) {
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      const vint other = kSplitsWide ? others.of[r][p] << low_bits(kKind) : others.of[r][p];
      sums.of[r][p] = (vint)((vuint)sums.of[r][p] + (vuint)other);
    }
  }
}

// Whether sums over a unit leave no registers for those of spans.
template <int R, int P>
constexpr bool kFillsRegisters = R * P > 2;

// The same with rows of 12 bits in pairs, which are `pair` apart.
template <int R, int P>
ATOM_INLINE void sum_paired_units(const uint8_t* codes, int64_t panel, int64_t units, const int8_t* x,
                                  int64_t pair, const PairFactors& factors, Fetching& fetching,
                                  Sums<vint, R, P>& sums) {
  using C = Codes<4>;
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes, x += 3 * C::kUnit) {
    fetching.template fetch<C, R, P>(codes, panel);
    if constexpr (kFillsRegisters<R, P>) ATOM_IN_MEMORY(sums);
    PairSums<R, P> of_unit;
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      vint quads[P];
      ATOM_UNROLL for (int p = 0; p < P; ++p) quads[p] = C::quad(codes + p * panel, j);
      of_unit.add(quads, x + 12 * j, pair, j == 0);
    }
    of_unit.add_to(sums.of, factors);
  }
}

// As tiles of bfloat16 sum: of each unit the even inputs and the odd ones, then both.
template <class C, int R, int P>
ATOM_INLINE void sum_units(const uint8_t* codes, int64_t panel, int64_t units, const float* x,
                           int64_t stride, Fetching& fetching, Sums<vfloat, R, P>& sums) {
  static_assert(P == 1);
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes, x += C::kUnit) {
    vfloat parts[2][R] = {};
    fetching.template fetch<C, R, P>(codes, panel);
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

// out[(r * P + p) * kLanes] = panel `panel` + p of the weights times row `first` + r. `table`: of these
// panels, for kTableRows rows or more. kOneUnit: a span is one unit, as in
// most formats of GGUF files. HasShift: bool, or a constant.
template <class C, Inputs kKind, int R, int P, bool kOneUnit, class HasShift>
void multiply_rows(const QuantMatrix& w, int64_t panel, const QuantRows& rows, int64_t first,
                   const FactorTable* table, Fetching fetching, HasShift has_shift, float* out) {
  constexpr bool kInteger = kKind != Inputs::kNumbers;
  using Input = std::conditional_t<kInteger, int8_t, float>;
  using Sum = std::conditional_t<kInteger, vint, vfloat>;
  const Input* x = static_cast<const Input*>(rows.inputs) + first * rows.stride;
  const int64_t units = kOneUnit ? 1 : rows.span / C::kUnit;
  const int64_t span_inputs = units * C::kUnit * (is_paired(kKind) ? 3 : is_wide(kKind) && !kSplitsWide ? 2 : 1);
  const int64_t spans = w.inputs / rows.span, inputs = w.inputs, stride = rows.stride;
  const int64_t panel_bytes = w.panel_bytes();
  const uint8_t* codes = w.codes + panel * panel_bytes;
  const Span* of_span = rows.spans + first * spans;
  vfloat totals[R][P] = {};
  const PairFactors pair_factors;
  NearFactors<P> near(w, panel, rows.span, kFetchesPanels && first == 0);
  for (int64_t span = 0; span < spans; ++span, ++of_span, codes += units * C::kBytes, x += span_inputs) {
    // Before the products: compilers move them behind a branch that follows.
    const Factors* of_panels = R < kTableRows ? near.of_span(span) : table->of_span(span, P);
    Sums<Sum, R, P> sums;
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        if constexpr (kInteger) sums.of[r][p] = splat(of_span[r * spans].first_code);
        else sums.of[r][p] = Sum{};
      }
    }
    if constexpr (is_paired(kKind)) {
      if constexpr (kFillsRegisters<R, P>) ATOM_IN_MEMORY(totals);
      sum_paired_units<R, P>(codes, panel_bytes, units, x, 2 * stride, pair_factors, fetching, sums);
    } else if constexpr (is_wide(kKind)) {
      sum_wide_units<C, kKind, R, P>(codes, panel_bytes, units, x, inputs, stride, fetching, sums);
    } else {
      sum_units<C, R, P>(codes, panel_bytes, units, x, stride, fetching, sums);
    }
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      const Factors factors = of_panels[p];
      ATOM_UNROLL for (int r = 0; r < R; ++r) {
        const Span& of_row = of_span[r * spans];
        vfloat products;
        if constexpr (kInteger) products = convert(sums.of[r][p]);
        else products = sums.of[r][p] + of_row.first;
        totals[r][p] = add_span<kKind>(totals[r][p], products, factors, of_row, has_shift);
      }
    }
  }
  ATOM_UNROLL for (int r = 0; r < R; ++r) {
    const vfloat scale = splat(scales_row(kKind) ? rows.spans[(first + r) * spans].scale : 1.0f);
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      store(out + (r * P + p) * kLanes, totals[r][p] * scale);
    }
  }
}

template <class C, Inputs kKind, int P>
void multiply_panels(const QuantMatrix& w, int64_t panel, const QuantRows& rows, int64_t count,
                     float* out) {
  if constexpr (is_wide(kKind) && !kSplitsWide) {
    if (takes_decoded(kKind, count)) return DecodedProduct<C, kKind, P>(w, panel, rows).multiply(count, out);
  }
  const int64_t bytes = P * w.panel_bytes(), units = w.inputs / C::kUnit;
  const uint8_t* next = w.codes + panel * w.panel_bytes() + bytes;
  int64_t r = 0, fetched = 0;
  const auto take = [&](auto size, const FactorTable* table = nullptr) {
    constexpr int R = decltype(size)::value;
    for (; r + R <= count; r += R) {
      Fetching fetching{!kFetchesPanels || R == count, units - Near<C, R>::kBytes / C::kBytes,
                        {next + fetched, 0}};
      if (table != nullptr) {
        // All at once: so many rows leave no registers for more.
        fetching.share.step = std::min(share_of(bytes, R, count), bytes - fetched);
        fetching.share.fetch();
        fetched += share_of(bytes, R, count);
      } else if (fetched < bytes) {
        fetching.share.step = share_of(P * C::kBytes, R, count);
        fetched += fetching.share.step * units;
      }
      const auto multiply = [&](auto one_unit, auto has_shift) {
        multiply_rows<C, kKind, R, P, one_unit>(w, panel, rows, r, table, fetching, has_shift,
                                                out + r * P * kLanes);
      };
      constexpr std::bool_constant<kKind != Inputs::kNumbers && R < kTableRows> kTellsUnits;
      if (!kTellsUnits || rows.span != C::kUnit) multiply(std::false_type{}, w.has_shift());
      else if (w.has_shift()) multiply(kTellsUnits, std::true_type{});
      else multiply(kTellsUnits, std::false_type{});
    }
  };
  constexpr int kMost = !kManyRegisters ? 4 : P == 1 ? 8 : kOneSum<kKind, 6> ? 6 : 4;
  if constexpr (kMost >= kTableRows) {
    if (count >= 2 * kTableRows) {
      const FactorTable table(w, panel, P, rows.span);
      take(std::integral_constant<int, kMost>{}, &table);
    }
  }
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 3>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

template <class C, Inputs kKind>
void multiply_panels(const QuantMatrix& w, int64_t panel, int64_t panels, const QuantRows& rows,
                     int64_t count, float* out) {
  if constexpr (kKind != Inputs::kNumbers) {
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
      case Inputs::kBfloat16: std::abort();  // quant/numbers.cpp has those
    }
  };
  switch (w.bits) {
    case 4: return of_codes(Codes<4>{});
    case 6: return of_codes(Codes<6>{});
    default: return of_codes(Codes<8>{});
  }
}

}  // namespace atom
