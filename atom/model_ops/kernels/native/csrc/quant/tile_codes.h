// Inputs and codes of weights as matrix tiles (AMX) want them, and their products: 16 rows of inputs by 64
// bytes, times 16 quads of codes (or twice as many pairs of bfloat16).
#pragma once

#include "amx.h"

#if defined(ATOM_AMX) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && \
    defined(__AVX512VBMI__) && defined(__GFNI__)
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
inline int64_t depth_bytes(const QuantRows& x) {
  return is_split(x.kind, x.tile_rows) ? kLineBytes : std::min(kLineBytes, x.span * element_bytes(x));
}

// Whether codes are tiles as they lie.
template <class C, Inputs kKind>
constexpr bool kAreTiles = kKind != Inputs::kNumbers && C::kFillsByte;
// Whether bytes of weights in tiles have no sign.
template <class C, Inputs kKind>
constexpr bool kUnsigned = kAreTiles<C, kKind> || kKind == Inputs::kInt12;

// A unit of codes as signed bytes, [C::kQuads, kTileSide, 4].
template <class C>
ATOM_INLINE void unpack_bytes(int64_t zero, const uint8_t* codes, uint8_t* out) {
  const __m512i middle = _mm512_set1_epi8(int8_t(zero));
  ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
    _mm512_store_si512(out + j * kQuadBytes, _mm512_sub_epi8((__m512i)C::quad(codes, j), middle));
  }
}

// Each byte times 16, or over 16: a product of bits with a matrix, since no shift is of bytes.
ATOM_INLINE __m512i bytes_times_16(__m512i v) {
  return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(0x01020408), 0);
}
ATOM_INLINE __m512i bytes_over_16(__m512i v) {
  return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(0x1020408000000000), 0);
}

// A unit of codes for inputs of 12 bits, [2 * 8, kTileSide, 4]: 16 times the codes, then the codes.
ATOM_INLINE void unpack_pairs(const uint8_t* codes, uint8_t* out) {
  using C = Codes<4>;
  const __m512i low_half = _mm512_set1_epi8(0x0f);
  ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; j += 2) {
    const __m512i both = _mm512_loadu_si512(codes + j / 2 * kQuadBytes);
    uint8_t *high = out + j * kQuadBytes, *low = high + C::kQuads * kQuadBytes;
    _mm512_store_si512(high, bytes_times_16(both));
    _mm512_store_si512(high + kQuadBytes, _mm512_andnot_si512(low_half, both));
    _mm512_store_si512(low, _mm512_and_si512(low_half, both));
    _mm512_store_si512(low + kQuadBytes, bytes_over_16(both));
  }
}

