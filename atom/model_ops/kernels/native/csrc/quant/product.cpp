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

// Bytes from what the only pass over a panel reads to what it fetches. One row waits for memory the
// most where bytes are not multiplied with bytes: more rows are slower than memory there.
constexpr int64_t near_bytes(int rows) { return !kSplitsWide && rows == 1 ? 4096 : 2048; }
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
      codes += near_bytes(R) + (near_units-- > 0 ? 0 : (P - 1) * panel);
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        for (int64_t i = 0; i < C::kBytes; i += 64) __builtin_prefetch(codes + p * panel + i);
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

// The same with rows of 12 bits in pairs, which are `pair` apart.
template <int R, int P>
ATOM_INLINE void sum_paired_units(const uint8_t* codes, int64_t panel, int64_t units, const int8_t* x,
                                  int64_t pair, Fetching& fetching, Sums<vint, R, P>& sums) {
  using C = Codes<4>;
  for (int64_t unit = 0; unit < units; ++unit, codes += C::kBytes, x += 3 * C::kUnit) {
    fetching.template fetch<C, R, P>(codes, panel);
    ATOM_IN_MEMORY(sums);
    PairSums<R, P> of_unit;
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      vint quads[P];
      ATOM_UNROLL for (int p = 0; p < P; ++p) quads[p] = C::quad(codes + p * panel, j);
      of_unit.add(quads, x + 12 * j, pair, j == 0);
    }
    of_unit.add_to(sums.of);
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
// panels, for kTableRows rows or more.
template <class C, Inputs kKind, int R, int P>
void multiply_rows(const QuantMatrix& w, int64_t panel, const QuantRows& rows, int64_t first,
                   const FactorTable* table, Fetching fetching, float* out) {
  constexpr bool kInteger = kKind != Inputs::kNumbers;
  using Input = std::conditional_t<kInteger, int8_t, float>;
  using Sum = std::conditional_t<kInteger, vint, vfloat>;
  const Input* x = static_cast<const Input*>(rows.inputs) + first * rows.stride;
  const int64_t spans = w.inputs / rows.span, units = rows.span / C::kUnit;
  const int64_t panel_bytes = w.panel_bytes();
  const uint8_t* codes = w.codes + panel * panel_bytes;
  const Span* of_spans = rows.spans + first * spans;
  vfloat totals[R][P] = {};
  NearFactors<P> near(w, panel, rows.span, kFetchesPanels && first == 0);
  const int64_t span_inputs = rows.span * (is_paired(kKind) ? 3 : is_wide(kKind) && !kSplitsWide ? 2 : 1);
  for (int64_t span = 0; span < spans; ++span, codes += units * C::kBytes, x += span_inputs) {
    Sums<Sum, R, P> sums;
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        if constexpr (kInteger) sums.of[r][p] = splat(of_spans[r * spans + span].first_code);
        else sums.of[r][p] = Sum{};
      }
    }
    if constexpr (is_paired(kKind)) {
      ATOM_IN_MEMORY(totals);
      sum_paired_units<R, P>(codes, panel_bytes, units, x, 2 * rows.stride, fetching, sums);
    } else if constexpr (is_wide(kKind)) {
      sum_wide_units<C, kKind, R, P>(codes, panel_bytes, units, x, w.inputs, rows.stride, fetching,
                                     sums);
    } else {
      sum_units<C, R, P>(codes, panel_bytes, units, x, rows.stride, fetching, sums);
    }
    const Factors* of_panels = R < kTableRows ? near.of_span(span) : table->of_span(span, P);
    const auto add = [&](auto has_shift) {
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        const Factors factors = of_panels[p];
        ATOM_UNROLL for (int r = 0; r < R; ++r) {
          const Span& inputs = of_spans[r * spans + span];
          vfloat products;
          if constexpr (kInteger) products = convert(sums.of[r][p]);
          else products = sums.of[r][p] + inputs.first;
          totals[r][p] = add_span<kKind>(totals[r][p], products, factors, inputs, has_shift);
        }
      }
    };
    if (w.has_shift()) add(std::true_type{});
    else add(std::false_type{});
  }
  ATOM_UNROLL for (int r = 0; r < R; ++r) {
    const vfloat scale = splat(scales_row(kKind) ? of_spans[r * spans].scale : 1.0f);
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
      Fetching fetching{!kFetchesPanels || R == count, units - near_bytes(R) / C::kBytes,
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
      multiply_rows<C, kKind, R, P>(w, panel, rows, r, table, fetching, out + r * P * kLanes);
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
