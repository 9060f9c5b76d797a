// Paged attention by vectors, for every type: keys and values meet at most kTileRows rows at a
// time, which stay in registers.
#pragma once

#include "attention/attention_pairs.h"
#include "dot.h"

namespace atom {

// Whether products are of pairs of bfloat16.
template <class T>
constexpr bool kPairs = kHardwareBf16 && std::is_same_v<T, bfloat16>;

// Scores of G rows with all keys.
template <class T, int G>
void score_rows(const T* const* keys, int64_t begin, int64_t end, const Packed<T>* q,
                int64_t head_dim, float* scores, Fetcher& next) {
  int64_t i = begin;
  for (; i + 2 <= end; i += 2) {
    next.step();
    const T* two[2] = {keys[i], keys[i + 1]};
    float sums[2 * G];
    dot_tile<T, 2, G>(two, q, head_dim, head_dim, sums);
    ATOM_UNROLL for (int g = 0; g < G; ++g)
        std::memcpy(scores + g * kChunk + i, sums + 2 * g, 2 * sizeof(float));
  }
  for (; i < end; ++i) {
    const T* one[1] = {keys[i]};
    float sums[G];
    dot_tile<T, 1, G>(one, q, head_dim, head_dim, sums);
    ATOM_UNROLL for (int g = 0; g < G; ++g) scores[g * kChunk + i] = sums[g];
  }
}

// A vector of softmax weights in place of scores i to i + kLanes.
template <class T>
ATOM_INLINE void place_weights(float* scores, int64_t i, vfloat weights) {
#if defined(ATOM_FAST_PAIRS)
  if constexpr (kPairs<T>) return store_weights(scores, i, weights);
#endif
  store(scores + i, weights);
}

// R rows that see a whole chunk: what `soften_row` computes, side by side, since each step of a row
// waits for the one before.
template <class T, int R>
ATOM_INLINE void soften_whole_rows(float* scores, float scale, float* peaks, float* totals) {
  constexpr int kVectors = kChunk / kLanes;
  vfloat x[R][kVectors], total[R] = {};
  ATOM_UNROLL for (int r = 0; r < R; ++r) {
    vfloat peak = splat(kNothing);
    ATOM_UNROLL for (int i = 0; i < kVectors; ++i) {
      x[r][i] = load(scores + r * kChunk + i * kLanes) * scale;
      peak = max(x[r][i], peak);
    }
    peaks[r] = maximum(peak);
  }
  ATOM_UNROLL for (int i = 0; i < kVectors; ++i) {
    ATOM_UNROLL for (int r = 0; r < R; ++r) {
      const vfloat p = exp2(x[r][i] - peaks[r]);
      place_weights<T>(scores + r * kChunk, i * kLanes, p);
      total[r] += p;
    }
  }
  ATOM_UNROLL for (int r = 0; r < R; ++r) totals[r] = sum(total[r]);
}

// One row: scores [from, end) become 2^(scale * score - peak), 0 outside [low, high).
// `from` is a multiple of kLanes.
template <class T>
ATOM_INLINE void soften_row(float* scores, int64_t from, int64_t end, int64_t low, int64_t high,
                            float scale, float& peak_out, float& total_out) {
  vint lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const vint first = vint{} + int32_t(low), stop = vint{} + int32_t(high);
  vfloat peak = splat(kNothing), total = {};
  for (int64_t i = from; i < end; i += kLanes) {
    vfloat x = load(scores + i) * scale;
    if (i < low || i + kLanes > high) {
      const vint index = lane + int32_t(i);
      x = select((index >= first) & (index < stop), x, splat(kNothing));
    }
    store(scores + i, x);
    peak = max(x, peak);
  }
  peak_out = maximum(peak);
  // Where nothing is seen every exponent is -infinity, not NaN.
  const float shift = low < high ? peak_out : 0.0f;
  for (int64_t i = from; i < end; i += kLanes) {
    const vfloat p = exp2(load(scores + i) - shift);
    place_weights<T>(scores, i, p);
    total += p;
  }
  total_out = sum(total);
}

// Adds `P` pairs of vectors of the values, weighted, to G rows of the state.
template <class T, int G, int P>
ATOM_INLINE void weigh_columns(const T* const* values, int64_t begin, int64_t end, int64_t at,
                               Fetcher& next, const float* weights, const float* keep, const float* admit,
                               float* acc, int64_t head_dim) {
  vfloat sums[G][2 * P] = {};
  for (int64_t i = begin; i < end; ++i) {
    next.step();
    vfloat v[2 * P];
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      v[2 * p] = load_first(values[i] + at + p * 2 * kLanes);
      v[2 * p + 1] = load_second(values[i] + at + p * 2 * kLanes);
    }
    ATOM_UNROLL for (int g = 0; g < G; ++g) {
      const vfloat weight = splat(weights[g * kChunk + i]);
      ATOM_UNROLL for (int j = 0; j < 2 * P; ++j) sums[g][j] = fma(weight, v[j], sums[g][j]);
    }
  }
  ATOM_UNROLL for (int g = 0; g < G; ++g) {
    ATOM_UNROLL for (int j = 0; j < 2 * P; ++j) {
      float* out = acc + g * head_dim + at + j * kLanes;
      store(out, fma(sums[g][j], splat(admit[g]), load(out) * keep[g]));
    }
  }
}

