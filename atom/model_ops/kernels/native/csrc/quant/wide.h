// Products of codes of weights with inputs of 16 bits.
#pragma once

#include <cstdlib>

#include "quant/codes.h"
#include "quant/matrix.h"

namespace atom {

// Wide inputs are multiplied as their two bytes where processors multiply bytes with bytes and add
// four products at once: a row is all the high bytes and then all the low ones, both with a sign.
// Elsewhere they are multiplied as 16 bits, and a row has inputs 0, 2, 1, 3 of each quad; or rows of 12 bits
// are pairs of `PairedCodes`.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool kSplitsWide = true;
#else
constexpr bool kSplitsWide = kUnsignedProduct;
#endif

// A row of wide inputs. Of split ones the high bytes of 1 << `line_bits` inputs lie together, and the
// next ones `next` further; low bytes lie `low` behind the high ones.
struct WideRow {
  int8_t* row;
  int64_t line_bits, next, low;

  int8_t* place(int64_t i) const {
    return row + (i >> line_bits) * next + (i & ((int64_t{1} << line_bits) - 1));
  }
};

// Stores kLanes codes of wide inputs, from input `i` on.
template <Inputs kKind>
ATOM_INLINE void store_wide(const WideRow& to, int64_t i, vint codes) {
  if (kSplitsWide) {
    constexpr int kLow = low_bits(kKind);
    const vint low = (vint)((vuint)codes << (32 - kLow)) >> (32 - kLow);
    int8_t* at = to.place(i);
    store_bytes(at, (codes - low) >> kLow);
    return store_bytes(at + to.low, low);
  }
  [[maybe_unused]] int8_t* row = to.row;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512i others = _mm512_shuffle_epi32((__m512i)codes, _MM_PERM_BADC);
  const vint pairs = (vint)(((vuint)codes & 0xffffu) | (vuint)others << 16);
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 0, 0, 0, 0);
  const __m512i joined = _mm512_permutexvar_epi64(order, (__m512i)pairs);
  _mm256_storeu_si256((__m256i*)(row + 2 * i), _mm512_castsi512_si256(joined));
#elif defined(__AVX2__) && defined(__FMA__)
  const __m256i others = _mm256_shuffle_epi32((__m256i)codes, 0x4e);
  const vint pairs = (vint)(((vuint)codes & 0xffffu) | (vuint)others << 16);
  const __m256i joined = _mm256_permute4x64_epi64((__m256i)pairs, 0x08);
  _mm_storeu_si128((__m128i*)(row + 2 * i), _mm256_castsi256_si128(joined));
#else
  constexpr int kOrder[] = {0, 2, 1, 3};
  for (int j = 0; j < kLanes; ++j) {
    const int16_t code = int16_t(codes[j / 4 * 4 + kOrder[j % 4]]);
    std::memcpy(row + 2 * (i + j), &code, sizeof code);
  }
#endif
}

// Codes of two rows of 12 bits as three bytes: the first is a + 16 * c, the second 16 * b + c.
struct PairedCodes {
  vint a, b, c;

  // Of 16 neighbouring c the first code leaves a in its byte; one of them has the second one's rest by 16.
  // All are bytes for codes of -1904..1904. Where numbers of one row are not finite and its codes are
  // anything, those of the other are right.
  static ATOM_INLINE PairedCodes of(vint first, vint second) {
    const vint least = (first - 112) >> 4;
    const vint c = (vint)((vuint)(least + ((second - least) & 15)) << 24) >> 24;
    return {first - (c << 4), (second - c) >> 4, c};
  }
};

// Stores kLanes codes of 12 bits of a row of a pair, of which the first comes before the second: of each
// quad the four a, b and c.
ATOM_INLINE void store_paired(int8_t* to, bool is_second, vint codes) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  PairedCodes both;
  if (is_second) {
    const __m128i low = raw<__m128i>(to), high = raw<__m128i>(to + 12);
    const vint a = (vint)_mm256_cvtepi8_epi32(_mm_unpacklo_epi32(low, high));
    const vint c = (vint)_mm256_cvtepi8_epi32(_mm_unpackhi_epi32(low, high));
    both = PairedCodes::of(a + (c << 4), codes);
  } else {
    both = PairedCodes::of(codes, vint{});
  }
  const __m256i first = _mm256_packs_epi32((__m256i)both.a, (__m256i)both.b);
  const __m256i bytes = _mm256_packs_epi16(first, _mm256_packs_epi32((__m256i)both.c, (__m256i)both.c));
  const auto put = [](int8_t* at, __m128i quad) {
    const int32_t last = _mm_extract_epi32(quad, 2);
    _mm_storel_epi64((__m128i*)at, quad);
    std::memcpy(at + 8, &last, 4);
  };
  put(to, _mm256_castsi256_si128(bytes));
  put(to + 12, _mm256_extracti128_si256(bytes, 1));
