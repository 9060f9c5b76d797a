// Packs codes of quantised weights into panels: see quant/codes.h.
#include "parallel.h"
#include "quant/unpack.h"

namespace atom {
namespace {

struct QuantPackArgs {
  const uint8_t* codes;  // [outs, bits * in_features / 8], as `QuantWeights` has them
  uint8_t* out;          // [panels, bits * inputs * kLanes / 8]
  int64_t outs, in_features, inputs, bits;
  int64_t in_units;      // whether the layout is that of quant/unpack.h
  int64_t threads;
};

// Eight codes of four bits, neighbours in a byte -> quad 0 in the low four bits, quad 1 in the high.
uint32_t two_quads(uint32_t codes) {
  const uint32_t even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
  const uint32_t a = even | even >> 12, b = odd | odd >> 12;
  return (a & 0xff) | (b & 0xff) << 8 | (a & 0xff00) << 8 | (b & 0xff00) << 16;
}

// Byte j has two bits of each code of quad j -> byte i has those of code i of each quad.
uint32_t transpose_pairs(uint32_t codes) {
  uint32_t out = 0;
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 4; ++i) out |= (codes >> (8 * j + 2 * i) & 3) << (8 * i + 2 * j);
  }
  return out;
}

// One row as output `out` of a panel's units, where no codes were.
void add_row(const uint8_t* row, const uint8_t* high, int64_t inputs, int64_t bits, int64_t out,
             uint8_t* panel) {
  for (int64_t i = 0; i < inputs; ++i) {
    uint32_t code = bits == 8 ? row[i] ^ 0x80u : row[i / 2] >> (4 * (i % 2)) & 15;
    if (bits == 6) code |= (high[i / 4] >> (2 * (i % 4)) & 3) << 4;
    add_unit_code(panel + i / kUnitInputs * unit_bytes(bits), bits, out, i % kUnitInputs, code);
  }
}

// One row into its lane of a panel. `row` is filled up with zeros; the high bits of 6 begin at `high`.
void pack_row(const uint8_t* row, const uint8_t* high, int64_t inputs, int64_t bits, uint8_t* lane) {
  const auto put = [&](int64_t vector, uint32_t quad) {
    std::memcpy(lane + vector * kQuadBytes, &quad, sizeof quad);
  };
  if (bits == 8) {
    for (int64_t j = 0; j < inputs / 4; ++j) put(j, raw<uint32_t>(row + 4 * j) ^ 0x80808080u);
  } else if (bits == 4) {
    for (int64_t j = 0; j < inputs / 8; ++j) put(j, two_quads(raw<uint32_t>(row + 4 * j)));
  } else {
    for (int64_t unit = 0; unit < inputs / 16; ++unit) {
      put(3 * unit, two_quads(raw<uint32_t>(row + 8 * unit)));
      put(3 * unit + 1, two_quads(raw<uint32_t>(row + 8 * unit + 4)));
      put(3 * unit + 2, transpose_pairs(raw<uint32_t>(high + 4 * unit)));
    }
  }
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_quant_pack(const atom::QuantPackArgs* args) {
  using namespace atom;
  const QuantPackArgs& a = *args;
  const int64_t panels = (a.outs + kLanes - 1) / kLanes, bytes = a.bits * a.in_features / 8;
  const int64_t low_bits = a.bits == 6 ? 4 : a.bits;
  const int64_t low = low_bits * a.in_features / 8, high_at = low_bits * a.inputs / 8;
  const int64_t panel_bytes = a.bits * a.inputs * kLanes / 8;
  run_shares(panels, a.threads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    auto* row = scratch.get<uint8_t>(a.inputs);
    std::memset(row, 0, a.inputs);
    for (int64_t i = begin * kLanes; i < end * kLanes; ++i) {
      uint8_t* panel = a.out + i / kLanes * panel_bytes;
      if (a.in_units && i % kLanes == 0) std::memset(panel, 0, panel_bytes);
      if (i < a.outs) {
        std::memcpy(row, a.codes + i * bytes, low);
        std::memcpy(row + high_at, a.codes + i * bytes + low, bytes - low);
      } else {
        std::memset(row, 0, a.inputs);
      }
      if (a.in_units) add_row(row, row + high_at, a.inputs, a.bits, i % kLanes, panel);
      else pack_row(row, row + high_at, a.inputs, a.bits, panel + 4 * (i % kLanes));
    }
  });
  return 0;
}
