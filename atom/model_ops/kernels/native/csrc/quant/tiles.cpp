// Products of many rows on the processor's matrix tiles (AMX): 16 rows of inputs by 64 bytes,
// times 16 quads of codes (or twice as many pairs of bfloat16), which are tiles as they lie.
// Of each span the tiles' sums leave and become what `add_span` makes of them.
#include "quant/tiles.h"

#include "amx.h"

#if defined(ATOM_AMX) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#include <algorithm>
#include <cstdlib>

#include "parallel.h"
#include "quant/span.h"

namespace atom {
namespace {

constexpr int64_t kSide = kTileSide;
constexpr int64_t kLineBytes = 64;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Of an input and of its weights in tiles.
int64_t element_bytes(const QuantRows& x) {
  return x.kind == Inputs::kNumbers || x.kind == Inputs::kInt12 ? 2 : 1;
}

// Bytes of a row of inputs that one product of tiles consumes.
int64_t depth_bytes(const QuantRows& x) { return std::min(kLineBytes, x.span * element_bytes(x)); }

// Whether codes are tiles as they lie.
template <class C, Inputs kKind>
constexpr bool kAreTiles = kKind != Inputs::kNumbers && C::kFillsByte;
// Whether bytes of weights in tiles have no sign.
template <class C, Inputs kKind>
constexpr bool kUnsigned = kAreTiles<C, kKind> || kKind == Inputs::kInt12;

// Codes of a panel as signed bytes, [inputs / 4, kSide, 4].
template <class C>
void unpack_bytes(const QuantMatrix& w, const uint8_t* codes, uint8_t* out) {
  const __m512i middle = _mm512_set1_epi8(int8_t(w.middle));
  for (int64_t i = 0; i < w.inputs; i += C::kUnit, codes += C::kBytes) {
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j, out += kQuadBytes) {
      _mm512_store_si512(out, _mm512_sub_epi8((__m512i)C::quad(codes, j), middle));
    }
  }
}

// Codes of a panel for inputs of 12 bits, [inputs / 32, 64 / 4, kSide, 4]: of 32 inputs 16 times their
// codes, then the codes.
void unpack_pairs(const QuantMatrix& w, const uint8_t* codes, uint8_t* out) {
  using C = Codes<4>;
  for (int64_t i = 0; i < w.inputs; i += C::kUnit, codes += C::kBytes, out += 2 * C::kQuads * kQuadBytes) {
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      const vuint quad = (vuint)C::quad(codes, j), high = quad << 4;
      std::memcpy(out + j * kQuadBytes, &high, sizeof high);
      std::memcpy(out + (C::kQuads + j) * kQuadBytes, &quad, sizeof quad);
    }
  }
}

// Codes of a panel as bfloat16, which is exact, [inputs / 2, kSide, 2].
template <class C>
void unpack_numbers(const QuantMatrix& w, const uint8_t* codes, uint8_t* out) {
  for (int64_t i = 0; i < w.inputs; i += C::kUnit, codes += C::kBytes) {
    ATOM_UNROLL for (int64_t j = 0; j < C::kQuads; ++j) {
      const vint quad = C::quad(codes, j);
      ATOM_UNROLL for (int k = 0; k < 4; k += 2, out += kQuadBytes) {
        const vuint even = (vuint)number<C>(quad, k), odd = (vuint)number<C>(quad, k + 1);
        const vuint pair = (even >> 16) | odd;
        std::memcpy(out, &pair, sizeof pair);
      }
    }
  }
}

// The four products of two blocks of rows (of wide inputs both bytes of one block) with two panels
// over `steps` times `depth` bytes. x: tiles with rows `stride` apart, each `next` behind the last.
template <class C, Inputs kKind>
ATOM_INLINE void multiply_tiles(const uint8_t* const (&x)[2], int64_t stride, int64_t next,
                                const uint8_t* const (&w)[2], int64_t steps, int64_t depth,
                                int32_t (&sums)[4][kSide * kSide]) {
  amx::zero<0>();
  amx::zero<1>();
  amx::zero<2>();
  amx::zero<3>();
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t at = step * depth * kSide;
    amx::load<4>(x[0] + step * next, stride);
    amx::load<6>(w[0] + at, kLineBytes);
    amx::load<7>(w[1] + at, kLineBytes);
    amx::load<5>(x[1] + step * next, stride);
    if constexpr (kUnsigned<C, kKind>) {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    } else if constexpr (kKind != Inputs::kNumbers) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    } else {
      amx::multiply_add<0, 4, 6>();
      amx::multiply_add<1, 4, 7>();
      amx::multiply_add<2, 5, 6>();
      amx::multiply_add<3, 5, 7>();
    }
  }
  amx::store<0>(sums[0], kLineBytes);
  amx::store<1>(sums[1], kLineBytes);
  amx::store<2>(sums[2], kLineBytes);
  amx::store<3>(sums[3], kLineBytes);
}

// Adds one span's products of a block of rows with a panel to their totals, which lie 32 apart.
template <class C, Inputs kKind>
void add_products(const int32_t (&sums)[4][kSide * kSide], int64_t half, int64_t rows,
                  const Factors& factors, const Span* x, int64_t spans, bool has_shift,
                  float* totals) {
  for (int64_t m = 0; m < rows; ++m) {
    const int32_t* at = sums[m / kSide * 2 + half] + m % kSide * kSide;
    vfloat products;
    if constexpr (kKind == Inputs::kNumbers) {
      products = raw<vfloat>(at) + x[m * spans].first;
    } else {
      vint codes = raw<vint>(at);
      if constexpr (kKind == Inputs::kInt16) codes = (codes << 8) + raw<vint>(at + 2 * kSide * kSide);
      if constexpr (kUnsigned<C, kKind>) codes += x[m * spans].first_code;
      products = convert(codes);
    }
    float* total = totals + m * 2 * kSide;
    store(total, add_span<kKind>(load(total), products, factors, x[m * spans], has_shift));
  }
}

