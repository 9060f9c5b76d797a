// How Python describes packed weights: `PackedWeights` in quant_pack.py.
#pragma once

#include <algorithm>
#include <type_traits>

#include "quant/rows.h"
#include "quant/tiles.h"

namespace atom {

// The tensors, in the order of `PackedWeights.addresses`.
struct PackedTensors {
  const uint8_t* codes;
  const uint8_t* scale;
  const uint8_t* shift;
  const float16* super_scale;
  const float16* super_offset;
  const int32_t* order;
};

// `PackedWeights.sizes`.
struct PackedSizes {
  int64_t in_features, inputs, outs, bits, middle, group, super_group;
  Number scale_type, shift_type;
  int64_t has_offsets, span;
  Inputs input_kind;
  int64_t input_group;

  int64_t groups_of(int64_t size) const { return size == 0 ? 0 : (in_features + size - 1) / size; }
};

// Matrix `index` of those that lie behind each other.
inline QuantMatrix matrix_of(const PackedTensors& t, const PackedSizes& s, int64_t index) {
  QuantMatrix w{t.codes,  nullptr, nullptr,  t.super_scale,          t.super_offset,
                s.bits,   s.inputs, s.outs,  s.middle,               s.group,
                s.groups_of(s.group), s.super_group, s.groups_of(s.super_group),
                s.scale_type, s.shift_type, s.has_offsets};
  const int64_t lanes = index * w.panels() * kLanes;
  w.codes += index * w.panels() * w.panel_bytes();
  w.scale = t.scale + lanes * w.groups * bytes_of(s.scale_type);
  if (t.shift != nullptr) w.shift = t.shift + lanes * w.groups * bytes_of(s.shift_type);
  if (w.super_scale != nullptr) w.super_scale += lanes * w.super_groups;
  if (w.super_offset != nullptr) w.super_offset += lanes * w.super_groups;
  return w;
}

// How rows of x become those of a product with w.
inline QuantInputs inputs_of(const void* x, int64_t x_stride, const PackedTensors& t,
                             const PackedSizes& s, double fixed_scale, const QuantMatrix& w,
                             int64_t tile_rows) {
  return {x,           t.order,     x_stride,    s.in_features,               s.inputs, s.span, s.input_kind,
          s.input_group, fixed_scale, excess_of(w, s.input_kind), tile_rows};
}

// Whether so many rows of T are faster with tiles: their sums leave once a span, and codes of 4 bits become
// tiles first. Vectors read the weights of fewer rows as quickly as memory has them.
template <class T>
bool takes_tiles(const PackedSizes& s, int64_t rows) {
  const bool wide = is_wide(s.input_kind);
  if (s.input_kind == Inputs::kNumbers && !std::is_same_v<T, bfloat16>) return false;
  int64_t least = s.input_kind == Inputs::kInt12 ? 10 : wide ? 5 : 12;
  if (s.span <= 64) least = s.input_kind == Inputs::kInt12 ? 16 : 28;
  if (wide && s.span <= line_inputs(s.input_kind) && rows <= kTileSide) {
    least = s.input_kind == Inputs::kInt12 ? 6 : 5;
  }
  return rows >= least && has_tiles();
}

}  // namespace atom
