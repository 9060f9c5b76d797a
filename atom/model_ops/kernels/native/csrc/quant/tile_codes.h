// Inputs and codes of weights as matrix tiles (AMX) want them, and their products: 16 rows of inputs by 64
// bytes, times 16 quads of codes (or twice as many pairs of bfloat16).
#pragma once

#include "amx.h"

#if defined(ATOM_AMX) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define ATOM_QUANT_TILES 1

#include <algorithm>

#include "quant/span.h"

namespace atom {

constexpr int64_t kLineBytes = 64;

// Of an input and of its weights in tiles.
inline int64_t element_bytes(const QuantRows& x) {
  return x.kind == Inputs::kNumbers || x.kind == Inputs::kInt12 ? 2 : 1;
}

// Bytes of a row of inputs that one product of tiles consumes.
inline int64_t depth_bytes(const QuantRows& x) { return std::min(kLineBytes, x.span * element_bytes(x)); }

// Whether codes are tiles as they lie.
template <class C, Inputs kKind>
constexpr bool kAreTiles = kKind != Inputs::kNumbers && C::kFillsByte;
// Whether bytes of weights in tiles have no sign.
template <class C, Inputs kKind>
constexpr bool kUnsigned = kAreTiles<C, kKind> || kKind == Inputs::kInt12;

// A unit of codes as signed bytes, [C::kQuads, kTileSide, 4].
template <class C>
ATOM_INLINE void unpack_bytes(const QuantMatrix& w, const uint8_t* codes, uint8_t* out) {
  const __m512i middle = _mm512_set1_epi8(int8_t(w.middle));
  ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
    _mm512_store_si512(out + j * kQuadBytes, _mm512_sub_epi8((__m512i)C::quad(codes, j), middle));
  }
}

// A unit of codes for inputs of 12 bits, [2 * 8, kTileSide, 4]: 16 times the codes, then the codes.
ATOM_INLINE void unpack_pairs(const uint8_t* codes, uint8_t* out) {
  using C = Codes<4>;
  ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
    _mm512_store_si512(out + j * kQuadBytes, (__m512i)C::high_quad(codes, j));
    _mm512_store_si512(out + (C::kQuads + j) * kQuadBytes, (__m512i)C::quad(codes, j));
  }
}

// A unit of codes as bfloat16, which is exact, [2 * C::kQuads, kTileSide, 2].
template <class C>
ATOM_INLINE void unpack_numbers(const uint8_t* codes, uint8_t* out) {
  ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
    const vint quad = C::quad(codes, j);
    ATOM_UNROLL for (int k = 0; k < 4; k += 2, out += kQuadBytes) {
      const vuint even = (vuint)number<C>(quad, k), odd = (vuint)number<C>(quad, k + 1);
      _mm512_store_si512(out, (__m512i)((even >> 16) | odd));
    }
  }
}

// The codes of so many inputs as tiles.
template <class C, Inputs kKind>
ATOM_INLINE void unpack(const QuantMatrix& w, const uint8_t* codes, int64_t inputs, uint8_t* out) {
  constexpr int64_t kBytes = C::kQuads * kQuadBytes * (kKind == Inputs::kInt12 || kKind == Inputs::kNumbers ? 2 : 1);
  for (int64_t i = 0; i < inputs; i += C::kUnit, codes += C::kBytes, out += kBytes) {
    if constexpr (kKind == Inputs::kInt12) unpack_pairs(codes, out);
    else if constexpr (kKind == Inputs::kNumbers) unpack_numbers<C>(codes, out);
    else unpack_bytes<C>(w, codes, out);
  }
}

template <class C, Inputs kKind, int Sums, int Left, int Right>
ATOM_INLINE void multiply_tile() {
  if constexpr (kUnsigned<C, kKind>) {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
  } else if constexpr (kKind != Inputs::kNumbers) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
  } else {
    amx::multiply_add<Sums, Left, Right>();
  }
}

// The sums of four tiles: of two panels, and of a second block of rows or of low bytes.
struct TileSums {
  static constexpr int64_t kTile = kTileSide * kTileSide;

  alignas(64) int32_t of[4][kTile];

  // Of row m of a block with a panel, as numbers.
  template <class C, Inputs kKind>
  ATOM_INLINE vfloat products(int64_t tile, int64_t m, const Span& x) const {
    const int32_t* at = of[tile] + m * kTileSide;
    if constexpr (kKind == Inputs::kNumbers) {
      return raw<vfloat>(at) + x.first;
    } else {
      vint codes = raw<vint>(at);
      if constexpr (kKind == Inputs::kInt16) codes = (codes << 8) + raw<vint>(at + 2 * kTile);
      if constexpr (kUnsigned<C, kKind>) codes += x.first_code;
      return convert(codes);
    }
  }
};

}  // namespace atom

#endif
