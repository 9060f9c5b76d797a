// Vectors of the processor's width, the three storage types, and the few functions of them
// that the kernels need. Written with the vector extensions that GCC and Clang share;
// intrinsics stand only where the extensions have no word for an instruction.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace atom {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX512BF16__)
constexpr bool kHardwareBf16 = true;
#else
constexpr bool kHardwareBf16 = false;
#endif

// Whether pairs of bfloat16 are multiplied faster than floats. Intel's vectors take four times as long
// for a pair as for a float; where there are tiles, they multiply.
#if defined(__AVX512BF16__) && (defined(__AMX_BF16__) || defined(__znver3__) /* to older compilers */ || \
                                defined(__znver4__) || defined(__znver5__))
#define ATOM_FAST_PAIRS 1
constexpr bool kFastPairs = true;
#else
constexpr bool kFastPairs = false;
#endif

#if defined(__F16C__) || defined(__aarch64__)
constexpr bool kHasFloat16 = true;
#else
constexpr bool kHasFloat16 = false;
#endif

typedef float vfloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t vint __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vuint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vhalf __attribute__((vector_size(kLanes * 2)));

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// Keeps a value in a register: compilers otherwise load an operand again for each use, and
// loads are what limits the small matrix products.
#if defined(__AVX512F__)
#define ATOM_IN_REGISTER(v) asm("" : "+v"(v))
#elif defined(__x86_64__)
#define ATOM_IN_REGISTER(v) asm("" : "+x"(v))
#elif defined(__aarch64__)
#define ATOM_IN_REGISTER(v) asm("" : "+w"(v))
#else
#define ATOM_IN_REGISTER(v)
#endif

// Keeps a value in memory, for others that need the registers.
#define ATOM_IN_MEMORY(v) asm("" : "+m"(v))

#define ATOM_INLINE inline __attribute__((always_inline))
#define ATOM_UNROLL _Pragma("GCC unroll 32")

// ---- arithmetic ---------------------------------------------------------------------------

// Not `vfloat{} + value`: adding zero turns -0 to 0 and is not free.
ATOM_INLINE vfloat splat(float value) { return value - vfloat{}; }

ATOM_INLINE vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vfloat)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

ATOM_INLINE vfloat select(vint mask, vfloat yes, vfloat no) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  return (vfloat)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
  return (vfloat)((mask & (vint)yes) | (~mask & (vint)no));
#endif
}

// The second operand where one is NaN.
ATOM_INLINE vfloat max(vfloat a, vfloat b) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}
ATOM_INLINE vfloat min(vfloat a, vfloat b) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (vfloat)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vfloat)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return select(a < b, a, b);
#endif
}

// Sums the lanes as halves, then neighbours, then pairs of neighbours: the order that
// `sum_eight` has for eight vectors at once.
ATOM_INLINE float sum(vfloat v) {
#if defined(__AVX2__) && defined(__FMA__)
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                                     _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
#else
  const __m256 eight = (__m256)v;
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehdup_ps(four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehl_ps(four, four)));
#else
  return (v[0] + v[1]) + (v[2] + v[3]);
#endif
}

// Of numbers; any number or NaN if one is NaN.
ATOM_INLINE float maximum(vfloat v) {
#if defined(__AVX2__) && defined(__FMA__)
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256((__m512)v),
                                     _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
#else
  const __m256 eight = (__m256)v;
#endif
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

#if defined(__AVX2__) && defined(__FMA__)
ATOM_INLINE __m256 fold_halves(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
ATOM_INLINE __m256 fold_neighbours(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}
ATOM_INLINE __m256 to_eight(vfloat v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                       _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
#else
  return (__m256)v;
#endif
}
#endif

// out[i] = sum(v[i]) for eight vectors, with the bits that `sum` gives.
ATOM_INLINE void sum_eight(const vfloat* v, float* out) {
#if defined(__AVX2__) && defined(__FMA__)
  const __m256 a = fold_halves(to_eight(v[0]), to_eight(v[4]));
  const __m256 b = fold_halves(to_eight(v[1]), to_eight(v[5]));
  const __m256 c = fold_halves(to_eight(v[2]), to_eight(v[6]));
  const __m256 d = fold_halves(to_eight(v[3]), to_eight(v[7]));
  _mm256_storeu_ps(out, fold_neighbours(fold_neighbours(a, b), fold_neighbours(c, d)));
#else
  for (int i = 0; i < 8; ++i) out[i] = sum(v[i]);
#endif
}

// e^x to about 2 ulp; 0 below -87.7, infinity above 88.3, NaN for NaN: the bounds are where the
// power of two becomes 0 and infinity by itself.
// Range reduction and polynomial: Cephes, expf.
ATOM_INLINE vfloat exp(vfloat x) {
  x = min(splat(88.9f), max(splat(-88.0f), x));
  const vfloat magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vfloat shifted = fma(x, splat(1.44269504089f), magic);
  const vfloat n = shifted - magic;
  vfloat r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vfloat p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  return p * (vfloat)(((vuint)shifted - (vuint)magic + 127u) << 23);
}

ATOM_INLINE vfloat tanh(vfloat x) {
  const vfloat e = exp(max(x, -x) * -2.0f);
  const vfloat y = (1.0f - e) / (1.0f + e);
  return select(x < vfloat{}, -y, y);
}

// ---- conversions --------------------------------------------------------------------------

// A value of another type at an address of any alignment.
template <class V, class T>
ATOM_INLINE V raw(const T* p) {
  typedef V unaligned __attribute__((aligned(1), may_alias));
  return *reinterpret_cast<const unaligned*>(p);
}

// The nearest bfloat16, ties to even, in the upper half of each lane.
ATOM_INLINE vuint round_to_bfloat16(vfloat v) {
  const vuint bits = (vuint)v;
  const vuint rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const vuint nan = (vuint)(v != v);
  return (rounded & ~nan) | ((bits | 0x400000u) & nan);
}

ATOM_INLINE vfloat load(const float* p) { return raw<vfloat>(p); }
ATOM_INLINE void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof v); }

