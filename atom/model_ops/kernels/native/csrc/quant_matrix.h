// Quantised weights and inputs as products read them, and these products.
//
// Every output has one sum. Over a span of inputs that share their scales the products of codes are
// added up first: exactly where inputs are integers, else in the order of the processors' tiles
// of bfloat16. Spans follow each other in order. So a row has the same results in every batch.
#pragma once

#include "simd.h"

namespace atom {

enum class Number : int64_t { kFloat32, kBfloat16, kFloat16, kInt8 };

// W = (q - middle - zero) * scale + offset, where a zero or an offset may be missing. Per panel:
// units of codes; of each group of inputs kLanes scales and shifts (zeros or offsets).
struct QuantMatrix {
  const uint8_t* codes;         // [panels, inputs / kUnit, C::kBytes]
  const void* scale;            // [panels, groups, kLanes]
  const void* shift;            // alike, or null
  const float16* super_scale;   // [panels, super groups, kLanes], or null: factors of scales
  const float16* super_offset;  // of offsets
  int64_t bits, inputs, outs, middle;
  int64_t group, groups, super_group, super_groups;
  Number scale_type, shift_type;
  int64_t has_offsets;  // whether shifts are offsets

  int64_t panels() const { return (outs + kLanes - 1) / kLanes; }
  int64_t panel_bytes() const { return bits * inputs * kLanes / 8; }
};

// Of a row's span of inputs: what its products are multiplied with, the sum of its codes (or
// numbers), and what to begin with: that sum times what codes are too large by.
struct Span {
  float scale, sum;
  union {
    int32_t first_code;
    float first;
  };
};

// Inputs as products want them: int8 codes of -127..127, or numbers.
struct QuantRows {
  const void* inputs;  // int8 or float [rows, stride]; tiles read bfloat16 instead of float
  const Span* spans;   // [rows, inputs / span]
  int64_t stride;      // in elements
  int64_t span;        // inputs that share their scales on both sides
  bool is_integer;
};

// out [count, kLanes] = panel `panel` of the weights times `count` rows from `first` on.
void multiply_panel(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t first,
                    int64_t count, float* out);

}  // namespace atom
