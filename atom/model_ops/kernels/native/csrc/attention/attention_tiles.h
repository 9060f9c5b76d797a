// Paged attention by tiles of bfloat16 (amx.h), however few the queries.
//
// Keys are read as they lie, 16 to a tile, so scores come out a row per key and a column per query:
// the softmax needs no sums across a vector. Weights are rounded to bfloat16, transposed in pairs of
// keys that are 16 apart, and multiply the values, of which such pairs are interleaved first.
//
// Where twice a head's rows fit in a tile, values are read as they lie, too. A pair of a tile's
// numbers is then two elements of one value, and its weight is paired with 0: in one row for the
// first elements of all pairs, in another for the second. Half of the keys give what they add to a
// product of all, as the sum of the other half is 0 then; so the products of 32 keys have the same
// bits. Only that infinity or NaN in a value makes NaN of its neighbour, too. Values of keys that are
// not in use are replaced by 0 as well, whatever memory holds there. Values in FP8 are widened and
// interleaved.
#pragma once

#include "amx.h"
#include "attention/attention.h"

#if defined(ATOM_AMX)

namespace atom {

using amx::kDepth;
using amx::kSide;

constexpr int64_t kHalves = kChunk / kDepth;
// Numbers in a tile.
constexpr int64_t kTile = kSide * kDepth;

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
    return kChunk * kSide + kHalves * kSide * head_dim + kChunk * head_dim +
           std::max(padded * kChunk, 4 * kHalves * kTile) / 2 + 6 * padded + head_dim / 2 +
           std::max(padded, heads * kSide) * head_dim / 2;
  }

  Tiles(const AttentionArgs& args, float* memory, const Unit& unit_, int64_t head_dim_)
      : a(args),
        unit(unit_),
        head_dim(head_dim_),
        is_few(!args.is_fp8() && unit_.rows <= kSide && unit_.head_rows <= kSide / 2),
        session(config()) {
    const int64_t padded = round_up(unit.rows, kSide);
    scores = memory;
    sums = scores + kChunk * kSide;
    pairs = reinterpret_cast<uint32_t*>(sums + kHalves * kSide * head_dim);
    rows_memory = reinterpret_cast<bfloat16*>(pairs + kChunk / 2 * head_dim);
    weights = rows_memory + kChunk * head_dim;
    peak = reinterpret_cast<float*>(weights + std::max(padded * kChunk, 4 * kHalves * kTile));
    total = peak + padded;
    keep = total + padded;
    admit = keep + padded;
    queries = reinterpret_cast<int32_t*>(admit + padded);
    zeros = reinterpret_cast<bfloat16*>(queries + padded);
    std::memset(static_cast<void*>(zeros), 0, head_dim * sizeof(bfloat16));
    q = reinterpret_cast<uint32_t*>(zeros + head_dim);
    in_place = !a.is_fp8() && a.head_dim == head_dim;
    // Many rows read keys many times: beside each other, they do not evict each other.
    tiles_in_place = in_place && unit.rows <= kSide && a.block_size % kSide == 0;
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
          unpack(a, chunk.key, h, chunk, tiles_in_place, head_dim, rows_memory, keys);
        }
        score(chunk, keys, q + (h * head_tiles() * kSide + row) * head_dim / 2,
              scores + h * unit.head_rows, next_keys);
      }
      if (a.softcap > 0) cap_scores(a, scores, kChunk * kSide);
      soften(chunk, row);
    }
    join_peaks(peak, total, unit.rows, keep, admit, state);
    const int64_t visits = is_few ? 2 * kHalves * head_dim / kDepth : kChunk / 2;
    Fetcher next_values(next.value, bytes, unit.kv_heads * visits);
    for (int64_t h = 0; h < unit.kv_heads; ++h) {
      if (is_few) {
        weigh_lying(chunk, h, next_values, state);
        continue;
      }
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

  // Tiles 0 to 4 are of scores: keys of two tiles, queries, sums of both. 0, 1 and 5 to 7 are of the
  // output. Of few rows: values, weights of both, sums. Of many: values of even and odd elements,
  // weights, sums of both. All are as narrow as the unit has rows.
  amx::Config config() const {
    amx::Config config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = uint16_t(i >= 2 && i < 5 ? 4 * tile_rows() : amx::kRowBytes);
      config.rows[i] = uint8_t(i < 5 ? kSide : is_few ? 2 * unit.head_rows : tile_rows());
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
    const int64_t stride = tiles_in_place ? a.kv_heads * head_dim : head_dim;
    for (int64_t i = chunk.begin / kDepth * kDepth; i < chunk.end; i += kDepth) {
      const bfloat16* first = tile_of(keys, chunk, i, stride);
      const bfloat16* second = tile_of(keys, chunk, i + kSide, stride);
      if (first == nullptr) first = second;
      if (second == nullptr) second = first;
      next.step();
      amx::zero<3>();
      amx::zero<4>();
      for (int64_t d = 0; d < head_dim; d += kDepth) {
        amx::load<2>(x + d / 2 * kSide, 64);
        amx::load<0>(first + d, stride * sizeof(bfloat16));
        amx::multiply_add<3, 0, 2>();
        amx::load<1>(second + d, stride * sizeof(bfloat16));
        amx::multiply_add<4, 1, 2>();
      }
      amx::store<3>(out + i * kSide, 64);
      amx::store<4>(out + (i + kSide) * kSide, 64);
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
          const int64_t key = i + j + n % 2 + n / 2 * kSide;
          const vfloat p = exp2(fma(load(scores + key * kSide), scale, -shift));
          sums_of[n] += p;
          bits[n] = (vuint)p + 0x8000u;
        }
        packed[j] = (__m512i)(bits[0] >> 16 | (bits[2] & 0xffff0000u));
        packed[j + 1] = (__m512i)(bits[1] >> 16 | (bits[3] & 0xffff0000u));
      }
      transpose(packed);
      if (is_few) {
        spread(packed, weights + i / kDepth * 4 * kTile);
        continue;
      }
      bfloat16* out = weights + row * kChunk + i;
      ATOM_UNROLL for (int r = 0; r < kSide; ++r) _mm512_storeu_si512(out + r * kChunk, packed[r]);
    }
    store(total + row, (sums_of[0] + sums_of[1]) + (sums_of[2] + sums_of[3]));
  }

  // out[keys 0 to 15, keys 16 to 31][head][as the first of a pair, as the second][row][pair], of the
  // weights of 32 keys; the other number of a pair is 0.
  void spread(const __m512i (&packed)[kSide], bfloat16* out) const {
    auto* to = reinterpret_cast<uint32_t*>(out);
    const int64_t size = unit.head_rows * kSide;
    for (int64_t h = 0, row = 0; h < unit.kv_heads; ++h, to += size) {
      for (int64_t r = 0; r < unit.head_rows; ++r, ++row, to += kSide) {
        const vuint bits = (vuint)packed[row];
        store_bits(to, bits & 0xffffu);
        store_bits(to + size, bits << 16);
        store_bits(to + kTile, bits >> 16);
        store_bits(to + kTile + size, bits & 0xffff0000u);
      }
    }
  }

  static void store_bits(uint32_t* to, vuint bits) { std::memcpy(to, &bits, sizeof bits); }

  // pairs[32 keys][key % 16][element]: two keys' values beside each other; of 32 elements first the
  // even, then the odd ones. Values that are not in use are 0.
  void pack_values(const Chunk& chunk, int64_t head, Fetcher& next) const {
    const bfloat16* values[kChunk];
    unpack(a, chunk.value, head, chunk, in_place, head_dim, rows_memory, values);
    const int64_t from = chunk.begin / kDepth * kDepth, stop = round_up(chunk.end, kDepth);
    for (int64_t i = from; i < chunk.begin; ++i) values[i] = zeros;
    for (int64_t i = chunk.end; i < stop; ++i) values[i] = zeros;
    for (int64_t pair = from / 2; pair < stop / 2; ++pair) {
      const int64_t i = pair + pair / kSide * kSide;
      const bfloat16 *first = values[i], *second = values[i + kSide];
      uint32_t* to = pairs + pair * head_dim;
      next.step();
      for (int64_t d = 0; d < head_dim; d += kDepth) {
        const vuint low = raw<vuint>(first + d), high = raw<vuint>(second + d);
        store_bits(to + d, (low & 0xffffu) | high << 16);
        store_bits(to + d + kSide, low >> 16 | (high & 0xffff0000u));
      }
    }
  }

  // Adds one head's weighted values, as they lie, to its rows of the state.
  void weigh_lying(const Chunk& chunk, int64_t head, Fetcher& next, State& state) const {
    int64_t strides[2 * kHalves];
    const bfloat16* tiles[2 * kHalves];
    values_of(chunk, head, tiles, strides);
    const bfloat16* from = weights + 2 * head * unit.head_rows * kDepth;
    for (int64_t t = 0; t < 2 * kHalves; t += 2, from += 4 * kTile) {
      amx::load<5>(from, amx::kRowBytes);
      amx::load<6>(from + 2 * kTile, amx::kRowBytes);
      float* out = sums + t * unit.head_rows * head_dim / 2;
      for (int64_t d = 0; d < head_dim; d += kDepth) {
        amx::zero<7>();
        next.step();
        if (tiles[t] != nullptr) {
          amx::load<0>(tiles[t] + d, strides[t] * sizeof(bfloat16));
          amx::multiply_add<7, 5, 0>();
        }
        next.step();
        if (tiles[t + 1] != nullptr) {
          amx::load<1>(tiles[t + 1] + d, strides[t + 1] * sizeof(bfloat16));
          amx::multiply_add<7, 6, 1>();
        }
        amx::store<7>(out + d / 2, head_dim / 2 * sizeof(float));
      }
    }
    const int64_t row = head * unit.head_rows, size = unit.head_rows * head_dim / 2;
    const float* sum = sums;
    for (int64_t r = row; r < row + unit.head_rows; ++r) {
      const vfloat kept = splat(keep[r]), admitted = splat(admit[r]);
      float* acc = state.acc + r * head_dim;
      for (int64_t d = 0; d < head_dim; d += kDepth, acc += kDepth, sum += kSide) {
        const vfloat even = load(sum) + load(sum + 2 * size);
        const vfloat odd = load(sum + size) + load(sum + 3 * size);
        store(acc, fma(even, admitted, load(acc) * kept));
        store(acc + kSide, fma(odd, admitted, load(acc + kSide) * kept));
      }
    }
  }

  // Where each 16 keys' values begin, null if none is in use, and elements from one to the next.
  // Values of such keys that are not in use are 0.
  void values_of(const Chunk& chunk, int64_t head, const bfloat16** tiles, int64_t* strides) const {
    const bfloat16* values[kChunk];
    unpack(a, chunk.value, head, chunk, tiles_in_place, head_dim, rows_memory, values);
    for (int64_t t = 0; t < 2 * kHalves; ++t) {
      const int64_t first = t * kSide, begin = std::max(first, chunk.begin);
      const int64_t end = std::min(first + kSide, chunk.end);
      strides[t] = tiles_in_place ? a.kv_heads * head_dim : head_dim;
      tiles[t] = begin < end ? values[begin] - (begin - first) * strides[t] : nullptr;
      if (begin >= end || end - begin == kSide) continue;
      bfloat16* to = rows_memory + first * head_dim;
      for (int64_t i = first; i < first + kSide; ++i, to += head_dim) {
        const bfloat16* from = i >= begin && i < end ? values[i] : zeros;
        if (from != to) std::memcpy(static_cast<void*>(to), from, head_dim * sizeof(bfloat16));
      }
      tiles[t] = rows_memory + first * head_dim;
      strides[t] = head_dim;
    }
  }

  // Adds the weighted values to `count` rows of the state.
  void weigh_values(const Chunk& chunk, int64_t row, int64_t count, State& state) const {
    const bfloat16* from = weights + row * kChunk;
    for (int64_t d = 0; d < head_dim; d += kDepth) {
      amx::zero<6>();
      amx::zero<7>();
      for (int64_t i = chunk.begin / kDepth * kDepth; i < chunk.end; i += kDepth) {
        const uint32_t* values = pairs + i / 2 * head_dim + d;
        amx::load<5>(from + i, kChunk * sizeof(bfloat16));
        amx::load<0>(values, head_dim * sizeof(uint32_t));
        amx::multiply_add<6, 5, 0>();
        amx::load<1>(values + kSide, head_dim * sizeof(uint32_t));
        amx::multiply_add<7, 5, 1>();
      }
      amx::store<6>(sums + d, head_dim * sizeof(float));
      amx::store<7>(sums + d + kSide, head_dim * sizeof(float));
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
  const bool is_few;         // a head's weights fit in a tile twice, and all rows in one
  const amx::Session session;
  bool in_place, tiles_in_place;
  float* scores;             // [kChunk, 16]
  float* sums;               // [kHalves, 16, head_dim]; of few rows [kHalves, 2, rows, head_dim / 2]
  uint32_t* pairs;           // [kChunk / 2, head_dim]
  bfloat16* rows_memory;     // [kChunk, head_dim]
  bfloat16* weights;         // [rows, kChunk]; of few rows [kHalves, 2, 2] tiles
  float *peak, *total;       // [rows] of the chunk
  float *keep, *admit;       // [rows] factors of the state and of the chunk
  int32_t* queries;          // [rows]
  bfloat16* zeros;           // [head_dim]
  uint32_t* q;
};

}  // namespace atom
#endif