#else
  std::abort();  // no pairs here
#endif
}

// Stores kLanes codes of kInt16 as two bfloat16 each, the multiples of 256 and, `low` bytes behind them, the
// rests: of each quad inputs 0, 2, 1, 3.
ATOM_INLINE void store_split(uint8_t* to, int64_t low, vint codes) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const auto put = [](uint8_t* at, vint part) {
    const __m512i bits = _mm512_shuffle_epi32((__m512i)convert(part), _MM_PERM_DBCA);
    _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  };
  const vint rests = (vint)((vuint)codes << 24) >> 24;
  put(to, codes - rests);
  put(to + low, rests);
#else
  std::abort();  // no tiles here
#endif
}

// A quad as 16 bits, with nothing subtracted: of each lane codes 0 and 2, then 1 and 3.
struct Halves {
  vint even, odd;
};
ATOM_INLINE Halves halves(vint quad) {
  typedef uint16_t Words __attribute__((vector_size(kQuadBytes)));
  return {quad & 0x00ff00ff, (vint)((Words)quad >> 8)};
}

// sums + the products of each lane's two codes of 16 bits with two inputs. Exact modulo 2^32: with
// unsigned codes sums may leave 32 bits until they have what they begin with.
ATOM_INLINE vint dot2(vint sums, vint codes, vint inputs) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (vint)((vuint)sums + (vuint)_mm512_madd_epi16((__m512i)codes, (__m512i)inputs));
#elif defined(__AVX2__) && defined(__FMA__)
  sums = (vint)((vuint)sums + (vuint)_mm256_madd_epi16((__m256i)codes, (__m256i)inputs));
  ATOM_IN_REGISTER(sums);
  return sums;
#elif defined(__aarch64__)
  const int16x8_t w = (int16x8_t)codes, x = (int16x8_t)inputs;
  const int32x4_t low = vmull_s16(vget_low_s16(w), vget_low_s16(x));
  return (vint)((vuint)sums + (vuint)vpaddq_s32(low, vmull_high_s16(w, x)));
#else
  const auto low = [](vint v) { return (vint)((vuint)v << 16) >> 16; };
  return (vint)((vuint)sums + (vuint)(low(codes) * low(inputs)) +
                (vuint)((codes >> 16) * (inputs >> 16)));
#endif
}

// What sums of 16 bits of a lane are multiplied with. Compilers would make it again for every unit.
struct PairFactors {
  vint one = splat(0x10001), sixteen = splat(0x100010);

  PairFactors() {
    ATOM_IN_REGISTER(one);
    ATOM_IN_REGISTER(sixteen);
  }
};

// Sums over a unit of 4-bit codes of P panels times the bytes of R rows in pairs, the last of which may be
// alone. They have 16 bits, two in a lane, which 8 * 2 * 15 * 128 does not leave.
template <int R, int P>
class PairSums {
 public:
  // Adds a quad of each panel times the quads of pairs at x, which are `pair` apart.
  ATOM_INLINE void add(const vint (&quads)[P], const int8_t* x, int64_t pair, bool is_first) {
    ATOM_UNROLL for (int i = 0; i < kParts; ++i) {
      const vint inputs = splat(raw<int32_t>(x + i / 3 * pair + 4 * (i == kAlone ? 2 : i % 3)));
      ATOM_UNROLL for (int p = 0; p < P; ++p) add(sums_[i][p], quads[p], inputs, is_first);
    }
  }
  // Adds those of row r.
  ATOM_INLINE void add_to(vint (&sums)[R][P], const PairFactors& factors) const {
    const auto& [one, sixteen] = factors;
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      const int own = r / 2 * 3 + r % 2, both = own + (r % 2 != 0 || r == R - 1 ? 1 : 2);
      ATOM_UNROLL for (int p = 0; p < P; ++p) {
        sums[r][p] += times(sums_[own][p], r % 2 == 0 ? one : sixteen) +
                      times(sums_[both][p], r % 2 == 0 ? sixteen : one);
      }
    }
  }

 private:
  static constexpr int kParts = (3 * R + 1) / 2, kAlone = R % 2 != 0 ? kParts - 1 : -1;

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  static ATOM_INLINE void add(vint& sums, vint quad, vint inputs, bool is_first) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)quad, (__m256i)inputs);
    sums = (vint)(is_first ? pairs : _mm256_add_epi16((__m256i)sums, pairs));
    ATOM_IN_REGISTER(sums);
  }
  static ATOM_INLINE vint times(vint sums, vint factors) {
    return (vint)_mm256_madd_epi16((__m256i)sums, (__m256i)factors);
  }
#else
  static void add(vint&, vint, vint, bool) { std::abort(); }  // no pairs here
  static vint times(vint, vint) { std::abort(); }
#endif

  vint sums_[kParts][P];
};

}  // namespace atom
