// What the implementations of paged attention share: the work's division into units, the cache's
// chunks, and the state of the online softmax.
#pragma once

#include <algorithm>
#include <limits>

#include "fp8.h"

namespace atom {

struct AttentionArgs {
  const void* q;      // [tokens, heads, head_dim], tokens q_stride elements apart
  const char* key;    // [num_blocks, block_size, kv_heads, head_dim], of q's type or FP8, blocks
                      // block_bytes apart
  const char* value;  // the same
  void* out;          // [tokens, heads, head_dim]
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* context_lens;  // [sequences]
  const int32_t* cu_seqlens_q;  // [sequences + 1]
  const float* key_scale;       // [1] of a cache in FP8, else null
  const float* value_scale;
  const float* sinks;  // [heads], a score more of each row; null for none
  int64_t tokens, heads, kv_heads, head_dim, num_blocks, block_size, table_width, sequences;
  int64_t block_bytes;  // from a block to the next
  int64_t q_stride, window;  // window: keys up to its own that a query sees at most; 0 is all
  int64_t causal;            // whether a query sees no keys after its own
  int64_t threads;
  double scale;
  double softcap;  // scaled scores s become softcap * tanh(s / softcap); 0 for none

  // From products of queries and keys to scores, or the arguments of their tanh.
  double product_scale() const {
    return scale * (is_fp8() ? *key_scale : 1.0) / (softcap > 0 ? softcap : 1.0);
  }
  // From what the softmax reads to exponents of 2.
  float exponent_scale() const {
    return float((softcap > 0 ? softcap : product_scale()) * 1.4426950408889634);  // log2 e
  }
  int64_t group() const { return heads / kv_heads; }
  bool is_fp8() const { return key_scale != nullptr; }
  // Of the cache; `item`: bytes of an element of q.
  int64_t head_bytes(int64_t item) const { return head_dim * (is_fp8() ? 1 : item); }
};

constexpr int64_t kChunk = 64;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Neighbouring queries of one sequence and neighbouring KV heads, with all heads that share
// those. Its rows (a query in one head) are ordered by KV head, then query, then head.
struct Unit {
  int64_t sequence;
  int64_t first_kv_head, kv_heads;
  int64_t first_token, queries;    // rows of q
  int64_t head_rows, rows;         // of one KV head, and of all
  int64_t first_position;          // of the first query
  int64_t end_position;            // after the last key that some query sees
  int64_t chunk_begin, chunk_end;  // the chunks that some query sees
  float* parts;                    // the states of the chunks, of a unit in several tasks
  int64_t unfinished;              // tasks

  int64_t chunks() const { return chunk_end - chunk_begin; }
};

inline int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// The keys and values of one chunk, of the unit's first KV head. [begin, end) of its positions
// are in use; the other pointers point somewhere.
struct Chunk {
  int64_t first_position;
  int64_t begin, end;
  const char* key[kChunk];
  const char* value[kChunk];
};

inline void gather(const AttentionArgs& a, int64_t head_bytes, const Unit& unit, int64_t index,
                   Chunk& chunk) {
  const int64_t base = index * kChunk;
  const int64_t oldest = a.window > 0 ? unit.first_position - a.window + 1 : 0;
  chunk.first_position = base;
  chunk.begin = std::max(int64_t{0}, oldest - base);
  chunk.end = std::min(kChunk, unit.end_position - base);
  std::fill(chunk.key, chunk.key + kChunk, a.key);
  std::fill(chunk.value, chunk.value + kChunk, a.value);
  const int32_t* table = a.block_tables + unit.sequence * a.table_width;
  const int64_t token = a.kv_heads * head_bytes;
  int64_t block = (base + chunk.begin) / a.block_size;
  int64_t within = (base + chunk.begin) % a.block_size;
  for (int64_t i = chunk.begin; i < chunk.end; ++block, within = 0) {
    const int64_t stop = std::min(chunk.end, i + a.block_size - within);
    int64_t at = table[block] * a.block_bytes + within * token + unit.first_kv_head * head_bytes;
    for (; i < stop; ++i, at += token) {
      chunk.key[i] = a.key + at;
      chunk.value[i] = a.value + at;
    }
  }
}

// Fetches `bytes` of memory while others are worked on, into the second cache: a chunk of several
// heads is larger than the first.
ATOM_INLINE void prefetch(const char* p, int64_t bytes) {
  for (int64_t d = 0; d < bytes; d += 64) __builtin_prefetch(p + d, 0, 2);
}

// Fetches the rows of a chunk's keys or values in equal steps, in the order of their addresses: all
// heads of a token, then the next token.
class Fetcher {
 public:
  Fetcher(const char* const* rows, int64_t bytes, int64_t steps)
      : rows_(rows), bytes_(bytes), steps_(steps) {}

