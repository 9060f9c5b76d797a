// Codes of quantised weights and their products with inputs.
//
// Codes lie in quads: a vector whose lanes are kLanes neighbouring outputs, each with the codes of
// four neighbouring inputs in its bytes. That is an operand of the processors' products of bytes,
// and no sum crosses lanes. A unit is the quads of kUnit neighbouring inputs; those of a panel of
// kLanes outputs follow each other, so a product reads its weights as one stream.
#pragma once

#include "simd.h"

namespace atom {

// Whether bytes of unsigned codes and signed inputs are multiplied without a limit to their sums.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool kUnsignedProduct = true;
#else
constexpr bool kUnsignedProduct = false;
#endif

constexpr int64_t kQuadBytes = 4 * kLanes;

ATOM_INLINE vint splat(int32_t value) { return value - vint{}; }
ATOM_INLINE vfloat convert(vint v) { return __builtin_convertvector(v, vfloat); }

// kLanes signed bytes. Compilers convert them one by one unless they are told how.
ATOM_INLINE vint load_bytes(const int8_t* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (vint)_mm512_cvtepi8_epi32(raw<__m128i>(p));
#elif defined(__AVX2__) && defined(__FMA__)
  return (vint)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__aarch64__)
  const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(raw<uint32_t>(p)));
  return (vint)vmovl_s16(vget_low_s16(vmovl_s8(bytes)));
#else
  vint out;
  for (int i = 0; i < kLanes; ++i) out[i] = p[i];
  return out;
