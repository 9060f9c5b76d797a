// Products of many rows of 12-bit inputs with 4-bit codes, by vectors.
//
// Rows lie in groups, in the order in which the product of a group reads them. The sums are those of
// quant/product.cpp: exact within a span, then span by span.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "quant/rows.h"
#include "quant/span.h"
#include "quant/wide.h"

namespace atom {

// Rows of a group: with two panels of weights they fill 32 registers.
constexpr int64_t kGroupRows = 6;

// Whether so many rows are worth it.
inline bool takes_groups(Inputs kind, int64_t rows) {
  return kUnsignedProduct && kManyRegisters && kind == Inputs::kInt12 && rows >= 2 * kGroupRows;
}

// A line of numbers of 4 bytes, two for each row of a group.
constexpr int64_t kGroupLine = 2 * kGroupRows * 4;

// A group: a line of the rows' scales, then for each span
//   a line of what sums of codes begin with and of sums of inputs, and
//   a line for each quad of inputs: each row's high bytes, then its low ones.
inline int64_t group_bytes(const QuantInputs& how) {
  return kGroupLine * (1 + how.spans() + how.inputs / 4);
}

// Packs rows `first` to `first` + `count` as a group; what else has room in it is 0.
template <class T>
void pack_group(const QuantInputs& how, int64_t first, int64_t count, uint8_t* group);

// The product of groups with one panel of the weights, or two.
class GroupProduct {
 public:
  GroupProduct(const QuantMatrix& w, int64_t panel, int64_t span)
      : w_(w), codes_(w.codes + panel * w.panel_bytes()), span_(span),
        panels_(std::min<int64_t>(2, w.panels() - panel)), factors_(w, panel, panels_, span) {}

  int64_t panels() const { return panels_; }

  // Fetches share `index` of `count` of the codes behind these.
  void fetch_next(int64_t index, int64_t count) const {
    const int64_t bytes = panels_ * w_.panel_bytes();
    fetch_share(codes_ + bytes, bytes, index, index + 1, count);
  }

  // out[(r * panels + p) * kLanes] = panel p times row r.
  void multiply(const uint8_t* group, float* out) const {
    if (panels_ == 2) {
      w_.has_shift() ? multiply<2, true>(group, out) : multiply<2, false>(group, out);
    } else {
      w_.has_shift() ? multiply<1, true>(group, out) : multiply<1, false>(group, out);
    }
  }

 private:
  using C = Codes<4>;
  static constexpr int R = kGroupRows;

  template <int P, bool kShift>
  void multiply(const uint8_t* group, float* out) const {
    const uint8_t *codes = codes_, *x = group + kGroupLine;
    vfloat totals[R][P] = {};
    for (int64_t span = 0; span < w_.inputs / span_; ++span) {
      const uint8_t* const of_span = x;
      vint sums[R][P];
      ATOM_UNROLL for (int r = 0; r < R; ++r) {
        ATOM_UNROLL for (int p = 0; p < P; ++p) sums[r][p] = splat(raw<int32_t>(x + 4 * r));
      }
      x += kGroupLine;
      for (int64_t i = 0; i < span_; i += C::kUnit) {
        sum_unit<P>(codes, x, sums);
        codes += C::kBytes;
        x += C::kQuads * kGroupLine;
      }
      const Factors* factors = factors_.of_span(span, P);
      ATOM_UNROLL for (int r = 0; r < R; ++r) {
        const Span inputs{0, raw<float>(of_span + 4 * (R + r)), {}};
        ATOM_UNROLL for (int p = 0; p < P; ++p) {
          totals[r][p] = add_span<Inputs::kInt12>(totals[r][p], convert(sums[r][p]), factors[p],
                                                  inputs, kShift);
        }
      }
    }
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      const vfloat scale = splat(raw<float>(group + 4 * r));
      ATOM_UNROLL for (int p = 0; p < P; ++p) store(out + (r * P + p) * kLanes, totals[r][p] * scale);
    }
  }

  template <int P>
  ATOM_INLINE void sum_unit(const uint8_t* codes, const uint8_t* x, vint (&sums)[R][P]) const {
    const vuint low_half = (vuint)splat(int32_t(0x0f0f0f0f));
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j, x += kGroupLine) {
      vuint quads[P], high_quads[P];
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        const vuint both = raw<vuint>(codes + p * w_.panel_bytes() + j / 2 * kQuadBytes);
        if (j % 2 == 0) {
          quads[p] = both & low_half;
          high_quads[p] = quads[p] << 4;
        } else {
          high_quads[p] = both & ~low_half;
          quads[p] = high_quads[p] >> 4;
        }
      }
      ATOM_UNROLL for (int r = 0; r < R; ++r) {
        const vint high = splat(raw<int32_t>(x + 8 * r)), low = splat(raw<int32_t>(x + 8 * r + 4));
        ATOM_UNROLL for (int p = 0; p < P; ++p) {
          sums[r][p] = dot4<C>(sums[r][p], (vint)high_quads[p], high);
        }
        ATOM_UNROLL for (int p = 0; p < P; ++p) {
          sums[r][p] = dot4<C>(sums[r][p], (vint)quads[p], low);
        }
      }
    }
  }

  const QuantMatrix& w_;
  const uint8_t* codes_;
  int64_t span_, panels_;
  FactorTable factors_;
};

}  // namespace atom
