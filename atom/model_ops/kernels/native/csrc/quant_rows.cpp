#include "quant_rows.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "quant_wide.h"

namespace atom {
namespace {

constexpr float kSmallestScale = 1e-12f;
constexpr int64_t kSpare = 16;  // vectors may reach beyond the end of a row

ATOM_INLINE bool any(vint mask) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

ATOM_INLINE vfloat magnitude(vfloat v) { return (vfloat)((vuint)v & 0x7fffffffu); }

// The numbers of a row in the product's order, zeros at the end.
template <class T>
void gather(const QuantInputs& how, const T* x, float* out) {
  int64_t i = 0;
  if (how.order != nullptr) {
    for (; i < how.in_features; ++i) out[i] = load_one(x + how.order[i]);
  } else {
    for (; i + kLanes <= how.in_features; i += kLanes) store(out + i, load(x + i));
    for (; i < how.in_features; ++i) out[i] = load_one(x + i);
  }
  std::fill(out + i, out + how.inputs + kSpare, 0.0f);
}

// The scales of a row's groups: amax / limit, at least 1e-12; NaN where a number is not finite, as all
// products with it.
void compute_scales(const QuantInputs& how, const float* x, int64_t groups, float* scales) {
  for (int64_t g = 0; g < groups; ++g) {
    vint largest = {};  // as integers, which have the order of magnitudes, and NaN above all
    const int64_t end = std::min((g + 1) * how.group, how.inputs);
    for (int64_t i = g * how.group; i < end; i += kLanes) {
      const vint bits = (vint)magnitude(load(x + i));
      largest = bits > largest ? bits : largest;
    }
    const int32_t bits = maximum(largest);
    scales[g] = raw<float>(&bits);
  }
  for (int64_t g = 0; g < groups; g += kLanes) {
    const vfloat amax = load(scales + g);
    const vint is_finite = amax <= std::numeric_limits<float>::max();
    const vfloat scale = max(amax / float(limit_of(how.kind)), splat(kSmallestScale));
    store(scales + g, select(is_finite, scale, splat(std::numeric_limits<float>::quiet_NaN())));
  }
}

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// x / scale, rounded to the nearest integer, ties to even. Divisions take long: products with
// the inverse do where they are not too near to a tie.
ATOM_INLINE vint quantise(vfloat x, vfloat scale, vfloat inverse) {
  constexpr float kLimit = 127;
  const vfloat magic = splat(kMagic);
  const auto rounded = [&](vfloat v) {
    return min(max(v, splat(-kLimit)), splat(kLimit)) + magic;
  };
  const vfloat product = x * inverse;
  vfloat shifted = rounded(product);
  if (any((vint)(magnitude(product - (shifted - magic)) > 0.4999f))) shifted = rounded(x / scale);
  return (vint)shifted - (vint)magic;
}

// The nearest integer to x times the inverse of a scale, which is that of these inputs.
ATOM_INLINE vint quantise_wide(vfloat x, vfloat inverse) {
  return (vint)(x * inverse + kMagic) - (vint)splat(kMagic);
}

// scales: room for those of all groups, and as many inverses.
template <Inputs kKind>
void quantise_row(const QuantInputs& how, const float* x, float* scales, int8_t* codes,
                  Span* spans) {
  const int64_t groups = how.groups();
  float* inverses = scales + groups + kSpare;
  if (how.fixed_scale != 0) {
    std::fill(scales, scales + groups, float(how.fixed_scale));
  } else {
    compute_scales(how, x, groups, scales);
  }
  constexpr bool kPaired = kKind == Inputs::kInt12;
  const int64_t tile = how.tile_rows * 64;
  const WideRow wide = how.tile_rows == 0 ? WideRow{codes, 6, 64, how.inputs}
                       : kPaired          ? WideRow{codes, 5, tile, 32}
                                          : WideRow{codes, 6, 2 * tile, tile};
  for (int64_t g = 0; g < groups; g += kLanes) store(inverses + g, 1 / load(scales + g));
  for (int64_t span = 0; span < how.spans(); ++span) {
    const int64_t begin = span * how.span, group = group_of(begin, how.group);
    const vfloat scale = splat(scales[group]), inverse = splat(inverses[group]);
    vint sums = {};
    for (int64_t i = begin; i < begin + how.span; i += kLanes) {
      vint code;
      if constexpr (is_wide(kKind)) {
        code = quantise_wide(load(x + i), inverse);
        store_wide<kKind>(wide, i, code);
      } else {
        code = quantise(load(x + i), scale, inverse);
        store_bytes(codes + i, code);
      }
      sums += code;
    }
    const int32_t code_sum = sum(sums);
    spans[span].scale = scales[group];
    spans[span].sum = scales_row(kKind) ? float(code_sum) : float(code_sum) * scales[group];
    spans[span].first_code = -int32_t(how.excess) * code_sum;
  }
}

void sum_spans(const QuantInputs& how, const float* x, Span* spans) {
  for (int64_t from = 0; from < how.inputs; from += how.span) {
    vfloat total = {};
    for (int64_t i = from; i < from + how.span; i += kLanes) total += load(x + i);
    Span& span = spans[from / how.span];
    span.scale = 1;
    span.sum = sum(total);
    span.first = float(-how.excess) * span.sum;
  }
}

}  // namespace

int64_t excess_of(const QuantMatrix& w, Inputs kind) {
  const int64_t taken = kind != Inputs::kNumbers ? kTaken<Codes<8>, true> : kTaken<Codes<8>, false>;
  return w.bits == 8 ? w.middle - taken : w.middle;
}

template <class T>
void pack_row(const QuantInputs& how, int64_t row, void* packed, Span* spans) {
  static thread_local Scratch scratch;
  const T* x = static_cast<const T*>(how.x) + row * how.x_stride;
  if (how.kind != Inputs::kNumbers || how.as_bfloat16()) {
    float* numbers = scratch.get<float>(how.inputs + kSpare + 2 * (how.groups() + kSpare));
    float* scales = numbers + how.inputs + kSpare;
    gather(how, x, numbers);
    auto* codes = static_cast<int8_t*>(packed);
    if (how.kind == Inputs::kInt8) {
      return quantise_row<Inputs::kInt8>(how, numbers, scales, codes, spans);
    }
    if (how.kind == Inputs::kInt16) {
      return quantise_row<Inputs::kInt16>(how, numbers, scales, codes, spans);
    }
    if (how.kind == Inputs::kInt12) {
      return quantise_row<Inputs::kInt12>(how, numbers, scales, codes, spans);
    }
    sum_spans(how, numbers, spans);
    bfloat16* out = static_cast<bfloat16*>(packed);
    for (int64_t i = 0; i < how.inputs; i += kLanes) store(out + i, load(numbers + i));
  } else {
    float* numbers = static_cast<float*>(packed);
    gather(how, x, numbers);
    sum_spans(how, numbers, spans);
  }
}

template void pack_row<float>(const QuantInputs&, int64_t, void*, Span*);
template void pack_row<bfloat16>(const QuantInputs&, int64_t, void*, Span*);
#if defined(__F16C__) || defined(__aarch64__)
template void pack_row<float16>(const QuantInputs&, int64_t, void*, Span*);
#endif

}  // namespace atom
