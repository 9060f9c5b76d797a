// Rows of quantised weights as numbers.
#include "parallel.h"
#include "quant/unpack.h"

namespace atom {
namespace {

struct QuantEmbeddingArgs {
  const int64_t* ids;           // [count]
  const uint8_t* codes;         // as in QuantMatrix
  const void* scale;
  const void* shift;
  const float16* super_scale;
  const float16* super_offset;
  const int32_t* order;         // column i is element order[i] of a row; or null
  void* out;                    // [count, in_features]
  int64_t count, in_features, inputs, outs;
  int64_t bits, middle, group, super_group;
  Number scale_type, shift_type;
  int64_t has_offsets, span;
  Inputs input_kind;
  int64_t input_group;
  int64_t threads;
};

// Numbers below which waking other threads costs more than it saves.
constexpr int64_t kSerialNumbers = 1 << 14;

// Quad j of one lane, as `Codes` has those of all.
template <class C>
uint32_t quad_of_lane(const uint8_t* unit, int64_t j, int64_t lane) {
  const auto at = [&](int64_t vector) { return raw<uint32_t>(unit + vector * kQuadBytes + 4 * lane); };
  if (C::kFillsByte) return at(j);
  const uint32_t low = at(j / 2) >> (4 * (j % 2)) & 0x0f0f0f0fu;
  if (C::kBytes == C::kQuads / 2 * kQuadBytes) return low;
  return low | (at(C::kQuads / 2) >> (2 * j) & 0x03030303u) << 4;
}

// out [in_features] = row `row` of the weights.
template <class C>
void read_row(const QuantMatrix& w, const QuantEmbeddingArgs& a, int64_t row, float* out) {
  const int64_t panel = row / kLanes, lane = row % kLanes;
  const uint8_t* codes = w.codes + panel * w.panel_bytes();
  const auto code_of = [&](int64_t i) {
    if (a.input_kind == Inputs::kBfloat16) {
      return unit_code(codes + i / kUnitInputs * unit_bytes(w.bits), w.bits, lane, i % kUnitInputs);
    }
    const uint32_t quad = quad_of_lane<C>(codes + i / C::kUnit * C::kBytes, i % C::kUnit / 4, lane);
    return quad >> (8 * (i % 4)) & 0xff;
  };
  for (int64_t first = 0; first < a.in_features; first += C::kUnit) {
    const Factors factors = load_factors(w, panel, first);
    const float scale = factors.scale[lane], shift = factors.shift[lane];
    for (int64_t i = 0; i < C::kUnit && first + i < a.in_features; ++i) {
      const float code = float(int64_t(code_of(first + i)) - a.middle);
      const int64_t column = a.order == nullptr ? first + i : a.order[first + i];
      out[column] = a.has_offsets ? code * scale + shift : (code - shift) * scale;
    }
  }
}

template <class T>
int64_t quant_embedding(const QuantEmbeddingArgs& a) {
  const auto groups = [&](int64_t size) { return size == 0 ? 0 : (a.in_features + size - 1) / size; };
  const QuantMatrix w{a.codes,       a.scale,         a.shift,      a.super_scale, a.super_offset,
                      a.bits,        a.inputs,        a.outs,       a.middle,      a.group,
                      groups(a.group), a.super_group, groups(a.super_group),
                      a.scale_type,  a.shift_type,    a.has_offsets};
  for (int64_t i = 0; i < a.count; ++i) {
    if (a.ids[i] < 0 || a.ids[i] >= a.outs) return 1 + i;
  }
  const bool serial = a.count * a.in_features < kSerialNumbers;
  run_shares(a.count, serial ? 1 : a.threads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* numbers = scratch.get<float>(a.in_features + kLanes);
    for (int64_t i = begin; i < end; ++i) {
      switch (a.bits) {
        case 4: read_row<Codes<4>>(w, a, a.ids[i], numbers); break;
        case 6: read_row<Codes<6>>(w, a, a.ids[i], numbers); break;
        default: read_row<Codes<8>>(w, a, a.ids[i], numbers);
      }
      T* out = static_cast<T*>(a.out) + i * a.in_features;
      for (int64_t j = 0; j < a.in_features; j += kLanes) {
        store_some(out + j, load(numbers + j), a.in_features - j);
      }
    }
  });
  return 0;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_quant_embedding_float32(const atom::QuantEmbeddingArgs* args) {
  return atom::quant_embedding<float>(*args);
}
ATOM_EXPORT int64_t atom_quant_embedding_bfloat16(const atom::QuantEmbeddingArgs* args) {
  return atom::quant_embedding<atom::bfloat16>(*args);
}
#if defined(__F16C__) || defined(__aarch64__)
ATOM_EXPORT int64_t atom_quant_embedding_float16(const atom::QuantEmbeddingArgs* args) {
  return atom::quant_embedding<atom::float16>(*args);
}
#endif
