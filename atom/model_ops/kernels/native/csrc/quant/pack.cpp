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

// Bytes `at` to `at` + 4 of each row of a panel, `stride` apart.
ATOM_INLINE vuint words(const uint8_t* rows, int64_t stride, int64_t at) {
  vuint out;
  ATOM_UNROLL for (int i = 0; i < kLanes; ++i) out[i] = raw<uint32_t>(rows + i * stride + at);
  return out;
}

// Eight codes of four bits, neighbours in a byte -> quad 0 in the low four bits, quad 1 in the high.
ATOM_INLINE vuint two_quads(vuint codes) {
  const vuint even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
  const vuint a = even | even >> 12, b = odd | odd >> 12;
  return (a & 0xff) | (b & 0xff) << 8 | (a & 0xff00) << 8 | (b & 0xff00) << 16;
}

// Byte j has two bits of each code of quad j -> byte i has those of code i of each quad.
ATOM_INLINE vuint transpose_pairs(vuint codes) {
  vuint out{};
  ATOM_UNROLL for (int j = 0; j < 4; ++j) {
    ATOM_UNROLL for (int i = 0; i < 4; ++i) {
      out |= (codes >> (8 * j + 2 * i) & 3) << (8 * i + 2 * j);
    }
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

// The rows of a panel, filled up with zeros; the high bits of 6 begin at byte `high`.
void pack_rows(const uint8_t* rows, int64_t stride, int64_t high, int64_t inputs, int64_t bits,
               uint8_t* panel) {
  const auto put = [&](int64_t vector, vuint quads) {
    std::memcpy(panel + vector * kQuadBytes, &quads, sizeof quads);
  };
  const auto at = [&](int64_t byte) { return words(rows, stride, byte); };
  if (bits == 8) {
    for (int64_t j = 0; j < inputs / 4; ++j) put(j, at(4 * j) ^ 0x80808080u);
  } else if (bits == 4) {
    for (int64_t j = 0; j < inputs / 8; ++j) put(j, two_quads(at(4 * j)));
  } else {
    for (int64_t unit = 0; unit < inputs / 16; ++unit) {
      put(3 * unit, two_quads(at(8 * unit)));
      put(3 * unit + 1, two_quads(at(8 * unit + 4)));
      put(3 * unit + 2, transpose_pairs(at(high + 4 * unit)));
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
    const int64_t stride = a.inputs + 64;  // in different lines of caches
    auto* rows = scratch.get<uint8_t>(kLanes * stride);
    std::memset(rows, 0, kLanes * stride);
    for (int64_t panel = begin; panel < end; ++panel) {
      uint8_t* to = a.out + panel * panel_bytes;
      if (a.in_units) std::memset(to, 0, panel_bytes);
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        uint8_t* row = rows + lane * stride;
        const int64_t i = panel * kLanes + lane;
        if (i < a.outs) {
          std::memcpy(row, a.codes + i * bytes, low);
          std::memcpy(row + high_at, a.codes + i * bytes + low, bytes - low);
        } else {
          std::memset(row, 0, a.inputs);
        }
        if (a.in_units) add_row(row, row + high_at, a.inputs, a.bits, lane, to);
      }
      if (!a.in_units) pack_rows(rows, stride, high_at, a.inputs, a.bits, to);
    }
  });
  return 0;
}
