// Products of many rows of 15 bits on matrix tiles of bfloat16, where few inputs share their scales.
//
// An input is a multiple of 256 and a rest, which are exact in bfloat16, as codes of weights are. Their
// products and the sums of a span are integers below 2^24, times 256 those of the first parts; so the
// only rounding is where the rests' sum is added: sums leave tiles as the numbers that `convert` makes
// of the whole sum's integer, and nothing is left to do but to scale them.
#pragma once

#include "quant/tile_codes.h"
#include "quant/tiles.h"

#if defined(ATOM_QUANT_TILES)

namespace atom {

// Codes less `middle` as bfloat16, whose two bytes are looked up.
template <class C>
class NumberTable {
 public:
  explicit NumberTable(int64_t middle) {
    for (int64_t code = 0; code < kCodes; ++code) {
      const float number = float(code - middle);
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof bits);
      high_[code] = uint8_t(bits >> 24);
      low_[code] = uint8_t(bits >> 16);
    }
  }

  // out [2, kTileSide, 2]: numbers 0 and 2 of each lane, then 1 and 3.
  ATOM_INLINE void store_quad(vint quad, uint8_t* out) const {
    const __m512i codes = (__m512i)quad, upper = _mm512_set1_epi16(int16_t(0xff00));
    const __m512i high = look_up(high_, codes), low = look_up(low_, codes);
    _mm512_store_si512(out, _mm512_mask_mov_epi8(_mm512_slli_epi16(high, 8), kEven, low));
    const __m512i odd = _mm512_or_si512(_mm512_and_si512(high, upper), _mm512_srli_epi16(low, 8));
    _mm512_store_si512(out + kLineBytes, odd);
  }

 private:
  static constexpr int64_t kCodes = C::kFillsByte ? 256 : 64;
  static constexpr __mmask64 kEven = 0x5555555555555555;

  static ATOM_INLINE __m512i look_up(const uint8_t* table, __m512i codes) {
    const auto part = [&](int64_t i) { return _mm512_load_si512(table + 64 * i); };
    if constexpr (!C::kFillsByte) return _mm512_permutexvar_epi8(codes, part(0));
    else {
      const __m512i small = _mm512_permutex2var_epi8(part(0), codes, part(1));
      const __m512i large = _mm512_permutex2var_epi8(part(2), codes, part(3));
      return _mm512_mask_mov_epi8(small, _mm512_movepi8_mask(codes), large);
    }
  }

  alignas(64) uint8_t high_[kCodes], low_[kCodes];
};

// Two panels times rows. A pass is a tile of rows times a few spans of both panels; meanwhile the sums of
// the pass before are added to totals, one panel after the other, in registers. Both take turns every
// few instructions: processors look ahead only so far. kParts: tiles of inputs in a span. Of two the first
// has the multiples of 256; the only one has both, side by side.
template <class C, int kParts>
class SplitProduct {
 public:
  SplitProduct(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows)
      : w_(w), x_(x), spans_(w.inputs / x.span), panel_(panel),
        span_bytes_(x.span / C::kUnit * C::kBytes), tiles_of_rows_((rows + kTileSide - 1) / kTileSide),
        numbers_(w.middle) {}

  // out [rows, 2, kTileSide] for whole tiles of rows: from span 0 on it is set, else added to. `spans`
  // are at least two.
  void multiply(SpanRange spans, float* out) {
    int64_t chunks = (spans.end - spans.begin) / 2;
    for (first_ = spans.begin; chunks > 0; --chunks, first_ += count_) {
      count_ = chunks == 1 ? spans.end - first_ : 2;
      prepare(spans);
      if (w_.has_shift()) multiply_chunk<true>(out);
      else multiply_chunk<false>(out);
    }
  }

 private:
  static constexpr int kRows = kTileSide;
  static constexpr int64_t kTileBytes = kTileSide * kLineBytes;
  static constexpr int64_t kMostSpans = 3;  // of a chunk: tiles and sums stay in the first cache
  using Totals = vfloat[kRows];
  using Sums = float[2][kRows * kTileSide];  // of a span with both panels

