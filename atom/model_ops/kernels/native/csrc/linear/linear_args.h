// The arguments of linear layers and logits.
#pragma once

#include <cstdint>

namespace atom {

struct LinearArgs {
  const void* x;       // [rows, in_features], rows `x_stride` elements apart
  const void* weight;  // [out_features, in_features]
  const void* bias;    // [out_features] or null
  void* out;           // [rows, out_features], rows `out_stride` elements apart
  int64_t rows, in_features, out_features, x_stride, out_stride, threads;
};

}  // namespace atom
