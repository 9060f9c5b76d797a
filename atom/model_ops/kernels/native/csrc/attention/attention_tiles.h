// Paged attention by tiles of bfloat16 (amx.h), however few the queries.
//
// Keys are read as they lie, 16 to a tile, so scores come out a row per key and a column per query:
// the softmax needs no sums across a vector. Weights are rounded to bfloat16, transposed in pairs of
// keys, and multiply the values, of which pairs of keys are interleaved first.
#pragma once

#include "amx.h"
#include "attention/attention.h"

#if defined(ATOM_AMX)

namespace atom {

using amx::kDepth;
using amx::kSide;

// The steps of one thread on one unit after the other.
class Tiles {
 public:
  using Value = bfloat16;
  static constexpr int64_t kStep = kDepth;

  // Several KV heads are taken at once if all their rows fit in one tile.
  static constexpr int64_t kUnitRows = 192, kSharedRows = kSide;

  // Floats that `Tiles` needs, at an address that is a multiple of 64.
  static int64_t size(int64_t rows, int64_t head_dim) {
    const int64_t padded = round_up(rows, kSide), heads = std::min(rows, kSide);
    return kChunk * kSide + kSide * head_dim + kChunk * head_dim + padded * kChunk / 2 +
           6 * padded + head_dim / 2 + std::max(padded, heads * kSide) * head_dim / 2;
  }

  Tiles(const AttentionArgs& args, float* memory, const Unit& unit_, int64_t head_dim_)
      : a(args), unit(unit_), head_dim(head_dim_), session(config()) {
    const int64_t padded = round_up(unit.rows, kSide);
    scores = memory;
    sums = scores + kChunk * kSide;
    pairs = reinterpret_cast<uint32_t*>(sums + kSide * head_dim);
    rows_memory = reinterpret_cast<bfloat16*>(pairs + kChunk / 2 * head_dim);
    weights = rows_memory + kChunk * head_dim;
    peak = reinterpret_cast<float*>(weights + padded * kChunk);
    total = peak + padded;
    keep = total + padded;
    admit = keep + padded;
    queries = reinterpret_cast<int32_t*>(admit + padded);
    zeros = reinterpret_cast<bfloat16*>(queries + padded);
    std::memset(static_cast<void*>(zeros), 0, head_dim * sizeof(bfloat16));
    q = reinterpret_cast<uint32_t*>(zeros + head_dim);
    in_place = !a.is_fp8() && a.head_dim == head_dim;
    // Many rows read keys many times: beside each other, they do not evict each other.
    keys_in_place = in_place && unit.rows <= kSide && a.block_size % kSide == 0;
    // Columns without a row are computed, too, and numbers below the least normal one are slow.
    if (unit.rows < kSide) std::fill(scores, scores + kChunk * kSide, 0.0f);
    pack_queries();
  }

  void attend(const Chunk& chunk, const Chunk& next, State& state) const {
    const bfloat16* keys[kChunk];
    const int64_t bytes = unit.kv_heads * a.head_bytes(sizeof(bfloat16));
    Fetcher next_keys(next.key, bytes, head_tiles() * unit.kv_heads * kChunk / kDepth);
    for (int64_t row = 0; row < unit.rows; row += kSide) {
      for (int64_t h = 0; h < unit.kv_heads; ++h) {
        if (row == 0) {
          unpack(a, chunk.key, h, chunk, keys_in_place, head_dim, rows_memory, keys);
        }
        score(chunk, keys, q + (h * head_tiles() * kSide + row) * head_dim / 2,
              scores + h * unit.head_rows, next_keys);
      }
      if (a.softcap > 0) cap_scores(a, scores, kChunk * kSide);
      soften(chunk, row);
    }
    join_peaks(peak, total, unit.rows, keep, admit, state);
    Fetcher next_values(next.value, bytes, unit.kv_heads * kChunk / 2);
    for (int64_t h = 0; h < unit.kv_heads; ++h) {
      pack_values(chunk, h, next_values);
      for (int64_t r = 0; r < unit.head_rows; r += kSide) {
        weigh_values(chunk, h * unit.head_rows + r, std::min(kSide, unit.head_rows - r), state);
      }
    }
  }

  void merge(const State& part, State& state) const {
    join_peaks(part.peak, part.total, unit.rows, keep, admit, state);
    join(part.acc, 0, unit.rows, state);
  }

 private:
  int64_t head_tiles() const { return (unit.head_rows + kSide - 1) / kSide; }
  int64_t tile_rows() const { return std::min(kSide, unit.head_rows); }