// The steps of one thread on one unit after the other.
template <class T>
class Vectors {
 public:
  using Value = T;
  static constexpr int64_t kStep = kDotStep;

  // Rows that meet a chunk together. Few queries take several KV heads at once: a token's heads lie
  // side by side in memory.
  static constexpr int64_t kUnitRows = 96, kSharedRows = 96;

  // Floats that `Vectors` needs.
  static int64_t size(int64_t rows, int64_t head_dim) {
    return rows * (head_dim + kChunk) + 4 * State::padded(rows) + kChunk * head_dim;
  }

  Vectors(const AttentionArgs& args, float* memory, const Unit& unit_, int64_t head_dim_)
      : a(args), unit(unit_), head_dim(head_dim_) {
    const int64_t padded = State::padded(unit.rows);
    scores = memory;
    peak = scores + unit.rows * kChunk;
    total = peak + padded;
    keep = total + padded;
    admit = keep + padded;
    q = reinterpret_cast<Packed<T>*>(admit + padded);
    rows_memory = reinterpret_cast<T*>(admit + padded + unit.rows * head_dim);
    pairs = rows_memory + kChunk * head_dim;
    in_place = !a.is_fp8() && a.head_dim == head_dim;
    // Lanes without a row are computed, too, and numbers below the least normal one are slow.
    std::fill(peak, keep, 0.0f);
    pack_queries();
  }

  void attend(const Chunk& chunk, const Chunk& next, State& state) const {
    score(chunk, next);
    if (a.softcap > 0) cap_scores(a, scores, unit.rows * kChunk);
    soften(chunk);
    join_peaks(peak, total, unit.rows, keep, admit, state);
    weigh_values(chunk, next, state);
  }

  void merge(const State& part, State& state) const {
    join_peaks(part.peak, part.total, unit.rows, keep, admit, state);
    for (int64_t r = 0; r < unit.rows; ++r) {
      join_row(part.acc + r * head_dim, admit[r], keep[r], head_dim, state.acc + r * head_dim);
    }
  }

