// Rows of scores, visited in parts of a fixed size: a row's result cannot depend on the number
// of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace atom {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kPart = 8192;  // tokens; a multiple of kBlock

inline int64_t num_parts(int64_t vocab_size) { return (vocab_size + kPart - 1) / kPart; }

// The tokens of a part.
struct Span {
  int64_t begin, end;
};
inline Span part_of(int64_t part, int64_t vocab_size) {
  return {part * kPart, std::min((part + 1) * kPart, vocab_size)};
}

// A pass over rows: part(row, p) for all parts of a row, then finish(row).
template <class Part, class Finish>
struct Pass {
  Part part;
  Finish finish;

  void run(int64_t row, int64_t parts) const {
    for (int64_t p = 0; p < parts; ++p) part(row, p);
    finish(row);
  }

  void run_split(int64_t rows, int64_t parts, int64_t threads) const {
    static thread_local std::vector<int> of_caller;
    std::vector<int>& unfinished = of_caller;  // other threads have their own
    unfinished.assign(rows, int(parts));
    run_tasks(rows * parts, threads, [&](TaskQueue::Hand& hand) {
      for (int64_t task; hand.take(task);) {
        const int64_t row = task / parts;
        part(row, task % parts);
        if (__atomic_sub_fetch(&unfinished[row], 1, __ATOMIC_ACQ_REL) == 0) finish(row);
      }
    });
  }
};
template <class Part, class Finish>
Pass(Part, Finish) -> Pass<Part, Finish>;

// Whether a thread has rows of its own; otherwise the threads share each row.
inline bool has_whole_rows(int64_t rows, int64_t vocab_size, int64_t threads) {
  threads = team_size(threads);
  return threads == 1 || num_parts(vocab_size) == 1 || rows >= 2 * threads;
}

template <class... Passes>
void run_rows(int64_t rows, int64_t vocab_size, int64_t threads, const Passes&... passes) {
  const int64_t parts = num_parts(vocab_size);
  if (!has_whole_rows(rows, vocab_size, threads)) {
    (passes.run_split(rows, parts, threads), ...);
    return;
  }
  run_tasks(rows, threads, [&](TaskQueue::Hand& hand) {
    for (int64_t row; hand.take(row);) (passes.run(row, parts), ...);
  });
}

// The largest and smallest of some scores; `largest` is NaN if one of them is.
struct Extent {
  float largest = -kInfinity, smallest = kInfinity;

  void join(const Extent& other) {
    largest = largest != largest || largest > other.largest ? largest : other.largest;
    smallest = std::min(smallest, other.smallest);
  }
};

// Whether any lane of a mask is set.
ATOM_INLINE bool any(vint mask) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

inline Extent measure(const float* scores, int64_t count) {
  constexpr int kStreams = 4;
  vfloat largest[kStreams], smallest[kStreams];
  vint nan = {};
  for (int j = 0; j < kStreams; ++j) largest[j] = splat(-kInfinity), smallest[j] = splat(kInfinity);
  int64_t i = 0;
  for (; i + kStreams * kLanes <= count; i += kStreams * kLanes) {
    ATOM_UNROLL for (int j = 0; j < kStreams; ++j) {
      const vfloat v = load(scores + i + j * kLanes);
      largest[j] = max(v, largest[j]);  // what is NaN is passed over
      smallest[j] = min(v, smallest[j]);
      nan |= v != v;
    }
  }
  Extent extent;
  for (int j = 0; j < kStreams; ++j) {
    for (int lane = 0; lane < kLanes; ++lane) {
      extent.join({largest[j][lane], smallest[j][lane]});
      if (nan[lane]) extent.largest = std::numeric_limits<float>::quiet_NaN();
    }
  }
  for (; i < count; ++i) extent.join({scores[i], scores[i]});
  return extent;
}

// The first of some scores that equals `wanted`, or is NaN if that is.
inline int64_t find(const float* scores, int64_t count, float wanted) {
  const vfloat all = splat(wanted);
  const vint wants_nan = all != all;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const vfloat v = load(scores + i);
    if (any((v == all) | (wants_nan & (v != v)))) break;
  }
  while (i < count && scores[i] != wanted && (wanted == wanted || scores[i] == scores[i])) ++i;
  return i;
}

// The extent of a row, and the first token that is the largest.
struct Largest {
  Extent extent;
  int64_t token;
};
inline Largest find_largest(const float* scores, int64_t vocab_size, const Extent* parts) {
  Largest row{{}, 0};
  for (int64_t p = 0; p < num_parts(vocab_size); ++p) row.extent.join(parts[p]);
  const float largest = row.extent.largest;
  for (int64_t p = 0; p < num_parts(vocab_size); ++p) {
    if (parts[p].largest != largest && largest == largest) continue;
    const Span span = part_of(p, vocab_size);
    row.token = span.begin + find(scores + span.begin, span.end - span.begin, largest);
    if (row.token < span.end) break;
  }
  return row;
}

}  // namespace atom