// Compilers convert halves of these vectors one after the other unless they are told how.
ATOM_INLINE vfloat load(const bfloat16* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const vuint bits = (vuint)_mm512_cvtepu16_epi32(raw<__m256i>(p));
#elif defined(__AVX2__) && defined(__FMA__)
  const vuint bits = (vuint)_mm256_cvtepu16_epi32(raw<__m128i>(p));
#elif defined(__aarch64__)
  const vuint bits = (vuint)vmovl_u16(vld1_u16(&p->bits));
#else
  const vuint bits = __builtin_convertvector(raw<vhalf>(p), vuint);
#endif
  return (vfloat)(bits << 16);
}
ATOM_INLINE void store(bfloat16* p, vfloat v) {
  const vuint bits = round_to_bfloat16(v) >> 16;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m256i half = _mm512_cvtepi32_epi16((__m512i)bits);
#else
  const vhalf half = __builtin_convertvector(bits, vhalf);
#endif
  std::memcpy(p, &half, sizeof half);
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
ATOM_INLINE vfloat load(const float16* p) {
  return (vfloat)_mm512_cvtph_ps(raw<__m256i>(p));
}
ATOM_INLINE void store(float16* p, vfloat v) {
  const __m256i half = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, sizeof half);
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
ATOM_INLINE vfloat load(const float16* p) {
  return (vfloat)_mm256_cvtph_ps(raw<__m128i>(p));
}
ATOM_INLINE void store(float16* p, vfloat v) {
  const __m128i half = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, sizeof half);
}
#elif defined(__F16C__)
ATOM_INLINE vfloat load(const float16* p) {
  return (vfloat)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p));
}
ATOM_INLINE void store(float16* p, vfloat v) {
  _mm_storel_epi64((__m128i*)p, _mm_cvtps_ph((__m128)v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
ATOM_INLINE vfloat load(const float16* p) {
  return (vfloat)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
}
ATOM_INLINE void store(float16* p, vfloat v) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}
#endif

// A pair is two vectors of 2 * kLanes neighbouring elements, in whichever order is cheapest
// to unpack: for bfloat16 the even elements, then the odd ones. Every operand of a product
// comes in the same order, and `store_pair` undoes it.
template <class T>
ATOM_INLINE vfloat load_first(const T* p) {
  return load(p);
}
template <class T>
ATOM_INLINE vfloat load_second(const T* p) {
  return load(p + kLanes);
}
ATOM_INLINE vfloat load_first(const bfloat16* p) { return (vfloat)(raw<vuint>(p) << 16); }
ATOM_INLINE vfloat load_second(const bfloat16* p) {
  return (vfloat)(raw<vuint>(p) & 0xffff0000u);
}
template <class T>
ATOM_INLINE void store_pair(T* p, vfloat first, vfloat second) {
  store(p, first);
  store(p + kLanes, second);
}
ATOM_INLINE void store_pair(bfloat16* p, vfloat first, vfloat second) {
  const vuint both =
      (round_to_bfloat16(first) >> 16) | (round_to_bfloat16(second) & 0xffff0000u);
  std::memcpy(p, &both, sizeof both);
}

ATOM_INLINE float load_one(const float* p) { return *p; }
ATOM_INLINE void store_one(float* p, float v) { *p = v; }

ATOM_INLINE float load_one(const bfloat16* p) {
  const uint32_t bits = uint32_t(p->bits) << 16;
  return raw<float>(&bits);
}
ATOM_INLINE void store_one(bfloat16* p, float v) {
  const uint32_t bits = raw<uint32_t>(&v);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  p->bits = uint16_t((v != v ? bits | 0x400000u : rounded) >> 16);
}

#if defined(__F16C__)
ATOM_INLINE float load_one(const float16* p) { return _cvtsh_ss(p->bits); }
ATOM_INLINE void store_one(float16* p, float v) {
  p->bits = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__aarch64__)
ATOM_INLINE float load_one(const float16* p) { return raw<__fp16>(p); }
ATOM_INLINE void store_one(float16* p, float v) {
  const __fp16 half = v;
  std::memcpy(p, &half, sizeof half);
}
#endif

// As `store`, but what is below the smallest normal number becomes 0 where a processor's own
// conversion does that.
template <class T>
ATOM_INLINE void store_rounded(T* out, vfloat sums) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bfloat16>) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)sums);
    std::memcpy(out, &rounded, sizeof rounded);
    return;
  }
#endif
  store(out, sums);
}

// The last elements of a row; absent lanes read as zero and are not written.
template <class T>
ATOM_INLINE vfloat load_some(const T* p, int64_t count) {
  if (count >= kLanes) return load(p);
  T padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
template <class T>
ATOM_INLINE void store_some(T* p, vfloat v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  T padded[kLanes];
  store(padded, v);
  std::memcpy(p, padded, count * sizeof(T));
}
template <class T>
ATOM_INLINE void store_rounded_some(T* p, vfloat v, int64_t count) {
  if (count >= kLanes) return store_rounded(p, v);
  T padded[kLanes];
  store_rounded(padded, v);
  std::memcpy(p, padded, count * sizeof(T));
}

}  // namespace atom
