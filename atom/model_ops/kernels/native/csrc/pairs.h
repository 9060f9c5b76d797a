// Products of pairs of bfloat16 with vectors of 16 lanes: by the processor's instruction for pairs where
// that is fast, else of both elements as floats, the first one first.
#pragma once

#include "simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)

namespace atom {

// Parts of a vector of pairs that are multiplied one after the other.
constexpr int kPairParts = kFastPairs ? 1 : 2;

// Pairs as they are, or the floats that are their elements.
ATOM_INLINE vint part_of(vint pairs, int part) {
  if (kFastPairs) return pairs;
  return part == 0 ? pairs << 16 : pairs & int32_t(0xffff0000u);
}

// sums + a part's products.
ATOM_INLINE vfloat add_products(vfloat sums, vint a, vint b) {
#if defined(ATOM_FAST_PAIRS)
  return (vfloat)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
  return fma((vfloat)a, (vfloat)b, sums);
#endif
}

}  // namespace atom
#endif
