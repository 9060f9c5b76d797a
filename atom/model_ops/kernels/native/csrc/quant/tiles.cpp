// Products of many rows on the processor's matrix tiles (AMX). Of each span the tiles' sums leave and become
// what `add_span` makes of them.
#include "quant/tiles.h"

#include "quant/block_tiles.h"
#include "quant/split_tiles.h"
#include "quant/step_tiles.h"

#if defined(ATOM_QUANT_TILES)
#include <algorithm>
#include <cstdlib>

#include "parallel.h"

namespace atom {
namespace {

constexpr int64_t kSide = kTileSide;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The products of T tiles of rows with two panels over `steps` times `depth` bytes. x: tiles with rows
// `stride` apart, each `next` behind the last. Before a step's weights are read, `fetch` is called with
// where they begin in a panel and how many bytes they are.
template <class C, Inputs kKind, int T, class Fetch>
ATOM_INLINE void multiply_tiles(const uint8_t* const (&x)[T], int64_t stride, int64_t next,
                                const uint8_t* const (&w)[2], int64_t steps, int64_t depth,
                                const Fetch& fetch, TileSums<2 * T>& sums) {
  amx::unrolled<2 * T>([](auto i) { amx::zero<i>(); });
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t at = step * depth * kSide;
    fetch(at, depth * kSide);
    amx::load<4>(x[0] + step * next, stride);
    amx::load<6>(w[0] + at, kLineBytes);
    amx::load<7>(w[1] + at, kLineBytes);
    if constexpr (T == 2) amx::load<5>(x[1] + step * next, stride);
    amx::unrolled<T>([](auto t) {
      multiply_tile<C, kKind, 2 * t, 4 + t, 6>();
      multiply_tile<C, kKind, 2 * t + 1, 4 + t, 7>();
    });
  }
  amx::unrolled<2 * T>([&](auto i) { amx::store<i>(sums.of[i], kLineBytes); });
}

// Adds one span's products of a block of rows with a panel to their totals, which lie 32 apart.
template <class C, Inputs kKind, int kTiles>
void add_products(const TileSums<kTiles>& sums, int64_t tile_rows, int64_t half, int64_t rows,
                  const Factors& factors, const Span* x, int64_t spans, bool has_shift, float* totals) {
  for (int64_t m = 0; m < rows; ++m) {
    const Span& inputs = x[m * spans];
    const vfloat products =
        sums.template products<C, kKind>(m / tile_rows * 2 + half, m % tile_rows, tile_rows, inputs);
    float* total = totals + m * 2 * kSide;
    store(total, add_span<kKind>(load(total), products, factors, inputs, has_shift));
  }
}

// At most T * R rows, P panels at a time.
template <class C, Inputs kKind, int R, int T, int P>
void multiply_step(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows, float* out) {
  constexpr int64_t kMostUnits = line_inputs(kKind) / C::kUnit;
  const auto multiply = [&](auto units) {
    for (int64_t p = 0; p < 2; p += P) {
      const int64_t first = std::min(panel + p, w.panels() - 1);
      StepProduct<C, kKind, decltype(units)::value, R, T, P>(w, first, x, rows).multiply(out + p * kSide);
    }
  };
  const int64_t units = x.span / C::kUnit;
  if (units == 1) return multiply(std::integral_constant<int, 1>{});
  if constexpr (kMostUnits >= 2) {
    if (units == 2) return multiply(std::integral_constant<int, 2>{});
  }
  if constexpr (kMostUnits >= 4) multiply(std::integral_constant<int, 4>{});
}

template <class C, Inputs kKind>
void multiply_blocks(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows, SpanRange spans,
                     float* out) {
  if constexpr (kKind == Inputs::kInt12) {
    if (w.middle == 0) return BlockProduct<C, kKind, true>(w, panel, x, rows).multiply(spans, out);
  } else if (is_split(kKind, x.tile_rows)) {
    if constexpr (C::kUnit < kSplitSpan) {
      if (x.span < kSplitSpan) return SplitProduct<C, 1>(w, panel, x, rows).multiply(spans, out);
    }
    return SplitProduct<C, 2>(w, panel, x, rows).multiply(spans, out);
  }
  BlockProduct<C, kKind, false>(w, panel, x, rows).multiply(spans, out);
}

// With spans of a single step.
template <class C, Inputs kKind>
void multiply_short(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows, SpanRange spans,
                    float* out) {
  if (rows > kSide || is_split(kKind, x.tile_rows)) {
    return multiply_blocks<C, kKind>(w, panel, x, rows, spans, out);
  }
  if (rows <= kSide / 2) return multiply_step<C, kKind, kSide / 2, 1, 2>(w, panel, x, rows, out);
  constexpr int T = kKind == Inputs::kInt16 ? 2 : 1;
  multiply_step<C, kKind, kSide / T, T, 1>(w, panel, x, rows, out);
}

// With spans of several steps, T tiles of rows at a time.
template <class C, Inputs kKind, int T>
void multiply_long(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows, float* out) {
  static thread_local Scratch scratch;
  const int64_t panel_bytes = w.inputs * kSide * element_bytes(x);
  const int64_t panels[2] = {panel, std::min(panel + 1, w.panels() - 1)};
  const uint8_t* codes[2];
  for (int64_t half = 0; half < 2; ++half) {
    codes[half] = w.codes + panels[half] * w.panel_bytes();
    if constexpr (!kAreTiles<C, kKind>) {
      auto* unpacked = scratch.get<uint8_t>(2 * panel_bytes) + half * panel_bytes;
      unpack<C, kKind>(w, codes[half], w.inputs, unpacked);
      codes[half] = unpacked;
    }
  }
  constexpr bool kWide = kKind == Inputs::kInt16, kPaired = kKind == Inputs::kInt12;
  const int64_t spans = w.inputs / x.span, span_bytes = x.span * element_bytes(x);
  const int64_t row_bytes = x.stride * (kPaired ? 1 : element_bytes(x)), depth = depth_bytes(x);
  const int64_t stride = kWide || kPaired ? kLineBytes : row_bytes;
  const int64_t side = kWide ? x.tile_rows : kSide;
  const int64_t next = kWide || kPaired ? tile_lines_of(kKind, x.tile_rows) * kLineBytes : depth;
  std::fill(out, out + rows * 2 * kSide, 0.0f);
  TileSums<2 * T> sums[2];
  // Wide inputs are long rows of few spans: a span's weights stay in the first cache.
  const int64_t block = T * side;
  const int64_t blocks = (rows + block - 1) / block, parts = blocks * spans;
  const auto row_of = [&](int64_t part) { return (kWide ? part % blocks : part / spans) * block; };
  const auto span_of = [&](int64_t part) { return kWide ? part / blocks : part % spans; };
  // The only pass over codes fetches what is near behind them, at the end of the panels the next two.
  constexpr int64_t kNearBytes = 4096;
  const bool fetches = kAreTiles<C, kKind> && blocks == 1;
  // The tiles of a part run beside what is left to do for the part before.
  for (int64_t part = 0; part <= parts; ++part) {
    if (part < parts) {
      const int64_t row = row_of(part), at = span_of(part) * span_bytes;
      const int64_t from = kWide || kPaired ? at / kLineBytes * next + at % kLineBytes : at;
      const uint8_t* inputs[T];
      inputs[0] = static_cast<const uint8_t*>(x.inputs) + row * row_bytes + from;
      if constexpr (T == 2) inputs[1] = inputs[0] + (row + side < rows ? side * row_bytes : 0);
      const uint8_t* const of[2] = {codes[0] + at * kSide, codes[1] + at * kSide};
      const auto fetch = [&](int64_t done, int64_t count) {
        if (!fetches) return;
        const int64_t near = at * kSide + done + kNearBytes;
        const uint8_t* ahead = codes[0] + near + (near < w.panel_bytes() ? 0 : w.panel_bytes());
        for (int64_t i = 0; i < count; i += 64, ahead += 64) {
          __builtin_prefetch(ahead);
          __builtin_prefetch(ahead + w.panel_bytes());
        }
      };
      multiply_tiles<C, kKind, T>(inputs, stride, next, of, span_bytes / depth, depth, fetch,
                                  sums[part % 2]);
    }
    for (int64_t half = 0; half < 2 && part > 0; ++half) {
      const int64_t row = row_of(part - 1), span = span_of(part - 1);
      add_products<C, kKind>(sums[(part - 1) % 2], side, half, std::min(block, rows - row),
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

template <class C, Inputs kKind>
void multiply(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows, SpanRange spans,
              float* out) {
  if constexpr (is_wide(kKind)) {
    if (has_short_spans(w, x)) {
      return multiply_short<C, kKind>(w, panel, x, rows, spans, out);
    }
    if (rows <= x.tile_rows) return multiply_long<C, kKind, 1>(w, panel, x, rows, out);
  }
  multiply_long<C, kKind, 2>(w, panel, x, rows, out);
}

template <class C>
void multiply(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows, SpanRange spans,
              float* out) {
  switch (x.kind) {
    case Inputs::kNumbers: return multiply<C, Inputs::kNumbers>(w, panel, x, rows, spans, out);
    case Inputs::kInt8: return multiply<C, Inputs::kInt8>(w, panel, x, rows, spans, out);
    case Inputs::kInt16:
      if constexpr (!std::is_same_v<C, Codes<4>>) {
        return multiply<C, Inputs::kInt16>(w, panel, x, rows, spans, out);
      }
      std::abort();  // with 4 bits they have 12
    case Inputs::kInt12: return multiply<Codes<4>, Inputs::kInt12>(w, panel, x, rows, spans, out);
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
    config.rows[i] = i < 6 ? tile_lines_of(x.kind, x.tile_rows) : depth / 4;
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

void end_tiles() { _tile_release(); }

void multiply_two_panels(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows,
                         SpanRange spans, float* out) {
  switch (w.bits) {
    case 4: return multiply<Codes<4>>(w, panel, x, rows, spans, out);
    case 6: return multiply<Codes<6>>(w, panel, x, rows, spans, out);
    default: return multiply<Codes<8>>(w, panel, x, rows, spans, out);
  }
}

}  // namespace atom

#else

#include <cstdlib>

namespace atom {

bool has_tiles() { return false; }
void begin_tiles(const QuantRows&) {}
void end_tiles() {}
void multiply_two_panels(const QuantMatrix&, int64_t, const QuantRows&, int64_t, SpanRange, float*) {
  std::abort();
}

}  // namespace atom

#endif