  // Tiles 0 to 3 are of scores: two sums, queries, keys. 4 to 7 are of the output: two sums,
  // weights, values. Both are as narrow as the unit has rows.
  amx::Config config() const {
    amx::Config config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = uint16_t(i < 3 ? 4 * tile_rows() : amx::kRowBytes);
      config.rows[i] = uint8_t(i >= 4 && i < 7 ? tile_rows() : kSide);
    }
    return config;
  }

  // q[head][tile of rows][pair of elements][row], and each row's query.
  void pack_queries() const {
    const int64_t group = a.group(), pairs_used = a.head_dim / 2;
    std::memset(q, 0, unit.kv_heads * head_tiles() * kSide * head_dim / 2 * sizeof(uint32_t));
    std::fill(queries, queries + round_up(unit.rows, kSide), 0);
    for (int64_t r = 0; r < unit.rows; ++r) {
      const int64_t h = r / unit.head_rows, within = r % unit.head_rows, query = within / group;
      const bfloat16* from = static_cast<const bfloat16*>(a.q) +
                             (unit.first_token + query) * a.q_stride +
                             ((unit.first_kv_head + h) * group + within % group) * a.head_dim;
      uint32_t* to = q + (h * head_tiles() + within / kSide) * kSide * head_dim / 2 +
                     within % kSide;
      for (int64_t p = 0; p < pairs_used; ++p) to[p * kSide] = raw<uint32_t>(from + 2 * p);
      if (a.head_dim % 2 != 0) to[pairs_used * kSide] = from[2 * pairs_used].bits;
      queries[r] = int32_t(query);
    }
  }

  // Where a tile's keys begin, or null if none of them is in use. Keys of a tile that are not may
  // hold anything.
  const bfloat16* tile_of(const bfloat16* const* keys, const Chunk& chunk, int64_t first,
                          int64_t stride) const {
    const int64_t used = std::max(first, chunk.begin);
    if (used >= std::min(first + kSide, chunk.end)) return nullptr;
    return keys[used] - (used - first) * stride;
  }

  // out[key][row] for up to 16 rows, 32 keys at a time.
  void score(const Chunk& chunk, const bfloat16* const* keys, const uint32_t* x, float* out,
             Fetcher& next) const {
    const int64_t stride = keys_in_place ? a.kv_heads * head_dim : head_dim;
    for (int64_t i = chunk.begin / kDepth * kDepth; i < chunk.end; i += kDepth) {
      const bfloat16* first = tile_of(keys, chunk, i, stride);
      const bfloat16* second = tile_of(keys, chunk, i + kSide, stride);
      if (first == nullptr) first = second;
      if (second == nullptr) second = first;
      next.step();
      amx::zero<0>();
      amx::zero<1>();
      for (int64_t d = 0; d < head_dim; d += kDepth) {
        amx::load<2>(x + d / 2 * kSide, 64);
        amx::load<3>(first + d, stride * sizeof(bfloat16));
        amx::multiply_add<0, 3, 2>();
        amx::load<3>(second + d, stride * sizeof(bfloat16));
        amx::multiply_add<1, 3, 2>();
      }
      amx::store<0>(out + i * kSide, 64);
      amx::store<1>(out + (i + kSide) * kSide, 64);
    }
  }

  // Scores of a tile of rows become weights[row][key]: 2^(scale * score - peak), 0 where a key is not
  // seen. What a row gets depends on its own scores only.
  void soften(const Chunk& chunk, int64_t row) const {
    const int64_t from = chunk.begin / kDepth * kDepth, stop = round_up(chunk.end, kDepth);
    const vint position = raw<vint>(queries + row) +
                          int32_t(unit.first_position - chunk.first_position);
    const int64_t first = unit.first_position - chunk.first_position;
    const int64_t oldest = a.window > 0 ? first + unit.queries - a.window : 0;
    if (from < std::max(chunk.begin, oldest) || stop > first + 1) {
      for (int64_t i = from; i < stop; ++i) {
        const bool in_use = i >= chunk.begin && i < chunk.end;
        vint seen = ((position >= int32_t(i)) | -int32_t(!a.causal)) & -int32_t(in_use);
        if (a.window > 0) seen &= position < int32_t(std::min(i + a.window, int64_t{INT32_MAX}));
        store(scores + i * kSide, select(seen, load(scores + i * kSide), splat(kNothing)));
      }
    }
    const vfloat scale = splat(a.exponent_scale());
    vfloat most[4] = {splat(kNothing), splat(kNothing), splat(kNothing), splat(kNothing)};
    for (int64_t i = from; i < stop; i += 4) {
      ATOM_UNROLL for (int j = 0; j < 4; ++j)
          most[j] = max(load(scores + (i + j) * kSide), most[j]);
    }
    const vfloat top = max(max(most[0], most[1]), max(most[2], most[3])) * scale;
    store(peak + row, top);
    // Where nothing is seen every exponent is -infinity, not NaN.
    const vfloat shift = select(top == splat(kNothing), vfloat{}, top);
    vfloat sums_of[4] = {};
    for (int64_t i = from; i < stop; i += kDepth) {
      __m512i packed[kSide];
      for (int64_t j = 0; j < kSide; j += 2) {
        vuint bits[4];
        ATOM_UNROLL for (int n = 0; n < 4; ++n) {
          const vfloat p = exp2(fma(load(scores + (i + 2 * j + n) * kSide), scale, -shift));
          sums_of[n] += p;
          bits[n] = (vuint)p + 0x8000u;
        }
        packed[j] = (__m512i)(bits[0] >> 16 | (bits[1] & 0xffff0000u));
        packed[j + 1] = (__m512i)(bits[2] >> 16 | (bits[3] & 0xffff0000u));
      }
      bfloat16* out = weights + row * kChunk + i;
      transpose(packed);
      ATOM_UNROLL for (int r = 0; r < kSide; ++r) _mm512_storeu_si512(out + r * kChunk, packed[r]);
    }
    store(total + row, (sums_of[0] + sums_of[1]) + (sums_of[2] + sums_of[3]));
  }

