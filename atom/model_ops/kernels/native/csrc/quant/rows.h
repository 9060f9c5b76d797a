// Packs rows of inputs for products with quantised weights.
#pragma once

#include "quant/matrix.h"

namespace atom {

// How inputs become the rows of a product.
struct QuantInputs {
  const void* x;         // [rows, in_features], rows `x_stride` elements apart
  const int32_t* order;  // input i of the product is element order[i] of a row; or null
  int64_t x_stride, in_features;
  int64_t inputs;      // of the product: in_features, filled up with zeros
  int64_t span;
  Inputs kind;
  int64_t group;       // inputs that share a scale
  double fixed_scale;  // of all inputs, or 0 to compute scales
  int64_t excess;      // of every code of the weights: see `excess_of`
  int64_t tile_rows;   // as in QuantRows

  bool is_wide() const { return atom::is_wide(kind); }
  bool is_split() const { return atom::is_split(kind, tile_rows); }
  // Where products want numbers in bfloat16.
  bool as_bfloat16() const { return kind == Inputs::kNumbers && tile_rows != 0; }
  // Rows that are read side by side are in different lines of caches.
  int64_t stride() const {
    if (!is_wide()) return inputs + 64;
    if (tile_rows == 0) return is_paired(kind) ? (3 * inputs + 64) / 2 : 2 * inputs + 64;
    if (is_split()) return 4 * inputs;
    const int64_t line = line_inputs(kind);
    return (inputs + line - 1) / line * (128 * line / 64);
  }
  int64_t spans() const { return inputs / span; }
  int64_t groups() const { return (inputs + group - 1) / group; }
  int64_t row_bytes() const { return stride() * (kind != Inputs::kNumbers ? 1 : as_bfloat16() ? 2 : 4); }
  // Where row `row` begins, or the pair that it is in. Tiles of wide inputs lie one behind the other.
  uint8_t* place(uint8_t* packed, int64_t row) const {
    if (tile_rows == 0 && is_paired(kind)) return packed + row / 2 * 2 * row_bytes();
    if (!is_wide() || tile_rows == 0) return packed + row * row_bytes();
    return packed + row / tile_rows * tile_rows * row_bytes() + row % tile_rows * 64;
  }
  bool has_sums() const { return is_wide() && tile_rows != 0; }
  QuantRows rows(const void* packed, const Span* of_spans, const float* sums = nullptr) const {
    return {packed, of_spans, sums, stride(), span, kind, tile_rows};
  }
};

// What products of few rows do not subtract from the codes of the weights but from sums.
int64_t excess_of(const QuantMatrix& w, Inputs kind);

// Packs row `from` of x as row `row` of `packed`, [rows, inputs], and of `spans`, [rows, spans]. The first of
// a pair is packed before the second. sums: those of QuantRows, or null.
template <class T>
void pack_row(const QuantInputs& how, int64_t from, int64_t row, uint8_t* packed, Span* spans,
              float* sums = nullptr);

}  // namespace atom