template <class C, Inputs kKind>
void multiply(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows, float* out) {
  static thread_local Scratch scratch;
  const int64_t panel_bytes = w.inputs * kSide * element_bytes(x);
  const int64_t panels[2] = {panel, std::min(panel + 1, w.panels() - 1)};
  const uint8_t* codes[2];
  for (int64_t half = 0; half < 2; ++half) {
    codes[half] = w.codes + panels[half] * w.panel_bytes();
    if constexpr (!kAreTiles<C, kKind>) {
      auto* unpacked = scratch.get<uint8_t>(2 * panel_bytes) + half * panel_bytes;
      if constexpr (kKind == Inputs::kInt12) unpack_pairs(w, codes[half], unpacked);
      else if constexpr (kKind == Inputs::kNumbers) unpack_numbers<C>(w, codes[half], unpacked);
      else unpack_bytes<C>(w, codes[half], unpacked);
      codes[half] = unpacked;
    }
  }
  constexpr bool kWide = kKind == Inputs::kInt16, kPaired = kKind == Inputs::kInt12;
  const int64_t spans = w.inputs / x.span, span_bytes = x.span * element_bytes(x);
  const int64_t row_bytes = x.stride * (kPaired ? 1 : element_bytes(x)), depth = depth_bytes(x);
  const int64_t stride = kWide || kPaired ? kLineBytes : row_bytes;
  const int64_t next = kWide     ? 2 * x.tile_rows * kLineBytes
                       : kPaired ? x.tile_rows * kLineBytes
                                 : depth;
  std::fill(out, out + rows * 2 * kSide, 0.0f);
  alignas(64) int32_t sums[2][4][kSide * kSide];
  // Wide inputs are long rows of few spans: a span's weights stay in the first cache.
  constexpr int64_t kBlock = kWide ? kSide : 2 * kSide;
  const int64_t blocks = (rows + kBlock - 1) / kBlock, parts = blocks * spans;
  const auto row_of = [&](int64_t part) { return (kWide ? part % blocks : part / spans) * kBlock; };
  const auto span_of = [&](int64_t part) { return kWide ? part / blocks : part % spans; };
  // The tiles of a part run beside what is left to do for the part before.
  for (int64_t part = 0; part <= parts; ++part) {
    if (part < parts) {
      const int64_t row = row_of(part), at = span_of(part) * span_bytes;
      const int64_t from = kWide || kPaired ? at / kLineBytes * next + at % kLineBytes : at;
      const auto* first = static_cast<const uint8_t*>(x.inputs) + row * row_bytes + from;
      const uint8_t* second = kWide                ? first + x.tile_rows * kLineBytes
                              : row + kSide < rows ? first + kSide * row_bytes
                                                   : first;
      const uint8_t* const inputs[2] = {first, second};
      const uint8_t* const of[2] = {codes[0] + at * kSide, codes[1] + at * kSide};
      multiply_tiles<C, kKind>(inputs, stride, next, of, span_bytes / depth, depth, sums[part % 2]);
    }
    for (int64_t half = 0; half < 2 && part > 0; ++half) {
      const int64_t row = row_of(part - 1), span = span_of(part - 1);
      add_products<C, kKind>(sums[(part - 1) % 2], half, std::min(kBlock, rows - row),
                             product_factors(w, panels[half], span * x.span),
                             x.spans + row * spans + span, spans, w.has_shift(),
                             out + (2 * row + half) * kSide);
    }
  }
  if (!scales_row(kKind)) return;
  for (int64_t m = 0; m < rows; ++m) {
    const vfloat scale = splat(x.spans[m * spans].scale);
    for (float* at = out + 2 * m * kSide; at < out + 2 * (m + 1) * kSide; at += kLanes) {
      store(at, load(at) * scale);
    }
  }
}

template <class C>
void multiply(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows, float* out) {
  switch (x.kind) {
    case Inputs::kNumbers: return multiply<C, Inputs::kNumbers>(w, panel, x, rows, out);
    case Inputs::kInt8: return multiply<C, Inputs::kInt8>(w, panel, x, rows, out);
    case Inputs::kInt16: return multiply<C, Inputs::kInt16>(w, panel, x, rows, out);
    case Inputs::kInt12: return multiply<Codes<4>, Inputs::kInt12>(w, panel, x, rows, out);
    case Inputs::kBfloat16: std::abort();  // quant/numbers.cpp has those
  }
}

}  // namespace

bool has_tiles() { return amx::is_permitted(); }

void begin_tiles(const QuantRows& x) {
  TileConfig config;
  const int64_t depth = depth_bytes(x);
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = i == 4 || i == 5 ? depth : kLineBytes;
    config.rows[i] = i < 6 ? x.tile_rows : depth / 4;
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

void end_tiles() { _tile_release(); }

void multiply_two_panels(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows,
                         float* out) {
  switch (w.bits) {
    case 4: return multiply<Codes<4>>(w, panel, x, rows, out);
    case 6: return multiply<Codes<6>>(w, panel, x, rows, out);
    default: return multiply<Codes<8>>(w, panel, x, rows, out);
  }
}

}  // namespace atom

#else

#include <cstdlib>

namespace atom {

bool has_tiles() { return false; }
void begin_tiles(const QuantRows&) {}
void end_tiles() {}
void multiply_two_panels(const QuantMatrix&, int64_t, const QuantRows&, int64_t, float*) {
  std::abort();
}

}  // namespace atom

#endif