  static void store_bits(uint32_t* to, vuint bits) { std::memcpy(to, &bits, sizeof bits); }

  // pairs[key / 2][element]: two keys' values beside each other; of 32 elements first the even, then
  // the odd ones. Values that are not in use are 0.
  void pack_values(const Chunk& chunk, int64_t head, Fetcher& next) const {
    const bfloat16* values[kChunk];
    unpack(a, chunk.value, head, chunk, in_place, head_dim, rows_memory, values);
    const int64_t from = chunk.begin / kDepth * kDepth, stop = round_up(chunk.end, kDepth);
    for (int64_t i = from; i < chunk.begin; ++i) values[i] = zeros;
    for (int64_t i = chunk.end; i < stop; ++i) values[i] = zeros;
    for (int64_t i = from; i < stop; i += 2) {
      const bfloat16 *first = values[i], *second = values[i + 1];
      uint32_t* to = pairs + i / 2 * head_dim;
      next.step();
      for (int64_t d = 0; d < head_dim; d += kDepth) {
        const vuint low = raw<vuint>(first + d), high = raw<vuint>(second + d);
        store_bits(to + d, (low & 0xffffu) | high << 16);
        store_bits(to + d + kSide, low >> 16 | (high & 0xffff0000u));
      }
    }
  }

  // Adds the weighted values to `count` rows of the state.
  void weigh_values(const Chunk& chunk, int64_t row, int64_t count, State& state) const {
    const bfloat16* from = weights + row * kChunk;
    for (int64_t d = 0; d < head_dim; d += kDepth) {
      amx::zero<4>();
      amx::zero<5>();
      for (int64_t i = chunk.begin / kDepth * kDepth; i < chunk.end; i += kDepth) {
        const uint32_t* values = pairs + i / 2 * head_dim + d;
        amx::load<6>(from + i, kChunk * sizeof(bfloat16));
        amx::load<7>(values, head_dim * sizeof(uint32_t));
        amx::multiply_add<4, 6, 7>();
        amx::load<7>(values + kSide, head_dim * sizeof(uint32_t));
        amx::multiply_add<5, 6, 7>();
      }
      amx::store<4>(sums + d, head_dim * sizeof(float));
      amx::store<5>(sums + d + kSide, head_dim * sizeof(float));
    }
    join(sums, row, count, state);
  }

  // Adds `count` rows to the state, the first of which is `row`.
  void join(const float* part, int64_t row, int64_t count, State& state) const {
    for (int64_t r = 0; r < count; ++r) {
      join_row(part + r * head_dim, admit[row + r], keep[row + r], head_dim,
               state.acc + (row + r) * head_dim);
    }
  }

  const AttentionArgs& a;
  const Unit& unit;
  const int64_t head_dim;    // a multiple of kStep; elements beyond the real ones are 0
  const amx::Session session;
  bool in_place, keys_in_place;
  float* scores;             // [kChunk, 16]
  float* sums;               // [16, head_dim]
  uint32_t* pairs;           // [kChunk / 2, head_dim]
  bfloat16* rows_memory;     // [kChunk, head_dim]
  bfloat16* weights;         // [rows, kChunk]
  float *peak, *total;       // [rows] of the chunk
  float *keep, *admit;       // [rows] factors of the state and of the chunk
  int32_t* queries;          // [rows]
  bfloat16* zeros;           // [head_dim]
  uint32_t* q;
};

}  // namespace atom
#endif
