#include "quant/rows.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "parallel.h"
#include "quant/groups.h"
#include "quant/wide.h"

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

// amax / limit, at least 1e-12; NaN where a number is not finite, as all products with it.
ATOM_INLINE vfloat scale_of(Inputs kind, vfloat amax) {
  const vint is_finite = amax <= std::numeric_limits<float>::max();
  const vfloat scale = max(amax / float(limit_of(kind)), splat(kSmallestScale));
  return select(is_finite, scale, splat(std::numeric_limits<float>::quiet_NaN()));
}

// The scales of a row's groups.
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
    store(scales + g, scale_of(how.kind, load(scales + g)));
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
void quantise_row(const QuantInputs& how, const float* x, float* scales, int64_t row, int8_t* codes,
                  Span* spans, float* span_sums) {
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
    const int64_t begin = span * how.span;
    const int64_t group = scales_row(kKind) ? 0 : group_of(begin, how.group);
    const vfloat scale = splat(scales[group]), inverse = splat(inverses[group]);
    vint sums = {};
    for (int64_t i = begin; i < begin + how.span; i += kLanes) {
      vint code;
      if constexpr (is_wide(kKind)) {
        code = quantise_wide(load(x + i), inverse);
        if (kKind == Inputs::kInt16 && how.is_split()) {
          store_split((uint8_t*)codes + span * tile * (how.span / 16) + 2 * (i - begin),
                      how.span < kSplitSpan ? 2 * how.span : tile, code);
        }
        else if (is_paired(kKind) && how.tile_rows == 0) store_paired(codes + 3 * i, row % 2 != 0, code);
        else store_wide<kKind>(wide, i, code);
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
    if (span_sums != nullptr) span_sums[span * how.tile_rows] = spans[span].sum;
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

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// Puts 32 codes of 12 bits, 8 above themselves, into 8 lines of a group: of each quad the high bytes,
// then the low ones.
ATOM_INLINE void store_quads(uint8_t* to, vint first, vint second) {
  const __m512i order = _mm512_broadcast_i32x4(
      _mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1));
  const auto pairs = [&](vint codes) {
    return _mm512_shuffle_epi8((__m512i)((codes & 15) | ((codes << 4) & 0xff00)), order);
  };
  const __m512i both = _mm512_sub_epi8(_mm512_unpacklo_epi64(pairs(first), pairs(second)),
                                       _mm512_set1_epi64(0x0808080800000000));
  const auto put = [&](int64_t quad, __m128i two) {
    _mm_storel_pd((double*)(to + quad * kGroupLine), _mm_castsi128_pd(two));
    _mm_storeh_pd((double*)(to + (quad + 4) * kGroupLine), _mm_castsi128_pd(two));
  };
  put(0, _mm512_castsi512_si128(both));
  put(1, _mm512_extracti32x4_epi32(both, 1));
  put(2, _mm512_extracti32x4_epi32(both, 2));
  put(3, _mm512_extracti32x4_epi32(both, 3));
}

// A row of `how.inputs` numbers becomes the row of a group whose lines begin at `group`.
template <class T>
void quantise_in_group(const QuantInputs& how, const T* x, int64_t row, uint8_t* group) {
  float scale = float(how.fixed_scale);
  if (scale == 0) {
    vint largest[2] = {};
    for (int64_t i = 0; i < how.inputs; i += 2 * kLanes) {
      ATOM_UNROLL for (int j = 0; j < 2; ++j) {
        const vint bits = (vint)magnitude(load(x + i + j * kLanes));
        largest[j] = bits > largest[j] ? bits : largest[j];
      }
    }
    const int32_t bits = maximum(largest[1] > largest[0] ? largest[1] : largest[0]);
    scale = scale_of(how.kind, splat(raw<float>(&bits)))[0];
  }
  std::memcpy(group + 4 * row, &scale, 4);
  const vfloat inverse = 1 / splat(scale);
  uint8_t* line = group + kGroupLine;
  for (int64_t begin = 0; begin < how.inputs; begin += how.span) {
    uint8_t* const of_span = line + 4 * row;
    vint sums = {};
    line += kGroupLine;
    for (int64_t i = begin; i < begin + how.span; i += 2 * kLanes, line += 8 * kGroupLine) {
      const vint first = quantise_wide(load(x + i), inverse) + 8;
      const vint second = quantise_wide(load(x + i + kLanes), inverse) + 8;
      store_quads(line + 8 * row, first, second);
      sums += first + second;
    }
    const int32_t code_sum = sum(sums) - 8 * int32_t(how.span);
    const int32_t first_code = -int32_t(how.excess) * code_sum;
    const float inputs = float(code_sum);
    std::memcpy(of_span, &first_code, 4);
    std::memcpy(of_span + 4 * kGroupRows, &inputs, 4);
  }
}

#else

template <class T>
void quantise_in_group(const QuantInputs&, const T*, int64_t, uint8_t*) {
  std::abort();  // no product of groups here
}

#endif

}  // namespace

int64_t excess_of(const QuantMatrix& w, Inputs kind) {
  const int64_t taken = is_wide(kind) && !kSplitsWide ? 0
                        : kind != Inputs::kNumbers    ? kTaken<Codes<8>, true>
                                                      : kTaken<Codes<8>, false>;
  return w.bits == 8 ? w.middle - taken : w.middle;
}

template <class T>
void pack_row(const QuantInputs& how, int64_t from, int64_t row, uint8_t* packed, Span* spans,
              float* sums) {
  static thread_local Scratch scratch;
  const T* x = static_cast<const T*>(how.x) + from * how.x_stride;
  uint8_t* const place = how.place(packed, row);
  spans += row * how.spans();
  if (sums != nullptr) sums += row / how.tile_rows * how.tile_rows * how.spans() + row % how.tile_rows;
  if (how.kind != Inputs::kNumbers || how.as_bfloat16()) {
    float* numbers = scratch.get<float>(how.inputs + kSpare + 2 * (how.groups() + kSpare));
    float* scales = numbers + how.inputs + kSpare;
    gather(how, x, numbers);
    auto* codes = reinterpret_cast<int8_t*>(place);
    if (how.kind == Inputs::kInt8) {
      return quantise_row<Inputs::kInt8>(how, numbers, scales, row, codes, spans, sums);
    }
    if (how.kind == Inputs::kInt16) {
      return quantise_row<Inputs::kInt16>(how, numbers, scales, row, codes, spans, sums);
    }
    if (how.kind == Inputs::kInt12) {
      return quantise_row<Inputs::kInt12>(how, numbers, scales, row, codes, spans, sums);
    }
    sum_spans(how, numbers, spans);
    bfloat16* out = reinterpret_cast<bfloat16*>(place);
    for (int64_t i = 0; i < how.inputs; i += kLanes) store(out + i, load(numbers + i));
  } else {
    float* numbers = reinterpret_cast<float*>(place);
    gather(how, x, numbers);
    sum_spans(how, numbers, spans);
  }
}

template <class T>
void pack_group(const QuantInputs& how, int64_t first, int64_t count, uint8_t* group) {
  static thread_local Scratch scratch;
  const bool as_they_are = how.order == nullptr && how.in_features == how.inputs;
  if (count < kGroupRows) std::memset(group, 0, group_bytes(how));
  for (int64_t row = 0; row < count; ++row) {
    const T* x = static_cast<const T*>(how.x) + (first + row) * how.x_stride;
    if (as_they_are) {
      quantise_in_group(how, x, row, group);
      continue;
    }
    float* numbers = scratch.get<float>(how.inputs + kSpare);
    gather(how, x, numbers);
    quantise_in_group(how, numbers, row, group);
  }
}

template void pack_group<float>(const QuantInputs&, int64_t, int64_t, uint8_t*);
template void pack_group<bfloat16>(const QuantInputs&, int64_t, int64_t, uint8_t*);
#if defined(__F16C__) || defined(__aarch64__)
template void pack_group<float16>(const QuantInputs&, int64_t, int64_t, uint8_t*);
#endif

template void pack_row<float>(const QuantInputs&, int64_t, int64_t, uint8_t*, Span*, float*);
template void pack_row<bfloat16>(const QuantInputs&, int64_t, int64_t, uint8_t*, Span*, float*);
#if defined(__F16C__) || defined(__aarch64__)
template void pack_row<float16>(const QuantInputs&, int64_t, int64_t, uint8_t*, Span*, float*);
#endif

}  // namespace atom
