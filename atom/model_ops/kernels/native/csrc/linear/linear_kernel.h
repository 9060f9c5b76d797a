// out = x . weight^T + bias. Linear layers round the sums to the weights' type; logits leave as the
// float32 that they are.
#pragma once

#include <algorithm>

#include "linear/linear_args.h"
#include "parallel.h"
#include "linear/product.h"

namespace atom {

namespace {

// Below this many multiplications one thread is done before others have woken up.
constexpr int64_t kSerialWork = 1 << 16;

// Activations of so few bytes are packed by the caller alone.
constexpr int64_t kSerialPacking = 64 * 1024;

// out[i * stride + r] = sums[i * kPanel + r] + bias[r]
template <class T, class Out>
ATOM_INLINE void store_sums(const float* sums, int64_t count, int64_t outs, const T* bias,
                            Out* out, int64_t stride) {
  if (outs == kPanel && bias == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      ATOM_UNROLL for (int64_t r = 0; r < kPanel; r += kLanes) {
        store_rounded(out + i * stride + r, load(sums + i * kPanel + r));
      }
    }
    return;
  }
  for (int64_t r = 0; r < outs; r += kLanes) {
    const vfloat add = bias == nullptr ? vfloat{} : load_some(bias + r, outs - r);
    if (outs - r >= kLanes) {
      for (int64_t i = 0; i < count; ++i) {
        store_rounded(out + i * stride + r, load(sums + i * kPanel + r) + add);
      }
      continue;
    }
    for (int64_t i = 0; i < count; ++i) {
      store_rounded_some(out + i * stride + r, load(sums + i * kPanel + r) + add, outs - r);
    }
  }
}

// Whether a product may be computed a range of inputs after the other: weights that are made anew for each
// call are made for all inputs.
template <class Product, class Weights>
constexpr bool has_ranges = Product::kOverlaps &&
                            std::is_same_v<Weights, MatrixRows<typename Product::Weight>>;

// Ranges of a few panels' inputs: what is read of the rows stays in a cache for all of them.
template <class Product, class Weights, class Store>
void multiply_ranges(const Product& product, int64_t ranges, const void* packed, const Weights& weights,
                     int64_t outs, int64_t threads, const Store& store) {
  constexpr int64_t kMostTogether = 8;
  const int64_t panels = (outs + kPanel - 1) / kPanel;
  const int64_t together = std::clamp(panels / (2 * team_size(threads)), int64_t{1}, kMostTogether);
  run_tasks((panels + together - 1) / together, threads, [&](TaskQueue::Hand& hand) {
    static thread_local Scratch scratch;
    float* const totals = scratch.get<float>(together * product.totals());
    const typename Product::Session session(product);
    for (int64_t task; hand.take(task);) {
      const int64_t begin = task * together * kPanel, end = std::min(begin + together * kPanel, outs);
      for (int64_t i = 0; i < ranges; ++i) {
        float* of_panel = totals;
        for (int64_t n = begin; n < end; n += kPanel, of_panel += product.totals()) {
          const int64_t count = std::min(kPanel, end - n);
          product.template for_sums<true>(
              packed, weights.rows(n), count, product.range(i, ranges), of_panel,
              [&](int64_t m, int64_t rows, const float* sums) { store(m, rows, n, count, sums); });
        }
      }
    }
  });
}

// Rows from `first` on, all that `product` has.
template <class T, class Out, class Product, class Weights>
void linear_block(const LinearArgs& a, const Product& product, const Weights& weights,
                  int64_t first, int64_t rows) {
  static thread_local Scratch scratch;
  const int64_t bytes = product.packed_bytes(), size = a.in_features;
  const T* x = static_cast<const T*>(a.x) + first * a.x_stride;
  const T* bias = static_cast<const T*>(a.bias);
  Out* out = static_cast<Out*>(a.out) + first * a.out_stride;
  const void* packed = product.as_packed(x, a.x_stride);
  if (packed == nullptr) {
    char* room = scratch.get<char>(bytes);
    constexpr int64_t step = Product::kPackRows;
    run_shares((rows + step - 1) / step, bytes < kSerialPacking ? 1 : a.threads,
               [&](int64_t begin, int64_t end) {
                 product.pack(x, a.x_stride, begin * step, std::min(end * step, rows), room);
               });
    packed = room;
  }
  const int64_t panels = (a.out_features + kPanel - 1) / kPanel;
  const bool serial = rows * size * a.out_features < kSerialWork;
  const auto store = [&](int64_t m, int64_t count, int64_t n, int64_t outs, const float* sums) {
    store_sums(sums, count, outs, bias == nullptr ? nullptr : bias + n, out + m * a.out_stride + n,
               a.out_stride);
  };
  if constexpr (has_ranges<Product, Weights>) {
    if (const int64_t ranges = product.ranges(); ranges > 1) {
      return multiply_ranges(product, ranges, packed, weights, a.out_features, a.threads, store);
    }
  }
  run_tasks(panels, serial ? 1 : a.threads, [&](TaskQueue::Hand& hand) {
    const typename Product::Session session(product);
    for (int64_t panel; hand.take(panel);) {
      const int64_t begin = panel * kPanel, end = std::min(begin + kPanel, a.out_features);
      multiply(product, packed, weights, begin, end, store);
    }
  });
}

// A block of rows at a time, which stays in a cache, with that product.
template <class T, class Out, class Product, class Weights>
void linear_blocks(const LinearArgs& a, const Weights& weights) {
  const int64_t row_bytes = std::max(int64_t{1}, a.in_features) * int64_t(sizeof(T));
  int64_t most = Product::kBlockBytes / row_bytes;
  // Few rows read weights too often.
  if (has_ranges<Product, Weights> && most < Product::kMostBlockRows / 2) most = Product::kMostBlockRows;
  most = std::clamp(most, Product::kMostChunk, Product::kMostBlockRows);
  const int64_t blocks = (a.rows + most - 1) / most;  // equal ones, of whole chunks
  const int64_t chunks = (a.rows + blocks * Product::kMostChunk - 1) /
                         std::max(int64_t{1}, blocks * Product::kMostChunk);
  const int64_t size = chunks * Product::kMostChunk;
  for (int64_t first = 0; first < a.rows; first += size) {
    const int64_t rows = std::min(size, a.rows - first);
    linear_block<T, Out>(a, Product(rows, a.in_features), weights, first, rows);
  }
}

template <class T, class Out = T>
int64_t linear(const LinearArgs& a) {
  with_product_of<T>(a.rows, a.in_features, [&](const auto& whole) {
    const MatrixRows<T> weights{static_cast<const T*>(a.weight), a.in_features};
    linear_blocks<T, Out, std::decay_t<decltype(whole)>>(a, weights);
  });
  return 0;
}

}  // namespace
}  // namespace atom