 private:
  void pack_query(const T* from, Packed<T>* to) const {
    if constexpr (kPairs<T> && !kFastPairs) {
      // Pairs' elements lie side by side.
      for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, load(from + d));
    } else {
      pack(from, to, head_dim);
    }
  }

  void pack_queries() const {
    const int64_t group = a.group(), width = group * a.head_dim;
    Packed<T>* out = q;
    T* padded = rows_memory;
    std::memset(static_cast<void*>(padded), 0, head_dim * sizeof(T));
    for (int64_t h = 0; h < unit.kv_heads; ++h) {
      for (int64_t i = 0; i < unit.queries; ++i) {
        const T* from = static_cast<const T*>(a.q) + (unit.first_token + i) * a.q_stride +
                        (unit.first_kv_head + h) * width;
        for (int64_t g = 0; g < group; ++g, from += a.head_dim, out += head_dim) {
          if (a.head_dim != head_dim) std::memcpy(padded, from, a.head_dim * sizeof(T));
          if (a.head_dim == head_dim) pack_query(from, out);
          else pack_query(padded, out);
        }
      }
    }
  }

  void score(const Chunk& chunk, const Chunk& next) const {
    Fetcher next_keys = fetcher(next.key, kPairs<T> ? kChunk / kLaneKeys : row_groups() * kChunk / 2);
    const T* keys[kChunk];
    for (int64_t h = 0; h < unit.kv_heads; ++h) {
      unpack(a, chunk.key, h, chunk, in_place, head_dim, rows_memory, keys);
      if constexpr (kPairs<T>) {
        transpose_keys(keys, chunk.begin, chunk.end, head_dim, pairs, next_keys);
      }
      for_row_groups(unit.head_rows, [&](auto size, int64_t first) {
        constexpr int G = decltype(size)::value;
        const int64_t row = h * unit.head_rows + first;
        const Packed<T>* rows = q + row * head_dim;
        float* out = scores + row * kChunk;
        if constexpr (kPairs<T>) {
          score_pairs<G>(pairs, chunk.begin, chunk.end, rows, head_dim, out);
        } else {
          score_rows<T, G>(keys, chunk.begin, chunk.end, rows, head_dim, out, next_keys);
        }
      });
    }
  }

  // Whether every row sees all of the chunk.
  bool all_see(const Chunk& chunk) const {
    const int64_t first = unit.first_position - chunk.first_position, last = first + unit.queries - 1;
    return chunk.begin == 0 && chunk.end == kChunk && (!a.causal || first >= kChunk - 1) &&
           (a.window <= 0 || last < a.window);
  }

  void soften(const Chunk& chunk) const {
    const int64_t from = chunk.begin / kLanes * kLanes, group = a.group();
    const float scale = a.exponent_scale();
    int64_t r = 0;
    if (all_see(chunk)) {
      constexpr int R = kLanes == 16 ? 4 : 1;  // as many as registers
      for (; r + R <= unit.rows; r += R) {
        soften_whole_rows<T, R>(scores + r * kChunk, scale, peak + r, total + r);
      }
      for (; r < unit.rows; ++r) {
        soften_whole_rows<T, 1>(scores + r * kChunk, scale, peak + r, total + r);
      }
      return;
    }
    for (int64_t h = 0; h < unit.kv_heads; ++h) {
      for (int64_t query = 0; query < unit.queries; ++query) {
        const int64_t position = unit.first_position + query - chunk.first_position;
        const int64_t oldest = a.window > 0 ? position - a.window + 1 : 0;
        const int64_t low = std::max(chunk.begin, oldest);
        const int64_t high = a.causal ? std::min(chunk.end, position + 1) : chunk.end;
        for (const int64_t end = r + group; r < end; ++r) {
          soften_row<T>(scores + r * kChunk, from, chunk.end, low, high, scale, peak[r], total[r]);
        }
      }
    }
  }

  void weigh_values(const Chunk& chunk, const Chunk& next, State& state) const {
    const int64_t visits = row_groups() * kChunk * (head_dim / (2 * kLanes));
    Fetcher next_values = fetcher(next.value, kPairs<T> ? kChunk / 2 : visits);
    const T* values[kChunk];
    for (int64_t h = 0; h < unit.kv_heads; ++h) {
      unpack(a, chunk.value, h, chunk, in_place, head_dim, rows_memory, values);
      if constexpr (kPairs<T>) {
        interleave_values(values, chunk.begin, chunk.end, head_dim, pairs, next_values);
      }
      for_row_groups(unit.head_rows, [&](auto size, int64_t first) {
        constexpr int G = decltype(size)::value;
        const int64_t row = h * unit.head_rows + first;
        const float* weights = scores + row * kChunk;
        float* acc = state.acc + row * head_dim;
        if constexpr (kPairs<T>) {
          return weigh_pairs<G>(pairs, chunk.begin, chunk.end, weights, keep + row, admit + row,
                                acc, head_dim);
        }
        constexpr int P = G <= 3 ? 2 : 1;  // as many sums as registers
        int64_t d = 0;
        for (; d + 2 * P * kLanes <= head_dim; d += 2 * P * kLanes) {
          weigh_columns<T, G, P>(values, chunk.begin, chunk.end, d, next_values, weights,
                                 keep + row, admit + row, acc, head_dim);
        }
        for (; P > 1 && d < head_dim; d += 2 * kLanes) {
          weigh_columns<T, G, 1>(values, chunk.begin, chunk.end, d, next_values, weights,
                                 keep + row, admit + row, acc, head_dim);
        }
      });
    }
  }

  int64_t row_groups() const { return (unit.head_rows + kTileRows - 1) / kTileRows; }
  // `steps`: for a KV head.
  Fetcher fetcher(const char* const* rows, int64_t steps) const {
    return Fetcher(rows, unit.kv_heads * a.head_bytes(sizeof(T)), unit.kv_heads * steps);
  }

  const AttentionArgs& a;
  const Unit& unit;
  const int64_t head_dim;  // a multiple of kStep; elements beyond the real ones are 0
  bool in_place;
  float* scores;        // [rows, kChunk]: scores, then 2^(score - peak)
  float *peak, *total;  // [rows] of the chunk
  float *keep, *admit;  // [rows] factors of the state and of the chunk
  Packed<T>* q;         // [rows, head_dim]
  T* rows_memory;       // [kChunk, head_dim]
  T* pairs;             // the same in pairs, of types of half a float
};

}  // namespace atom
