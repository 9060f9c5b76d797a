// out = x . weight^T + bias, by streaming the weights once per block of activation rows. Linear
// layers round the sums to the weights' type; logits leave as the float32 that they are.
#pragma once

#include <algorithm>

#include "dot.h"
#include "linear_args.h"
#include "parallel.h"

namespace atom {
namespace {

// Bytes between reading and prefetching a weight row: far enough to hide memory, near
// enough to stay in the first-level cache.
constexpr int64_t kAheadBytes = 2048;

// Packed activations of one block stay within a second-level cache.
constexpr int64_t kBlockBytes = 256 * 1024;
constexpr int64_t kMaxBlockRows = 20 * kTileRows;

// Below this many multiplications one thread is done before others have woken up.
constexpr int64_t kSerialWork = 1 << 16;

// One row of weights at a time streams fastest from memory; several at a time load fewer
// activations, which counts once the processor rather than memory is the limit.
constexpr int64_t kOneWeightRowUpTo = 2;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t kTwoWeightRowsUpTo = 16;
#else
constexpr int64_t kTwoWeightRowsUpTo = std::numeric_limits<int64_t>::max();  // 16 registers
#endif

// Output features that are computed in float32 before they are rounded together.
constexpr int64_t kPanel = 32;

template <class T, class Out>
struct Block {
  const Packed<T>* x;  // [rows, in_features]
  int64_t rows;
  Out* out;
  const LinearArgs& args;
};

// What to bring from memory while a panel is computed: the next panel's weights, so many bytes
// for each feature and group of rows.
struct Fetch {
  const char* at;
  int64_t bytes;
};

// panel[g * kPanel + r] = weight row (n + r) . x[g], for R features and G activation rows.
template <class T, class Out, int R, int G>
ATOM_INLINE void tile(const Block<T, Out>& block, int64_t n, const Packed<T>* x, Fetch& fetch,
                      float* panel) {
  const int64_t size = block.args.in_features;
  const T* w[R];
  for (int r = 0; r < R; ++r) w[r] = static_cast<const T*>(block.args.weight) + (n + r) * size;
  const char* const stop = fetch.at + R * fetch.bytes;
  for (; fetch.at < stop; fetch.at += 64) __builtin_prefetch(fetch.at, 0, 2);
  float sums[R * G];
  dot_tile<T, R, G>(w, x, size, size, fetch.bytes == 0 ? kAheadBytes * R : 0, sums);
  ATOM_UNROLL for (int g = 0; g < G; ++g)
      std::memcpy(panel + g * kPanel, sums + g * R, sizeof(float) * R);
}

// Few activation rows stay in the first-level cache while the panel's weights pass by from the
// second-level cache.
template <class T, class Out, int G>
void compute_rows(const Block<T, Out>& block, int64_t begin, int64_t end, int64_t first,
                  Fetch& fetch, float* panel) {
  const Packed<T>* x = block.x + first * block.args.in_features;
  float* out = panel + first * kPanel - begin;
  int64_t n = begin;
  if (block.rows > kTwoWeightRowsUpTo) {
    for (; n + 4 <= end; n += 4) tile<T, Out, 4, G>(block, n, x, fetch, out + n);
  }
  if (block.rows > kOneWeightRowUpTo) {
    for (; n + 2 <= end; n += 2) tile<T, Out, 2, G>(block, n, x, fetch, out + n);
  }
  for (; n < end; ++n) tile<T, Out, 1, G>(block, n, x, fetch, out + n);
}

template <class T, class Out>
void compute_panel(const Block<T, Out>& block, int64_t begin, int64_t end, float* panel) {
  const int64_t groups = (block.rows + kTileRows - 1) / kTileRows;
  const int64_t row_bytes = block.args.in_features * int64_t(sizeof(T));
  const char* weight = static_cast<const char*>(block.args.weight);
  // One group of rows passes too fast for that: it fetches just ahead of itself.
  Fetch fetch{weight + end * row_bytes, groups == 1 ? 0 : (row_bytes + groups - 1) / groups};
  for_row_groups(block.rows, [&](auto group, int64_t first) {
    compute_rows<T, Out, decltype(group)::value>(block, begin, end, first, fetch, panel);
  });
}

template <class T, class Out>
void store_panel(const Block<T, Out>& block, int64_t begin, int64_t end, const float* panel) {
  for (int64_t j = 0; j < end - begin; j += kLanes) {
    const int64_t count = end - begin - j;
    const T* bias = static_cast<const T*>(block.args.bias);
    const vfloat add = bias == nullptr ? vfloat{} : load_some(bias + begin + j, count);
    for (int64_t m = 0; m < block.rows; ++m) {
      Out* out = block.out + m * block.args.out_features + begin + j;
      store_some(out, load(panel + m * kPanel + j) + add, count);
    }
  }
}

template <class T>
void pack_rows(const LinearArgs& a, int64_t first, int64_t rows, Packed<T>* out) {
  for (int64_t m = 0; m < rows; ++m) {
    pack(static_cast<const T*>(a.x) + (first + m) * a.x_stride, out + m * a.in_features,
         a.in_features);
  }
}

template <class T, class Out = T>
void linear(const LinearArgs& a) {
  const int64_t fitting = kBlockBytes / (a.in_features * int64_t(sizeof(Packed<T>)));
  const int64_t most = std::clamp(fitting, 4 * int64_t{kTileRows}, kMaxBlockRows);
  const int64_t fewest = (a.rows + most - 1) / most;  // of equal blocks of whole tiles
  const int64_t tiles = (a.rows + fewest * kTileRows - 1) / std::max(int64_t{1}, fewest * kTileRows);
  const int64_t block_rows = std::max(int64_t{1}, tiles) * kTileRows;
  const int64_t blocks = (a.rows + block_rows - 1) / block_rows;
  const int64_t panels = (a.out_features + kPanel - 1) / kPanel;
  const bool serial = a.rows * a.in_features * a.out_features < kSerialWork;
  run_tasks(blocks * panels, serial ? 1 : a.threads, [&](TaskQueue::Hand& hand) {
    static thread_local Scratch scratch;
    auto* packed = scratch.get<Packed<T>>(std::min(block_rows, a.rows) * a.in_features);
    int64_t packed_block = -1;
    for (int64_t task; hand.take(task);) {
      const int64_t block = task / panels, begin = task % panels * kPanel;
      const int64_t first = block * block_rows;
      const int64_t rows = std::min(block_rows, a.rows - first);
      if (block != packed_block) {
        pack_rows<T>(a, first, rows, packed);
        packed_block = block;
      }
      const Block<T, Out> work{packed, rows, static_cast<Out*>(a.out) + first * a.out_features, a};
      const int64_t end = std::min(begin + kPanel, a.out_features);
      alignas(64) float panel[kMaxBlockRows * kPanel];
      compute_panel(work, begin, end, panel);
      store_panel(work, begin, end, panel);
    }
  });
}

}  // namespace
}  // namespace atom
