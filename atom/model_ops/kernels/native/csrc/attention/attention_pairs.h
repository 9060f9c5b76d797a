// Attention's two products of pairs of bfloat16.
//
// Lanes are keys of scores, and elements of values, so that no sum crosses them: a chunk's keys are
// transposed first, and its values interleaved, once for all rows. Where pairs are multiplied as such,
// softmax weights are rounded to bfloat16. A sum has the bits that it has beside any other rows.
#pragma once

#include "attention/attention.h"
#include "pairs.h"
#include "transpose.h"

namespace atom {

// Keys of a vector of scores.
constexpr int64_t kLaneKeys = 16;

}  // namespace atom

#if defined(__AVX512BF16__)

namespace atom {

// What keys and values are multiplied with.
using PairFactor = std::conditional_t<kFastPairs, bfloat16, float>;

// A part of the pair from `factors` on, in all lanes.
ATOM_INLINE vint splat_part(const PairFactor* factors, int part) {
  vint all = raw<int32_t>(factors + part) - vint{};
  ATOM_IN_REGISTER(all);
  return all;
}

// out[block of 16 keys][pair of elements][key]; a key that is not in use is any other.
inline void transpose_keys(const bfloat16* const* keys, int64_t begin, int64_t end,
                           int64_t head_dim, bfloat16* out, Fetcher& next) {
  for (int64_t block = begin / kLaneKeys; block * kLaneKeys < end; ++block) {
    next.step();
    for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
      __m512i rows[kLaneKeys];
      for (int64_t i = 0; i < kLaneKeys; ++i) {
        const int64_t key = std::clamp(block * kLaneKeys + i, begin, end - 1);
        rows[i] = raw<__m512i>(keys[key] + d);
      }
      transpose(rows);
      bfloat16* to = out + (block * head_dim + d) * kLaneKeys;
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * 2 * kLaneKeys, rows[i]);
    }
  }
}

// Scores of G rows with B blocks of keys.
template <int G, int B>
ATOM_INLINE void score_blocks(const bfloat16* keys, const PairFactor* q, int64_t head_dim,
                              float* scores) {
  vfloat sums[G][B] = {};
  for (int64_t d = 0; d < head_dim; d += 2) {
    ATOM_UNROLL for (int part = 0; part < kPairParts; ++part) {
      vint key[B];
      ATOM_UNROLL for (int b = 0; b < B; ++b) {
        key[b] = part_of(raw<vint>(keys + (b * head_dim + d) * kLaneKeys), part);
      }
      ATOM_UNROLL for (int g = 0; g < G; ++g) {
        const vint x = splat_part(q + g * head_dim + d, part);
        ATOM_UNROLL for (int b = 0; b < B; ++b) sums[g][b] = add_products(sums[g][b], key[b], x);
      }
    }
  }
  ATOM_UNROLL for (int g = 0; g < G; ++g) {
    ATOM_UNROLL for (int b = 0; b < B; ++b) {
      store(scores + g * kChunk + b * kLaneKeys, sums[g][b]);
    }
  }
}

// Scores of G rows with what `transpose_keys` made.
template <int G>
void score_pairs(const bfloat16* keys, int64_t begin, int64_t end, const PairFactor* q,
                 int64_t head_dim, float* scores) {
  int64_t block = begin / kLaneKeys;
  const int64_t stop = (end + kLaneKeys - 1) / kLaneKeys;
  const auto at = [&] { return keys + block * kLaneKeys * head_dim; };
  for (; block + 4 <= stop; block += 4) {
    score_blocks<G, 4>(at(), q, head_dim, scores + block * kLaneKeys);
  }
  for (; block < stop; ++block) {
    score_blocks<G, 1>(at(), q, head_dim, scores + block * kLaneKeys);
  }
}

// out[pair of keys][element], both keys' beside each other; of 32 elements first the even, then the
// odd ones. A value beside the chunk's is 0.
inline void interleave_values(const bfloat16* const* values, int64_t begin, int64_t end,
                              int64_t head_dim, bfloat16* out, Fetcher& next) {
  const auto load_pairs = [&](int64_t i, int64_t d) {
    return i >= begin && i < end ? raw<vuint>(values[i] + d) : vuint{};
  };
  for (int64_t i = begin / 2 * 2; i < end; i += 2) {
    next.step();
    for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
      const vuint first = load_pairs(i, d), second = load_pairs(i + 1, d);
      const vuint even = (first & 0xffffu) | second << 16;
      const vuint odd = first >> 16 | (second & 0xffff0000u);
      bfloat16* to = out + i * head_dim + 2 * d;
      std::memcpy(static_cast<void*>(to), &even, sizeof even);
      std::memcpy(static_cast<void*>(to + 2 * kLanes), &odd, sizeof odd);
    }
  }
}

// Adds V vectors of the values, weighted, to G rows of the state. Weights of a row that are bfloat16 lie
// in the first half of its scores.
template <int G, int V>
ATOM_INLINE void weigh_vectors(const bfloat16* values, int64_t begin, int64_t end,
                               const float* weights, const float* keep, const float* admit,
                               float* acc, int64_t head_dim) {
  vfloat sums[G][V] = {};
  const auto* rows = reinterpret_cast<const PairFactor*>(weights);
  constexpr int64_t stride = kChunk * sizeof(float) / sizeof(PairFactor);
  for (int64_t i = begin / 2 * 2; i < end; i += 2) {
    ATOM_UNROLL for (int part = 0; part < kPairParts; ++part) {
      vint value[V];
      ATOM_UNROLL for (int v = 0; v < V; ++v) {
        value[v] = part_of(raw<vint>(values + i * head_dim + v * 2 * kLanes), part);
      }
      ATOM_UNROLL for (int g = 0; g < G; ++g) {
        const vint weight = splat_part(rows + g * stride + i, part);
        ATOM_UNROLL for (int v = 0; v < V; ++v) {
          sums[g][v] = add_products(sums[g][v], value[v], weight);
        }
      }
    }
  }
  ATOM_UNROLL for (int g = 0; g < G; ++g) {
    ATOM_UNROLL for (int v = 0; v < V; ++v) {
      float* out = acc + g * head_dim + v * kLanes;
      store(out, fma(sums[g][v], splat(admit[g]), load(out) * keep[g]));
    }
  }
}

// The same with all of what `interleave_values` made.
template <int G>
void weigh_pairs(const bfloat16* values, int64_t begin, int64_t end, const float* weights,
                 const float* keep, const float* admit, float* acc, int64_t head_dim) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    weigh_vectors<G, 4>(values + 2 * d, begin, end, weights, keep, admit, acc + d, head_dim);
  }
  for (; d < head_dim; d += 2 * kLanes) {
    weigh_vectors<G, 2>(values + 2 * d, begin, end, weights, keep, admit, acc + d, head_dim);
  }
}

// kLanes softmax weights in place of the scores before them, as bfloat16: a row of them is half as long.
ATOM_INLINE void store_weights(float* scores, int64_t i, vfloat weights) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)weights);
  std::memcpy(reinterpret_cast<bfloat16*>(scores) + i, &rounded, sizeof rounded);
}

}  // namespace atom
#else

namespace atom {

// Names only: nothing calls them.
template <int G, class... Args>
void score_pairs(const Args&...);
template <int G, class... Args>
void weigh_pairs(const Args&...);

}  // namespace atom
#endif