// The same of codes without 8, with a sign.
ATOM_INLINE void unpack_signed_pairs(const uint8_t* codes, uint8_t* out) {
  using C = Codes<4>;
  const __m512i highest = _mm512_set1_epi8(int8_t(0x80)), middle = _mm512_set1_epi8(8);
  ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
    const __m512i high = _mm512_xor_si512((__m512i)C::high_quad(codes, j), highest);
    _mm512_store_si512(out + j * kQuadBytes, high);
    const __m512i low = _mm512_sub_epi8((__m512i)C::quad(codes, j), middle);
    _mm512_store_si512(out + (C::kQuads + j) * kQuadBytes, low);
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

// A unit of codes as tiles want them. middle: the code of zero.
template <class C, Inputs kKind>
ATOM_INLINE void unpack_unit(int64_t middle, const uint8_t* codes, uint8_t* out) {
  if constexpr (kKind == Inputs::kInt12) unpack_pairs(codes, out);
  else if constexpr (kKind == Inputs::kNumbers) unpack_numbers<C>(codes, out);
  else unpack_bytes<C>(middle, codes, out);
}

// The codes of so many inputs as tiles.
template <class C, Inputs kKind>
ATOM_INLINE void unpack(const QuantMatrix& w, const uint8_t* codes, int64_t inputs, uint8_t* out) {
  constexpr int64_t kBytes = C::kQuads * kQuadBytes * (kKind == Inputs::kInt12 || kKind == Inputs::kNumbers ? 2 : 1);
  for (int64_t i = 0; i < inputs; i += C::kUnit, codes += C::kBytes, out += kBytes) {
    unpack_unit<C, kKind>(w.middle, codes, out);
  }
}

template <bool kUnsignedWeights, int Sums, int Left, int Right>
ATOM_INLINE void multiply_bytes() {
  if constexpr (kUnsignedWeights) {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
  } else {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
  }
}

template <class C, Inputs kKind, int Sums, int Left, int Right>
ATOM_INLINE void multiply_tile() {
  if constexpr (kKind == Inputs::kNumbers) amx::multiply_add<Sums, Left, Right>();
  else multiply_bytes<kUnsigned<C, kKind>, Sums, Left, Right>();
}

// The sums of so many tiles.
template <int kTiles>
struct TileSums {
  static constexpr int64_t kTile = kTileSide * kTileSide;

  alignas(64) int32_t of[kTiles][kTile];

  // Of row m of a tile's `tile_rows` with a panel.
  template <Inputs kKind>
  ATOM_INLINE vint codes(int64_t tile, int64_t m, int64_t tile_rows) const {
    const int32_t* at = of[tile] + m * kTileSide;
    if constexpr (kKind != Inputs::kInt16) return raw<vint>(at);
    return (raw<vint>(at) << 8) + raw<vint>(at + tile_rows * kTileSide);
  }
  // The same as numbers.
  template <class C, Inputs kKind>
  ATOM_INLINE vfloat products(int64_t tile, int64_t m, int64_t tile_rows, const Span& x) const {
    if constexpr (kKind == Inputs::kNumbers) {
      return raw<vfloat>(of[tile] + m * kTileSide) + x.first;
    } else {
      const vint sums = codes<kKind>(tile, m, tile_rows);
      return convert(kUnsigned<C, kKind> ? sums + x.first_code : sums);
    }
  }
};

// The tile of wide inputs of a span, from row `row` on, where a span is one step.
ATOM_INLINE const uint8_t* tile_of_inputs(const QuantRows& x, int64_t row, int64_t span) {
  const uint64_t at = span * depth_bytes(x), tile = tile_lines_of(x.kind, x.tile_rows) * kLineBytes;
  return static_cast<const uint8_t*>(x.inputs) + row * x.stride + at / kLineBytes * tile +
         at % kLineBytes;
}

// T tiles of wide inputs times P of weights. There are two sets of them, used in turns: sums leave their
// tile after the next products have begun, since a store waits for its products.
template <bool kUnsignedWeights, int T, int P>
struct TileSets {
  static_assert(T * P <= 2);

  template <int kSet>
  static ATOM_INLINE void multiply(const uint8_t* const (&x)[T], const uint8_t* const (&w)[P]) {
    constexpr int kFirst = kSet * T * P;
    amx::unrolled<T>([&](auto t) { amx::load<(T == 1 ? 4 + kSet : 4 + t)>(x[t], kLineBytes); });
    amx::unrolled<P>([&](auto p) {
      constexpr int kWeights = P == 1 ? 6 + kSet : 6 + p;
      amx::load<kWeights>(w[p], kLineBytes);
      amx::unrolled<T>([&](auto t) {
        constexpr int kSums = kFirst + t * P + p, kInputs = T == 1 ? 4 + kSet : 4 + t;
        amx::zero<kSums>();
        multiply_bytes<kUnsignedWeights, kSums, kInputs, kWeights>();
      });
    });
  }
  template <int kSet>
  static ATOM_INLINE void store(TileSums<T * P>& sums) {
    amx::unrolled<T * P>([&](auto i) { amx::store<kSet * T * P + i>(sums.of[i], kLineBytes); });
  }
};

}  // namespace atom

#endif
