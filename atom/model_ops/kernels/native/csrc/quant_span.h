// What products of codes and inputs become at the end of a span; the same for all kernels.
#pragma once

#include "quant_codes.h"
#include "quant_matrix.h"

namespace atom {

ATOM_INLINE vfloat load_numbers(const void* from, int64_t at, Number type) {
  switch (type) {
    case Number::kBfloat16: return load(static_cast<const bfloat16*>(from) + at);
#if defined(__F16C__) || defined(__aarch64__)
    case Number::kFloat16: return load(static_cast<const float16*>(from) + at);
#endif
    case Number::kInt8: return convert(load_bytes(static_cast<const int8_t*>(from) + at));
    default: return load(static_cast<const float*>(from) + at);
  }
}

// The numbers of one group of weights.
struct Factors {
  vfloat scale, shift;
};

// Which group of `size` inputs an input is in. Dividing 64 bits takes twice as long.
inline int64_t group_of(int64_t input, int64_t size) { return uint32_t(input) / uint32_t(size); }

ATOM_INLINE Factors load_factors(const QuantMatrix& w, int64_t panel, int64_t input) {
  const int64_t at = (panel * w.groups + group_of(input, w.group)) * kLanes;
  Factors f{load_numbers(w.scale, at, w.scale_type), vfloat{}};
  if (w.shift != nullptr) f.shift = load_numbers(w.shift, at, w.shift_type);
  if (w.super_scale != nullptr) {
    const int64_t above = (panel * w.super_groups + group_of(input, w.super_group)) * kLanes;
    f.scale *= load_numbers(w.super_scale, above, Number::kFloat16);
    if (w.has_offsets) f.shift *= load_numbers(w.super_offset, above, Number::kFloat16);
  }
  return f;
}

// Which shifts there are.
struct Shifts {
  explicit Shifts(const QuantMatrix& w)
      : are_zeros(w.shift != nullptr && !w.has_offsets), are_offsets(w.has_offsets != 0) {}
  bool are_zeros, are_offsets;
};

// total + what one span adds, where `products` are sums of codes times inputs.
template <Inputs kKind>
ATOM_INLINE vfloat add_span(vfloat total, vfloat products, const Factors& f, const Span& x,
                            Shifts shifts) {
  constexpr bool kInteger = kKind != Inputs::kNumbers;
  if (shifts.are_zeros) products = fma(-f.shift, splat(x.sum), products);
  total = fma(products, kInteger ? f.scale * x.scale : f.scale, total);
  if (shifts.are_offsets) total = fma(f.shift, splat(kInteger ? x.sum * x.scale : x.sum), total);
  return total;
}

}  // namespace atom
