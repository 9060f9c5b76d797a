// Codes that become tiles of bfloat16. A unit has 32 inputs of a panel, and its codes lie so that
// the 32 numbers of one output come out together, which is a row of a tile (amx.h).
#pragma once

#include "amx.h"
#include "linear/product.h"
#include "quant/span.h"

namespace atom {

constexpr int64_t kUnitInputs = 32, kUnitOuts = 16;

inline int64_t unit_bytes(int64_t bits) { return bits * kUnitInputs * kUnitOuts / 8; }

// Four bits of output 4q + s are at bit 4s of 32 words, from byte 64q on. Of six bits the low four lie
// so, and behind them the high two of output 8h + s at bit 2s of words. Eight bits of an output are
// 32 bytes with a sign; as a number such a code is 128 above that, as in quant/codes.h.
inline uint32_t unit_code(const uint8_t* unit, int64_t bits, int64_t out, int64_t input) {
  if (bits == 8) return unit[out * kUnitInputs + input] ^ 0x80u;
  const auto word = [&](int64_t i) { return uint32_t(raw<uint16_t>(unit + 64 * i + 2 * input)); };
  const uint32_t low = word(out / 4) >> (4 * (out % 4)) & 15;
  return bits == 4 ? low : low | (word(4 + out / 8) >> (2 * (out % 8)) & 3) << 4;
}
inline void add_unit_code(uint8_t* unit, int64_t bits, int64_t out, int64_t input, uint32_t code) {
  if (bits == 8) {
    unit[out * kUnitInputs + input] = uint8_t(code ^ 0x80u);
    return;
  }
  const auto add = [&](int64_t i, uint32_t more) {
    const uint16_t word = uint16_t(raw<uint16_t>(unit + 64 * i + 2 * input) | more);
    std::memcpy(unit + 64 * i + 2 * input, &word, sizeof word);
  };
  add(out / 4, (code & 15) << (4 * (out % 4)));
  if (bits == 6) add(4 + out / 8, code >> 4 << (2 * (out % 8)));
}

#if defined(ATOM_AMX) && defined(__AVX512BF16__)

// What is added to codes, or to their products with scales.
enum class Shift { kNone, kZeros, kOffsets };

// Of the outputs of a unit; six bits have groups of 16 inputs, and so others for each half.
template <int kBits>
struct UnitFactors {
  static constexpr int kHalves = kBits == 6 ? 2 : 1;
  alignas(64) float scale[kHalves][kUnitOuts], shift[kHalves][kUnitOuts];