  // Makes tiles and factors of a chunk's weights, and fetches what is some spans ahead, at the end of the
  // panels that of the next two.
  void prepare(SpanRange spans) {
    const bool is_near = first_ + kFetched < spans.end;
    const int64_t ahead = is_near ? kFetched : kFetched - (spans.end - spans.begin);
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t panel = std::min(panel_ + half, w_.panels() - 1);
      const uint8_t* codes = w_.codes + panel * w_.panel_bytes() + first_ * span_bytes_;
      const uint8_t* next = codes + ahead * span_bytes_ + (is_near ? 0 : 2 * w_.panel_bytes());
      for (int64_t i = 0; i < count_ * span_bytes_; i += 64) __builtin_prefetch(next + i);
      for (int64_t i = 0; i < count_; ++i) {
        const int64_t input = (first_ + i) * x_.span;
        unpack(codes + i * span_bytes_, tiles_[i][half]);
        factors_[half][i] = product_factors(w_, panel, input);
        fetch_factors(w_, panel + (is_near ? 0 : 2), input + ahead * x_.span);
      }
    }
  }

  void unpack(const uint8_t* codes, uint8_t* tile) const {
    for (int64_t unit = 0; unit < x_.span / C::kUnit; ++unit, codes += C::kBytes) {
      ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j, tile += 2 * kLineBytes) {
        numbers_.store_quad(C::quad(codes, j), tile);
        if constexpr (kParts == 1) numbers_.store_quad(C::quad(codes, j), tile + kTileBytes / 2);
      }
    }
  }

  // Of the sums that are added: those of one panel, span by span, then those of the other.
  struct Adding {
    const Sums* sums;
    int64_t half, span;
  };

  template <bool kShift>
  void multiply_chunk(float* out) {
    const int64_t next_tile = spans_ * kParts * kTileBytes;  // from one tile of rows to the next
    const uint8_t* x = static_cast<const uint8_t*>(x_.inputs) + first_ * kParts * kTileBytes;
    Totals totals = {};
    float* to = sums_[1][0][0];  // for the sums of the span before; there are none at first
    int64_t set = 0;
    for (int64_t i = 0; i < count_; ++i, set ^= 1) {
      if (set == 0) begin_span<0>(x, i, to);
      else begin_span<1>(x, i, to);
      to = sums_[0][i][0];
    }
    for (int64_t pass = 1; pass < tiles_of_rows_; ++pass) {
      x += next_tile;
      Adding adding{sums_[(pass - 1) % 2], 0, 0};
      load_totals(pass - 1, 0, out, totals);
      for (int64_t i = 0; i < count_; ++i, set ^= 1) {
        if (set == 0) work<0, kShift>(x, i, pass - 1, to, adding, totals, out);
        else work<1, kShift>(x, i, pass - 1, to, adding, totals, out);
        to = sums_[pass % 2][i][0];
      }
    }
    if (set == 0) store_sums<0>(to);
    else store_sums<1>(to);
    const int64_t last = tiles_of_rows_ - 1;
    for (int64_t half = 0; half < 2; ++half) {
      load_totals(last, half, out, totals);
      for (int64_t i = 0; i < count_; ++i) {
        add<0, kRows, kShift>({sums_[last % 2], half, i}, last, totals);
      }
      store_totals(last, half, totals, out);
    }
  }

  // Begins a span's products in tiles 2 * kSet and the next, and stores those of the other set to `to`.
  // Between these instructions the sums of two spans are added.
  template <int kSet, bool kShift>
  ATOM_INLINE void work(const uint8_t* x, int64_t i, int64_t added_pass, float* to, Adding& adding,
                        Totals& totals, float* out) {
    x += i * kParts * kTileBytes;
    multiply_part<kSet, 0>(x, i);
    add<0, kRows / 2, kShift>(adding, added_pass, totals);
    amx::store<2 - 2 * kSet>(to, kLineBytes);
    multiply_part<kSet, 1>(x, i);
    add<kRows / 2, kRows / 2, kShift>(adding, added_pass, totals);
    advance(adding, added_pass, totals, out);
    multiply_part<kSet, 2>(x, i);
    add<0, kRows / 2, kShift>(adding, added_pass, totals);
    amx::store<3 - 2 * kSet>(to + kRows * kTileSide, kLineBytes);
    multiply_part<kSet, 3>(x, i);
    add<kRows / 2, kRows / 2, kShift>(adding, added_pass, totals);
    advance(adding, added_pass, totals, out);
  }

  template <int kSet>
  ATOM_INLINE void begin_span(const uint8_t* x, int64_t i, float* to) const {
    x += i * kParts * kTileBytes;
    amx::unrolled<4>([&](auto part) { multiply_part<kSet, part>(x, i); });
    store_sums<kSet>(to);
  }
  // Of the set that is not `kSet`.
  template <int kSet>
  static ATOM_INLINE void store_sums(float* to) {
    amx::store<2 - 2 * kSet>(to, kLineBytes);
    amx::store<3 - 2 * kSet>(to + kRows * kTileSide, kLineBytes);
  }

  // One of four parts of a span's products.
  template <int kSet, int kPart>
  ATOM_INLINE void multiply_part(const uint8_t* x, int64_t i) const {
    constexpr int kFirst = 2 * kSet, kSecond = kFirst + 1;
    if constexpr (kPart == 0) {
      amx::load<4>(x, kLineBytes);
      amx::load<6>(tiles_[i][0], kLineBytes);
      amx::zero<kFirst>();
      amx::multiply_add<kFirst, 4, 6>();
    } else if constexpr (kPart == 1) {
      amx::load<7>(tiles_[i][1], kLineBytes);
      amx::zero<kSecond>();
      amx::multiply_add<kSecond, 4, 7>();
    } else if constexpr (kParts == 2 && kPart == 2) {
      amx::load<5>(x + kTileBytes, kLineBytes);
      amx::multiply_add<kFirst, 5, 6>();
    } else if constexpr (kParts == 2) {
      amx::multiply_add<kSecond, 5, 7>();
    }
  }

  template <int kFirst, int kCount, bool kShift>
  ATOM_INLINE void add(const Adding& adding, int64_t pass, Totals& totals) const {
    const Factors& factors = factors_[adding.half][adding.span];
    const float* sums = adding.sums[adding.span][adding.half];
    const Span* inputs = x_.spans + pass * kRows * spans_ + first_ + adding.span;
    amx::unrolled<kCount>([&](auto i) __attribute__((always_inline)) {
      constexpr int m = kFirst + i;
      totals[m] = add_span<Inputs::kInt16>(totals[m], raw<vfloat>(sums + m * kTileSide), factors,
                                           inputs[kShift ? m * spans_ : 0], kShift);
    });
  }

  ATOM_INLINE void advance(Adding& adding, int64_t pass, Totals& totals, float* out) const {
    if (++adding.span < count_) return;
    store_totals(pass, adding.half, totals, out);
    adding.span = 0;
    if (++adding.half < 2) load_totals(pass, adding.half, out, totals);
  }

  ATOM_INLINE void load_totals(int64_t pass, int64_t half, const float* out, Totals& totals) const {
    const float* from = out + (2 * pass * kRows + half) * kTileSide;
    const bool is_first = first_ == 0;
    amx::unrolled<kRows>([&](auto m) __attribute__((always_inline)) {
      totals[m] = is_first ? vfloat{} : load(from + 2 * m * kTileSide);
    });
  }

  // At the end with the rows' scales.
  ATOM_INLINE void store_totals(int64_t pass, int64_t half, const Totals& totals, float* out) const {
    float* to = out + (2 * pass * kRows + half) * kTileSide;
    const Span* inputs = x_.spans + pass * kRows * spans_;
    const bool is_last = first_ + count_ == spans_;
    amx::unrolled<kRows>([&](auto m) __attribute__((always_inline)) {
      const vfloat scale = splat(is_last ? inputs[m * spans_].scale : 1.0f);
      store(to + 2 * m * kTileSide, totals[m] * scale);
    });
  }

  static constexpr int64_t kFetched = 4;  // spans ahead

  const QuantMatrix& w_;
  const QuantRows& x_;
  const int64_t spans_, panel_;
  const int64_t span_bytes_, tiles_of_rows_;
  int64_t first_ = 0, count_ = 0;  // spans of the chunk
  alignas(64) Sums sums_[2][kMostSpans];  // of a pass and of the one before
  Factors factors_[2][kMostSpans];
  alignas(64) uint8_t tiles_[kMostSpans][2][kTileBytes];
  const NumberTable<C> numbers_;
};

}  // namespace atom

#endif
