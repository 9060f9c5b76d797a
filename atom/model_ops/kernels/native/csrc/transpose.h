// Rows that become columns.
#pragma once

#include "simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
namespace atom {

// 16 by 16 values of 4 bytes.
ATOM_INLINE void transpose(__m512i (&rows)[16]) {
  __m512i a[16], b[16];
  ATOM_UNROLL for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  ATOM_UNROLL for (int i = 0; i < 16; i += 4) {
    ATOM_UNROLL for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  }
  ATOM_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0x88);
    const __m512i low2 = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xdd);
    const __m512i high2 = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(low, high, 0x88);
    rows[j + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
    rows[j + 4] = _mm512_shuffle_i32x4(low2, high2, 0x88);
    rows[j + 12] = _mm512_shuffle_i32x4(low2, high2, 0xdd);
  }
}

}  // namespace atom
#endif