  ATOM_INLINE UnitFactors(const QuantMatrix& w, int64_t panel, int64_t input) {
    for (int half = 0; half < kHalves; ++half) {
      const Factors f = load_factors(w, panel, input + half * kUnitInputs / 2);
      store(scale[half], f.scale);
      store(shift[half], f.shift);
    }
    // From memory they are broadcast for nothing; from registers by the unit that also looks up.
    asm volatile("" ::"r"(this) : "memory");
  }
};

// Weights of output `out`. Products of codes with scales that have offsets are exact in float32.
template <Shift kShift, int kBits>
ATOM_INLINE __m512 weights_of(__m512 codes, const UnitFactors<kBits>& f, int half, int out) {
  const __m512 scale = _mm512_set1_ps(f.scale[half % f.kHalves][out]);
  if (kShift == Shift::kNone) return _mm512_mul_ps(codes, scale);
  const __m512 shift = _mm512_set1_ps(f.shift[half % f.kHalves][out]);
  if (kShift == Shift::kZeros) return _mm512_mul_ps(_mm512_sub_ps(codes, shift), scale);
  return _mm512_fmadd_ps(codes, scale, shift);
}

// out[r * stride + i] = weight i of output r.
template <int kBits, Shift kShift>
ATOM_INLINE void unpack_unit(const uint8_t* unit, const UnitFactors<kBits>& f, __m512 middle,
                             bfloat16* out, int64_t stride) {
  if constexpr (kBits == 4) {
    // An output has 16 different weights, and two outputs a table of them.
    const __m512 all = _mm512_sub_ps(
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), middle);
    const __m512i low = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
    ATOM_UNROLL for (int r = 0; r < kUnitOuts; r += 2) {
      const auto table = _mm512_cvtne2ps_pbh(weights_of<kShift>(all, f, 0, r + 1),
                                             weights_of<kShift>(all, f, 0, r));
      const __m512i words = _mm512_loadu_si512(unit + r / 4 * 64);
      const __m512i a = _mm512_and_si512(_mm512_srli_epi16(words, r % 4 * 4), low);
      const __m512i b = _mm512_srli_epi16(words, r % 4 * 4 + 4);
      const __m512i c = _mm512_ternarylogic_epi32(b, low, second, 0xea);  // (b & low) | second
      _mm512_storeu_si512(out + r * stride, _mm512_permutexvar_epi16(a, (__m512i)table));
      _mm512_storeu_si512(out + (r + 1) * stride, _mm512_permutexvar_epi16(c, (__m512i)table));
    }
    return;
  }
  ATOM_UNROLL for (int r = 0; r < kUnitOuts; ++r) {
    __m512i first, second;
    if constexpr (kBits == 8) {
      first = _mm512_cvtepi8_epi32(raw<__m128i>(unit + r * kUnitInputs));
      second = _mm512_cvtepi8_epi32(raw<__m128i>(unit + r * kUnitInputs + 16));
    } else {
      const __m512i low = _mm512_srli_epi16(_mm512_loadu_si512(unit + r / 4 * 64), r % 4 * 4);
      const __m512i high =
          _mm512_srli_epi16(_mm512_loadu_si512(unit + 256 + r / 8 * 64), r % 8 * 2);
      const __m512i codes = _mm512_or_si512(
          _mm512_and_si512(low, _mm512_set1_epi16(15)),
          _mm512_slli_epi16(_mm512_and_si512(high, _mm512_set1_epi16(3)), 4));
      first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes));
      second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1));
    }
    __m512 a = _mm512_cvtepi32_ps(first), b = _mm512_cvtepi32_ps(second);
    if (kBits == 6) a = _mm512_sub_ps(a, middle), b = _mm512_sub_ps(b, middle);
    const auto both = _mm512_cvtne2ps_pbh(weights_of<kShift>(b, f, 1, r),
                                          weights_of<kShift>(a, f, 0, r));
    _mm512_storeu_si512(out + r * stride, (__m512i)both);
  }
}

// Panels of a matrix, `inputs` wide, which is whole units.
template <int kBits, Shift kShift>
struct Unpacking {
  Unpacking(const QuantMatrix& w, int64_t inputs)
      : w(w), inputs(inputs), middle(_mm512_set1_ps(float(w.middle))) {}

  // Unit `unit` of a panel to rows `stride` apart; fetches that of the next panel but one.
  ATOM_INLINE void operator()(int64_t panel, int64_t unit, bfloat16* out, int64_t stride) const {
    const uint8_t* codes = w.codes + panel * w.panel_bytes() + unit * unit_bytes(kBits);
    const uint8_t* next = codes + 2 * w.panel_bytes();
    for (int64_t i = 0; i < unit_bytes(kBits); i += 64) __builtin_prefetch(next + i);
    fetch_factors(panel + 2, unit * kUnitInputs);
    const UnitFactors<kBits> factors(w, panel, unit * kUnitInputs);
    unpack_unit<kBits, kShift>(codes, factors, middle, out, stride);
  }

  ATOM_INLINE void fetch_factors(int64_t panel, int64_t input) const {
    const int64_t at = (panel * w.groups + group_of(input, w.group)) * kLanes;
    __builtin_prefetch(static_cast<const char*>(w.scale) + at * bytes_of(w.scale_type));
    if (kShift == Shift::kNone) return;
    __builtin_prefetch(static_cast<const char*>(w.shift) + at * bytes_of(w.shift_type));
  }

