// Linear layers and logits of bfloat16 rows with quantised weights that become bfloat16: the products
// of linear.cpp, with the same bits.
#include "quant/numbers.h"

#include "linear/linear_kernel.h"
#include "quant/unpack.h"

#if defined(ATOM_AMX) && defined(__AVX512BF16__)

namespace atom {
namespace {

// x [rows, in_features] with its columns in another order.
const bfloat16* ordered(const LinearArgs& a, const int32_t* order) {
  static thread_local Scratch scratch;
  auto* const out = scratch.get<bfloat16>(a.rows * a.in_features);
  const auto* x = static_cast<const bfloat16*>(a.x);
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t i = 0; i < a.in_features; ++i) {
      out[row * a.in_features + i] = x[row * a.x_stride + order[i]];
    }
  }
  return out;
}

}  // namespace

void multiply_bfloat16(LinearArgs a, const QuantMatrix& w, const int32_t* order, bool as_float32) {
  if (order != nullptr) {
    a.x = ordered(a, order);
    a.x_stride = a.in_features;
  }
  const UnpackedRows weights{w, a.in_features};
  if (as_float32) linear_blocks<bfloat16, float, TileProduct>(a, weights);
  else linear_blocks<bfloat16, bfloat16, TileProduct>(a, weights);
}

}  // namespace atom

#else

#include <cstdlib>

namespace atom {

void multiply_bfloat16(LinearArgs, const QuantMatrix&, const int32_t*, bool) { std::abort(); }

}  // namespace atom

#endif
