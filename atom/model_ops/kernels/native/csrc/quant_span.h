// What products of codes and inputs become at the end of a span; the same for all kernels.
#pragma once

#include "quant_codes.h"
#include "quant_matrix.h"

namespace atom {

ATOM_INLINE vfloat load_numbers(const void* from, int64_t at, Number type) {
  typedef int8_t bytes __attribute__((vector_size(kLanes)));
  switch (type) {
    case Number::kBfloat16: return load(static_cast<const bfloat16*>(from) + at);
#if defined(__F16C__) || defined(__aarch64__)
    case Number::kFloat16: return load(static_cast<const float16*>(from) + at);
#endif
    case Number::kInt8:
      return __builtin_convertvector(raw<bytes>(static_cast<const int8_t*>(from) + at), vfloat);
    default: return load(static_cast<const float*>(from) + at);
  }
}

// The numbers of one group of weights.
struct Factors {
  vfloat scale, shift;
};

ATOM_INLINE Factors load_factors(const QuantMatrix& w, int64_t panel, int64_t input) {
  const int64_t at = (panel * w.groups + input / w.group) * kLanes;
  Factors f{load_numbers(w.scale, at, w.scale_type), vfloat{}};
  if (w.shift != nullptr) f.shift = load_numbers(w.shift, at, w.shift_type);
  if (w.super_scale != nullptr) {
    const int64_t above = (panel * w.super_groups + input / w.super_group) * kLanes;
    f.scale *= load_numbers(w.super_scale, above, Number::kFloat16);
    if (w.has_offsets) f.shift *= load_numbers(w.super_offset, above, Number::kFloat16);
  }
  return f;
}

// total + one span's part of it, where products are sums of codes times inputs. `taken` was
// subtracted from the codes already.
template <bool kInteger, class Products>
ATOM_INLINE vfloat add_span(vfloat total, Products products, const QuantMatrix& w, const Factors& f,
                            const Span& x, int32_t taken) {
  const int32_t middle = int32_t(w.middle) - taken;
  vfloat part, scale = f.scale;
  float sum;
  if constexpr (kInteger) {
    part = convert(products - splat(middle * x.code_sum));
    scale *= x.scale;
    sum = float(x.code_sum);
  } else {
    part = fma(splat(float(-middle)), splat(x.sum), products);
    sum = x.sum;
  }
  if (w.shift != nullptr && !w.has_offsets) part = fma(-f.shift, splat(sum), part);
  total = fma(part, scale, total);
  if (w.has_offsets) total = fma(f.shift, splat(kInteger ? sum * x.scale : sum), total);
  return total;
}

}  // namespace atom