#endif
}
ATOM_INLINE void store_bytes(int8_t* p, vint v) {  // of -128..127
#if defined(__AVX512F__) && defined(__AVX512BW__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__) && defined(__FMA__)
  const __m128i low = _mm256_castsi256_si128((__m256i)v);
  const __m128i words = _mm_packs_epi32(low, _mm256_extracti128_si256((__m256i)v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
#elif defined(__aarch64__)
  const int16x4_t words = vmovn_s32((int32x4_t)v);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
  const uint32_t four = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
  std::memcpy(p, &four, sizeof four);
#else
  for (int i = 0; i < kLanes; ++i) p[i] = int8_t(v[i]);
#endif
}

#if defined(__AVX2__) && defined(__FMA__)
// Joins the lanes of v by an operation on four lanes at a time.
template <class Join>
ATOM_INLINE int32_t fold(vint v, const Join& join) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m256i low = _mm512_castsi512_si256((__m512i)v);
  const __m256i high = _mm512_extracti64x4_epi64((__m512i)v, 1);
  __m128i four = join(join(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)),
                      join(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
#else
  const __m256i eight = (__m256i)v;
  __m128i four = join(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
#endif
  four = join(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(join(four, _mm_shuffle_epi32(four, 0xb1)));
}
ATOM_INLINE int32_t sum(vint v) {
  return fold(v, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
}
ATOM_INLINE int32_t maximum(vint v) {
  return fold(v, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
}
#elif defined(__aarch64__)
ATOM_INLINE int32_t sum(vint v) { return vaddvq_s32((int32x4_t)v); }
ATOM_INLINE int32_t maximum(vint v) { return vmaxvq_s32((int32x4_t)v); }
#else
ATOM_INLINE int32_t sum(vint v) { return (v[0] + v[1]) + (v[2] + v[3]); }
ATOM_INLINE int32_t maximum(vint v) {
  const int32_t a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
#endif

// Codes of so many bits, all stored without a sign. `quad(unit, j)` is quad j of a unit.
template <int kBits>
struct Codes;

// 128 above the signed code.
template <>
struct Codes<8> {
  static constexpr bool kFillsByte = true;
  static constexpr int64_t kUnit = 32, kQuads = 8, kBytes = 8 * kQuadBytes;

  static ATOM_INLINE vint quad(const uint8_t* unit, int64_t j) {
    return raw<vint>(unit + j * kQuadBytes);
  }
};

// Quad 2j is in the low four bits of bytes, quad 2j + 1 in the high ones.
template <>
struct Codes<4> {
  static constexpr bool kFillsByte = false;
  static constexpr int64_t kUnit = 32, kQuads = 8, kBytes = 4 * kQuadBytes;

  static ATOM_INLINE vint quad(const uint8_t* unit, int64_t j) {
    const vuint both = raw<vuint>(unit + j / 2 * kQuadBytes);
    return (vint)((j % 2 == 0 ? both : both >> 4) & 0x0f0f0f0fu);
  }
  // 16 times as large.
  static ATOM_INLINE vint high_quad(const uint8_t* unit, int64_t j) {
    const vuint both = raw<vuint>(unit + j / 2 * kQuadBytes);
    return (vint)((j % 2 == 0 ? both << 4 : both) & 0xf0f0f0f0u);
  }
};

// The low four bits as above, then the high two bits of quad j at bit 2j of bytes.
template <>
struct Codes<6> {
  static constexpr bool kFillsByte = false;
  static constexpr int64_t kUnit = 16, kQuads = 4, kBytes = 3 * kQuadBytes;

  static ATOM_INLINE vint quad(const uint8_t* unit, int64_t j) {
    const vuint both = raw<vuint>(unit + j / 2 * kQuadBytes);
    const vuint high = raw<vuint>(unit + 2 * kQuadBytes) >> (2 * j);
    return (vint)(((j % 2 == 0 ? both : both >> 4) & 0x0f0f0f0fu) |
                  ((high & 0x03030303u) << 4));
  }
};

// What products have subtracted from every code.
template <class C, bool kInteger>
constexpr int32_t kTaken = C::kFillsByte && !(kInteger && kUnsignedProduct) ? 128 : 0;

// Code i of each lane as a number.
template <class C>
ATOM_INLINE vfloat number(vint quad, int i) {
  if (!C::kFillsByte) return convert((vint)((vuint)quad >> (8 * i)) & 0xff);
  const vuint signed_codes = (vuint)quad ^ 0x80808080u;
  return convert((vint)(signed_codes << (24 - 8 * i)) >> 24);
}

// sums + the products of each lane's four codes with four inputs of -127..127, which are the same
// in every lane. Exact.
template <class C>
ATOM_INLINE vint dot4(vint sums, vint quad, vint inputs) {
  if (C::kFillsByte && !kUnsignedProduct) quad = (vint)((vuint)quad ^ 0x80808080u);
#if defined(__AVX512F__) && defined(__AVX512BW__)
#if defined(__AVX512VNNI__)
  return (vint)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)quad, (__m512i)inputs);
#else
  // Pairs are summed in 16 bits: 2 * 128 * 127 fits, and so it is codes' magnitudes that are the
  // operand without a sign.
  __m512i w = (__m512i)quad, x = (__m512i)inputs;
  if (C::kFillsByte) {
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    w = _mm512_abs_epi8(w);
  }
  const __m512i pairs = _mm512_maddubs_epi16(w, x);
  return sums + (vint)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#if defined(__AVXVNNI__)
  return (vint)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)quad, (__m256i)inputs);
#else
  __m256i w = (__m256i)quad, x = (__m256i)inputs;
  if (C::kFillsByte) {  // as above
    x = _mm256_sign_epi8(x, w);
    w = _mm256_abs_epi8(w);
  }
  const __m256i pairs = _mm256_maddubs_epi16(w, x);
  sums += (vint)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  ATOM_IN_REGISTER(sums);
  return sums;
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
  return (vint)vdotq_s32((int32x4_t)sums, (int8x16_t)quad, (int8x16_t)inputs);
#elif defined(__aarch64__)
  // Pairs are summed in 16 bits: 2 * 128 * 127 fits.
  const int8x16_t w = (int8x16_t)quad, x = (int8x16_t)inputs;
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
  const int16x8_t high = vmull_high_s8(w, x);
  return (vint)vpadalq_s16((int32x4_t)sums, vpaddq_s16(low, high));
#else
  for (int i = 24; i >= 0; i -= 8) {
    sums += ((vint)((vuint)quad << i) >> 24) * ((vint)((vuint)inputs << i) >> 24);
  }
  return sums;
#endif
}

}  // namespace atom
