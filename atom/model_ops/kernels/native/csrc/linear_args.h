// What the matrix products are called with.
#pragma once

#include <cstdint>

namespace atom {

struct LinearArgs {
  const void* x;       // [rows, in_features], rows `x_stride` elements apart
  const void* weight;  // [out_features, in_features]
  const void* bias;    // [out_features] or null
  void* out;           // [rows, out_features]
  int64_t rows, in_features, out_features, x_stride, threads;
};

// Whether `logits_by_tiles` can compute this product and is the faster way.
bool prefers_tiles(const LinearArgs& args);

// out = x . weight^T, bfloat16 to float32, on the processor's matrix tiles; there is no bias.
void logits_by_tiles(const LinearArgs& args);

}  // namespace atom