  const QuantMatrix& w;
  const int64_t inputs;
  const __m512 middle;
};

// Tiles of panels from `panel` on as a product takes them: each step's are unpacked while
// those before are multiplied.
template <class Unpack>
class UnpackedTiles {
 public:
  UnpackedTiles(const Unpack& unpack, int64_t panel, int64_t count) : unpack_(unpack), panel_(panel) {
    for (int64_t f = 0; f < count; ++f) unpack_(panel + f, 0, tiles_[0][f], kUnitInputs);
  }

  template <int F>
  ATOM_INLINE void load(int64_t step) const {
    if ((step + 1) * kUnitInputs < unpack_.inputs) {
      for (int f = 0; f < F; ++f) {
        unpack_(panel_ + f, step + 1, tiles_[(step + 1) % kSteps][f], kUnitInputs);
      }
    }
    amx::unrolled<F>([&](auto f) { amx::load<4 + f>(tiles_[step % kSteps][f], amx::kRowBytes); });
  }

 private:
  static constexpr int64_t kSteps = 4;
  const Unpack& unpack_;
  const int64_t panel_;
  alignas(64) mutable bfloat16 tiles_[kSteps][2][kUnitOuts * kUnitInputs];
};

// The rows of a matrix as a product reads them: see `multiply` of product.h.
struct UnpackedRows {
  const QuantMatrix& w;
  int64_t inputs;

  // use(unpacking)
  template <class Use>
  ATOM_INLINE void with_unpacking(const Use& use) const {
    switch (w.bits) {
      case 4: return with_shift<4>(use);
      case 6: return with_shift<6>(use);
      default: return with_shift<8>(use);
    }
  }
  template <int kBits, class Use>
  ATOM_INLINE void with_shift(const Use& use) const {
    if (w.has_offsets) return use(Unpacking<kBits, Shift::kOffsets>(w, inputs));
    if (w.shift != nullptr) return use(Unpacking<kBits, Shift::kZeros>(w, inputs));
    use(Unpacking<kBits, Shift::kNone>(w, inputs));
  }
};

template <class Unpack, class Store>
void multiply(const TileProduct& product, const void* packed, const Unpack& unpack, int64_t rows,
              int64_t begin, int64_t end, const Store& store) {
  static thread_local Scratch scratch;
  auto* const panel = scratch.get<bfloat16>(kPanel * unpack.inputs);
  alignas(64) float sums[TileProduct::kMostChunk * kPanel];
  for (int64_t n = begin; n < end; n += kPanel) {
    const int64_t outs = std::min(kPanel, end - n), first = n / kUnitOuts;
    if (rows <= TileProduct::kFewRows) {
      if (outs > kUnitOuts) product.multiply_tiles<2>(packed, UnpackedTiles(unpack, first, 2), sums);
      else product.multiply_tiles<1>(packed, UnpackedTiles(unpack, first, 1), sums);
      store(0, rows, n, outs, sums);
      continue;
    }
    const int64_t whole = (outs + kUnitOuts - 1) / kUnitOuts * kUnitOuts;
    for (int64_t i = 0; i < whole; i += kUnitOuts) {
      for (int64_t unit = 0; unit < unpack.inputs / kUnitInputs; ++unit) {
        unpack(first + i / kUnitOuts, unit, panel + i * unpack.inputs + unit * kUnitInputs,
               unpack.inputs);
      }
    }
    product.for_sums<false>(packed, panel, whole, [&](int64_t m, int64_t count, const float* found) {
      store(m, count, n, outs, found);
    });
  }
}

// As that of product.h.
template <class Store>
void multiply(const TileProduct& product, const void* packed, const UnpackedRows& weights,
              int64_t begin, int64_t end, const Store& store) {
  weights.with_unpacking([&](const auto& unpack) {
    multiply(product, packed, unpack, product.rows(), begin, end, store);
  });
}

#endif

}  // namespace atom
