// FP8 storage (e4m3fn: no infinities, 0x7f and 0xff are NaN) and what it converts to.
#pragma once

#include "simd.h"

namespace atom {

struct float8 {
  uint8_t bits;
};

typedef uint8_t vbyte __attribute__((vector_size(kLanes)));

// Exact.
ATOM_INLINE vfloat load(const float8* p) {
  const vuint code = __builtin_convertvector(raw<vbyte>(p), vuint), magnitude = code & 0x7fu;
  const vfloat normal = (vfloat)((magnitude << 20) + (120u << 23));
  const vfloat small = __builtin_convertvector((vint)magnitude, vfloat) * 0x1p-9f;
  const vfloat number = select((vint)(magnitude < 8u), small, normal);
  const vuint nan = (vuint)(magnitude == 0x7fu) & 0x7fc00000u;
  return (vfloat)((vuint)number | nan | (code & 0x80u) << 24);
}

// Saturates to 448 and rounds to the nearest, ties to even; NaN stays NaN.
ATOM_INLINE void store(float8* p, vfloat v) {
  const vuint sign = (vuint)v & 0x80000000u, nan = (vuint)(v != v);
  const vfloat size = min(splat(448.0f), (vfloat)((vuint)v ^ sign));
  const vuint bits = (vuint)size;
  const vuint normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // A step of 2^-9, that of the numbers below 2^-6, is the last bit of 2^14.
  const vfloat shift = splat(0x1p14f);
  const vuint small = (vuint)(size + shift) - (vuint)shift;
  const vuint is_small = (vuint)(size < splat(0x1p-6f));
  const vuint number = (small & is_small) | (normal & ~is_small);
  const vuint code = (number & ~nan) | (0x7fu & nan) | sign >> 24;
  const vbyte bytes = __builtin_convertvector(code, vbyte);
  std::memcpy(p, &bytes, sizeof bytes);
}

// Writes a row of a cache: as it is, or in FP8 if there is a scale.
template <class T>
void write_row(const T* row, int64_t count, const float* scale, void* to) {
  if (scale == nullptr) {
    std::memcpy(to, row, count * sizeof(T));
    return;
  }
  auto* out = static_cast<float8*>(to);
  for (int64_t d = 0; d < count; d += kLanes) {
    store_some(out + d, load_some(row + d, count - d) / *scale, count - d);
  }
}

// out[i] = `count` numbers at rows[i] + offset and zeros up to `padded`, a multiple of 2 * kLanes,
// for i in [begin, end).
template <class T>
void widen(const char* const* rows, int64_t offset, int64_t begin, int64_t end, int64_t count,
           T* out, int64_t padded) {
  for (int64_t i = begin; i < end; ++i) {
    const auto* row = reinterpret_cast<const float8*>(rows[i] + offset);
    for (int64_t d = 0; d < padded; d += kLanes) {
      store(out + i * padded + d, d < count ? load_some(row + d, count - d) : vfloat{});
    }
  }
}

#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
// One byte of the bfloat16 for each magnitude.
struct Float8Table {
  alignas(64) uint8_t low[128], high[128];

  constexpr Float8Table() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      int bits = (code << 4) + (120 << 7);
      if (code < 8) {  // code * 2^-9
        int top = code < 2 ? 0 : code < 4 ? 1 : 2;
        bits = code == 0 ? 0 : ((118 + top) << 7) + ((code << (7 - top)) & 0x7f);
      }
      if (code == 127) bits = 0x7fc0;
      low[code] = uint8_t(bits & 0xff);
      high[code] = uint8_t(bits >> 8);
    }
  }
};
inline constexpr Float8Table kFloat8Table;

inline void widen(const char* const* rows, int64_t offset, int64_t begin, int64_t end,
                  int64_t count, bfloat16* out, int64_t padded) {
  const __m512i low0 = _mm512_load_si512(kFloat8Table.low);
  const __m512i low1 = _mm512_load_si512(kFloat8Table.low + 64);
  const __m512i high0 = _mm512_load_si512(kFloat8Table.high);
  const __m512i high1 = _mm512_load_si512(kFloat8Table.high + 64);
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  // Bytes are paired within 16: in this order the pairs come out as the codes lie.
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  for (int64_t d = 0; d < padded; d += 64) {
    const int64_t left = count - d;
    const __mmask64 mask = left >= 64 ? ~0ull : left <= 0 ? 0 : (1ull << left) - 1;
    for (int64_t i = begin; i < end; ++i) {
      const __m512i lying = _mm512_maskz_loadu_epi8(mask, rows[i] + offset + d);
      const __m512i codes = _mm512_permutexvar_epi64(order, lying);
      const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
      const __m512i magnitude = _mm512_permutex2var_epi8(high0, codes, high1);
      // magnitude | (codes & sign)
      const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, sign, 0xf8);
      bfloat16* to = out + i * padded + d;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
      if (padded - d > 32) _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(low, high));
    }
  }
}
#endif

}  // namespace atom