  void step() {
    for (due_ += kChunk; due_ >= steps_; due_ -= steps_) prefetch(rows_[row_++], bytes_);
  }

 private:
  const char* const* rows_;
  int64_t bytes_, steps_, due_ = 0, row_ = 0;
};

// One head's rows [begin, end) of a chunk's keys or values, `padded` elements each: where they lie
// if `in_place`, else converted to `memory`.
template <class T>
void unpack(const AttentionArgs& a, const char* const* from, int64_t head, const Chunk& chunk,
            bool in_place, int64_t padded, T* memory, const T** rows) {
  const int64_t bytes = a.head_bytes(sizeof(T));
  const int64_t offset = head * bytes;
  for (int64_t i = chunk.begin; i < chunk.end; ++i) {
    rows[i] = in_place ? reinterpret_cast<const T*>(from[i] + offset) : memory + i * padded;
  }
  if (in_place) return;
  if (a.is_fp8()) {
    widen(from, offset, chunk.begin, chunk.end, a.head_dim, memory, padded);
    return;
  }
  for (int64_t i = chunk.begin; i < chunk.end; ++i) {
    T* row = memory + i * padded;
    std::memcpy(row, from[i] + offset, bytes);
    std::memset(static_cast<void*>(row + a.head_dim), 0, (padded - a.head_dim) * sizeof(T));
  }
}

// Softmax so far of every row of a unit: acc / total is the output, 2^peak was divided out.
struct State {
  float* acc;    // [rows, padded head_dim], in pair order
  float* peak;   // [rows]
  float* total;  // [rows]

  static int64_t padded(int64_t rows) { return round_up(rows, kLanes); }
  static int64_t size(int64_t rows, int64_t head_dim) {
    return round_up(rows * head_dim, kLanes) + 2 * padded(rows);
  }

  State(float* memory, int64_t rows, int64_t head_dim)
      : acc(memory),
        peak(acc + round_up(rows * head_dim, kLanes)),
        total(peak + padded(rows)) {}

  void clear() {
    std::fill(acc, peak, 0.0f);
    std::fill(peak, total, kNothing);
    std::fill(total, total + (total - peak), 0.0f);
  }
};

// 2^x of x <= 0 to about 2 ulp; 0 below -126.5, NaN for NaN. A minimax polynomial on [-1/2, 1/2].
ATOM_INLINE vfloat exp2(vfloat x) {
  x = max(splat(-127.0f), x);
  const vfloat magic = splat(12583039.0f);  // 1.5 * 2^23 + 127: adding it rounds to an integer
  const vfloat shifted = x + magic;
  const vfloat r = x - (shifted - magic);
  vfloat p = splat(1.326472033e-3f);
  p = fma(p, r, splat(9.671511129e-3f));
  p = fma(p, r, splat(5.550733581e-2f));
  p = fma(p, r, splat(2.402224243e-1f));
  p = fma(p, r, splat(6.931470037e-1f));
  p = fma(p, r, splat(1.0f));
  return p * (vfloat)((vuint)shifted << 23);
}

// Products of queries and keys, a multiple of kLanes of them, become tanh(s / softcap).
inline void cap_scores(const AttentionArgs& a, float* scores, int64_t count) {
  const vfloat scale = splat(float(a.product_scale()));
  for (int64_t i = 0; i < count; i += kLanes) {
    store(scores + i, tanh(load(scores + i) * scale));
  }
}

// Brings a state and what joins it to their common peak: the factors of both.
inline void join_peaks(const float* peak, const float* total, int64_t rows, float* keep,
                       float* admit, State& state) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    const vfloat old = load(state.peak + r), incoming = load(peak + r);
    const vfloat both = max(old, incoming);
    const vfloat kept = select(old == both, splat(1), exp2(old - both));
    const vfloat admitted = select(incoming == both, splat(1), exp2(incoming - both));
    store(keep + r, kept);
    store(admit + r, admitted);
    store(state.peak + r, both);
    store(state.total + r, fma(load(total + r), admitted, load(state.total + r) * kept));
  }
}

// acc = part * admit + acc * keep, of one row.
ATOM_INLINE void join_row(const float* part, float admit, float keep, int64_t head_dim,
                          float* acc) {
  const vfloat kept = splat(keep), admitted = splat(admit);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    store(acc + d, fma(load(part + d), admitted, load(acc + d) * kept));
  }
}

}  // namespace atom
