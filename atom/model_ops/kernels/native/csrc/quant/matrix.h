// Quantised weights and inputs as products read them, and these products.
//
// Every output has one sum. Over a span of inputs that share their scales the products of codes are
// added up first: exactly where inputs are integers, else in the order of the processors' tiles
// of bfloat16. Spans follow each other in order. So a row has the same results in every batch.
#pragma once

#include "simd.h"

namespace atom {

enum class Number : int64_t { kFloat32, kBfloat16, kFloat16, kInt8 };

inline int64_t bytes_of(Number type) {
  return type == Number::kFloat32 ? 4 : type == Number::kInt8 ? 1 : 2;
}

// What inputs are: numbers, codes of -127..127 or wide ones, or bfloat16, whose weights become bfloat16
// as well and have the layout of quant/unpack.h. kInt12 is for weights of 4 bits.
enum class Inputs : int64_t { kNumbers, kInt8, kInt16, kBfloat16, kInt12 };

constexpr bool is_wide(Inputs kind) { return kind == Inputs::kInt16 || kind == Inputs::kInt12; }
// Where only two products of bytes are added at once, into 16 bits, two rows of 12-bit inputs are three
// bytes for each two inputs: see `PairedCodes` in quant/wide.h.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
constexpr bool kPairsRows = true;
#else
constexpr bool kPairsRows = false;
#endif
constexpr bool is_paired(Inputs kind) { return kPairsRows && kind == Inputs::kInt12; }
// Whether all inputs of a row have one scale, which a row's results are multiplied with at the end.
constexpr bool scales_row(Inputs kind) { return kind != Inputs::kInt8; }
// Low bits of a wide code, with a sign; those above fit into a byte as well.
constexpr int low_bits(Inputs kind) { return kind == Inputs::kInt12 ? 4 : 8; }
// The largest code; of 12 bits it is what `PairedCodes` have room for.
constexpr int32_t limit_of(Inputs kind) {
  return kind == Inputs::kInt16 ? 16383 : kind == Inputs::kInt12 ? 1904 : 127;
}
// Wide inputs in a line of 64 bytes of a tile. Those of 12 bits are there with both their bytes: the
// products of high ones are with 16 times a code of weights, and so all sums are one.
constexpr int64_t line_inputs(Inputs kind) { return kind == Inputs::kInt12 ? 32 : 64; }

// Which group of `size` inputs an input is in. Dividing 64 bits takes twice as long.
inline int64_t group_of(int64_t input, int64_t size) { return uint32_t(input) / uint32_t(size); }

constexpr int64_t kTileSide = 16;  // rows of a tile: outputs of a panel, and of inputs

// Spans of kInt16 that are split into two bfloat16 where rows are many: see quant/split_tiles.h. Fewer are
// done before their weights have become bfloat16.
constexpr int64_t kSplitSpan = 32, kSplitRows = 48;

// Rows of inputs that a tile holds where a product has so many, `span` of `inputs` inputs sharing their
// scales. Of kInt16 it has the high bytes of each and then the low ones, unless they are split.
inline int64_t tile_rows_of(Inputs kind, int64_t span, int64_t inputs, int64_t rows) {
  const bool splits = span <= kSplitSpan && span < inputs && rows >= kSplitRows;
  const int64_t most = kind == Inputs::kInt16 && !splits ? kTileSide / 2 : kTileSide;
  return rows < most ? rows : most;
}
constexpr bool is_split(Inputs kind, int64_t tile_rows) {
  return kind == Inputs::kInt16 && tile_rows == kTileSide;
}
// Rows of its bytes.
inline int64_t tile_lines_of(Inputs kind, int64_t tile_rows) {
  return kind == Inputs::kInt16 && !is_split(kind, tile_rows) ? 2 * tile_rows : tile_rows;
}

// The sum of so many products of kInt16 with bytes is within 32 bits.
constexpr int64_t kMostWide = 1024;

// W = (q - middle - zero) * scale + offset, where a zero or an offset may be missing. Per panel:
// units of codes; of each group of inputs kLanes scales and shifts (zeros or offsets).
struct QuantMatrix {
  const uint8_t* codes;         // [panels, inputs / kUnit, C::kBytes]
  const void* scale;            // [panels, groups, kLanes]
  const void* shift;            // alike, or null
  const float16* super_scale;   // [panels, super groups, kLanes], or null: factors of scales
  const float16* super_offset;  // of offsets
  int64_t bits, inputs, outs, middle;
  int64_t group, groups, super_group, super_groups;
  Number scale_type, shift_type;
  int64_t has_offsets;  // whether shifts are offsets

  bool has_shift() const { return shift != nullptr; }
  int64_t panels() const { return (outs + kLanes - 1) / kLanes; }
  int64_t panel_bytes() const { return bits * inputs * kLanes / 8; }
};

// Of a row's span of inputs: the scale of its codes, the sum of its inputs (of its codes, where a row
// has one scale), and what to begin with: the sum of codes times what those of weights are too large by.
struct Span {
  float scale, sum;
  union {
    int32_t first_code;
    float first;
  };
};

// Inputs as products want them.
struct QuantRows {
  // [rows, stride]: int8; float, where tiles read bfloat16; wide codes as quant/wide.h says.
  const void* inputs;
  const Span* spans;    // [rows, inputs / span]
  const float* sums;    // those of spans, [tiles of rows, inputs / span, tile_rows]; wide inputs in tiles
  int64_t stride;       // in elements; those of wide codes are bytes
  int64_t span;         // inputs that share their scales on both sides
  Inputs kind;
  int64_t tile_rows;    // of inputs in a tile; 0 for vectors
};

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kManyRegisters = true;  // 32 vectors
#else
constexpr bool kManyRegisters = false;
#endif
// Panels that vectors multiply with so many rows at once: two, so that inputs are loaded half as
// often, where registers are many, rows are, or inputs are twice as long. Numbers fill registers with one.
inline int64_t panels_together(Inputs kind, int64_t rows) {
  if (kind == Inputs::kNumbers) return 1;
  return kManyRegisters || is_paired(kind) || kind == Inputs::kInt16 || rows >= 8 ? 2 : 1;
}

// out [count, panels, kLanes] = `panels` panels of the weights from `panel` on, at most as many as
// are multiplied together, times `count` rows.
void multiply_panels(const QuantMatrix& w, int64_t panel, int64_t panels, const QuantRows& x,
                     int64_t count, float* out);

}  // namespace atom
