// Packs rows of inputs for products with quantised weights.
#pragma once

#include "quant_matrix.h"

namespace atom {

// How inputs become the rows of a product.
struct QuantInputs {
  const void* x;         // [rows, in_features], rows `x_stride` elements apart
  const int32_t* order;  // input i of the product is element order[i] of a row; or null
  int64_t x_stride, in_features;
  int64_t inputs;      // of the product: in_features, filled up with zeros
  int64_t span;
  int64_t group;       // inputs that share a scale if they become integers; 0 if not
  double fixed_scale;  // of all inputs, or 0 to compute scales
  int64_t excess;      // of every code of the weights: see `excess_of`
  bool as_bfloat16;    // as tiles want bfloat16 that does not become integers

  int64_t stride() const { return inputs + 64; }  // rows are in different lines of caches
  int64_t spans() const { return inputs / span; }
  int64_t groups() const { return group == 0 ? 0 : (inputs + group - 1) / group; }
  int64_t row_bytes() const { return stride() * (group != 0 ? 1 : as_bfloat16 ? 2 : 4); }
  QuantRows rows(const void* packed, const Span* of_spans) const {
    return {packed, of_spans, stride(), span, group != 0};
  }
};

// What products of few rows do not subtract from the codes of the weights but from sums.
int64_t excess_of(const QuantMatrix& w, bool is_integer);

// Packs row `row` of x to `packed`, [inputs], and its spans.
template <class T>
void pack_row(const QuantInputs& how, int64_t row, void* packed, Span* spans);

}  // namespace atom
