// Products of activation rows with the rows of a weight matrix, in float32.
//
// A product packs activations once and then multiplies them, a chunk of rows at a time, with panels
// of weight rows. A sum has the same bits whatever rows, panels and threads it is computed with.
// Linear layers use it; so may any kernel that multiplies some rows by some rows of a matrix.
//
//     with_product<T>(rows, size, [&](const auto& product) {
//       product.pack(x, stride, 0, rows, packed);  // packed_bytes() of memory; or as_packed(x, stride)
//       typename std::decay_t<decltype(product)>::Session session(product);
//       multiply(product, packed, weights, begin, end, [&](m, count, n, outs, sums) { ... });
//     });
#pragma once

#include <algorithm>

#include "dot.h"

namespace atom {

// Weight rows that are multiplied together, and the stride of their sums.
constexpr int64_t kPanel = 32;

// A matrix [rows, size] in memory, as `multiply` reads it.
template <class T>
struct MatrixRows {
  const T* weight;
  int64_t size;

  const T* rows(int64_t n) const { return weight + n * size; }
};

// Brings a chunk's share of the panel behind this one from memory.
template <class T>
ATOM_INLINE void fetch_next_panel(const T* weight, int64_t size, int64_t first, int64_t count,
                                  int64_t rows) {
  const int64_t elements = kPanel * size;
  fetch_share(weight + elements, elements * int64_t(sizeof(T)), first, first + count, rows);
}

}  // namespace atom

#include "linear/product_pairs.h"
#include "linear/product_tiles.h"

namespace atom {

// By vectors of the processor's width.
template <class T>
class VectorProduct {
 public:
  using Weight = T;

  // Rows are packed in multiples of these.
  static constexpr int64_t kPackRows = 1;
#if defined(__AVX512F__) || defined(__aarch64__)
  static constexpr int kGroupRows = 8;  // 32 registers
#else
  static constexpr int kGroupRows = kTileRows;
#endif
  // Rows that `multiply` takes at most.
  static constexpr int64_t kMostChunk = kGroupRows;
  // Packed activations of a block, in bytes and rows: the fewer blocks, the less often weights come
  // from memory.
  static constexpr int64_t kBlockBytes = 768 * 1024;
  static constexpr int64_t kMostBlockRows = 512;
  // Whether it has `for_sums`.
  static constexpr bool kOverlaps = false;

  VectorProduct(int64_t rows, int64_t size)
      : rows_(rows), size_(size), stride_((size + kDotStep - 1) / kDotStep * kDotStep) {}

  int64_t packed_bytes() const { return rows_ * stride_ * int64_t(sizeof(Packed<T>)); }

  // The rows themselves, `stride` elements apart, where packing would copy them as they are; or null.
  const void* as_packed(const T* x, int64_t stride) const {
    const bool is_copy = std::is_same_v<T, Packed<T>> && size_ == stride_ && stride == stride_;
    return is_copy ? x : nullptr;
  }

  // Rows first to last, `stride` elements apart from x on.
  void pack(const T* x, int64_t stride, int64_t first, int64_t last, void* packed) const {
    auto* out = static_cast<Packed<T>*>(packed);
    const int64_t whole = size_ / kDotStep * kDotStep;
    for (int64_t m = first; m < last; ++m) {
      atom::pack(x + m * stride, out + m * stride_, whole);
      if (whole == size_) continue;
      T rest[kDotStep] = {};
      std::memcpy(rest, x + m * stride + whole, (size_ - whole) * sizeof(T));
      atom::pack(rest, out + m * stride_ + whole, kDotStep);
    }
  }

  struct Session {
    explicit Session(const VectorProduct&) {}
  };

  const T* prepare(const T* weight, int64_t) const { return weight; }

  template <class Visit>
  void for_chunks(const Visit& visit) const {
    for_row_groups<kGroupRows>(rows_, [&](auto count, int64_t first) { visit(first, int64_t{count}); });
  }

  void multiply(const void* packed, int64_t first, int64_t count, const T* weight, int64_t outs,
                float* sums) const {
    const auto* x = static_cast<const Packed<T>*>(packed) + first * stride_;
    for_row_groups<kGroupRows>(count, [&](auto rows, int64_t) {
      panel<decltype(rows)::value>(x, first, weight, outs, sums);
    });
  }

 private:
  // One chunk of rows fetches so many bytes ahead of itself. Of several each fetches its share of the
  // panel behind this one.
  static constexpr int64_t kAheadBytes = 8192;

  // One row of weights at a time streams fastest from memory; several at a time load fewer
  // activations, which counts once the processor rather than memory is the limit. Floats of bfloat16
  // are two additions to a sum for each load, which wait for each other.
  static constexpr bool kWaits = kLanes == 16 && !kFastPairs && std::is_same_v<T, bfloat16>;
  static constexpr int64_t kOneWeightRowUpTo = kWaits ? 0 : kGroupRows < 8 ? 2 : 4;
  template <int G>
  static constexpr int kWeightRows = kGroupRows < 8 ? 2 : G > 6 ? 3 : 4;

  template <int G>
  void panel(const Packed<T>* x, int64_t first, const T* weight, int64_t outs,
             float* sums) const {
    constexpr int R = kWeightRows<G>;
    const int64_t bytes = kPanel * size_ * int64_t(sizeof(T));
    const char* next = reinterpret_cast<const char*>(weight);
    next += rows_ > kGroupRows ? bytes + bytes * first / rows_ : kAheadBytes;
    Ahead ahead{next, 0};
    const char* end = next + share_of(bytes, G, rows_);
    int64_t n = 0;
    const auto take = [&](auto size) {
      constexpr int kRows = decltype(size)::value;
      for (; n + kRows <= outs; n += kRows) {
        ahead.step = ahead.at < end ? share_of(kRows * kFetchStep<T> * sizeof(T), G, rows_) : 0;
        tile<kRows, G>(x, weight + n * size_, ahead, sums + n);
      }
    };
    if (rows_ > kOneWeightRowUpTo) {
      take(std::integral_constant<int, R>{});
      take(std::integral_constant<int, 2>{});
    }
    take(std::integral_constant<int, 1>{});
  }

  template <int R, int G>
  ATOM_INLINE void tile(const Packed<T>* x, const T* weight, Ahead& ahead, float* sums) const {
    const T* w[R];
    for (int r = 0; r < R; ++r) w[r] = weight + r * size_;
    float found[R * G];
    dot_tile<T, R, G>(w, x, stride_, size_, ahead, found);
    ATOM_UNROLL for (int g = 0; g < G; ++g)
        std::memcpy(sums + g * kPanel, found + g * R, sizeof(float) * R);
  }

  int64_t rows_, size_, stride_;
};

// Calls `use(product)` with the product that this processor has for T.
template <class T, class Use>
void with_product(int64_t rows, int64_t size, const Use& use) {
#if defined(ATOM_AMX)
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (amx::is_permitted()) return use(TileProduct(rows, size));
  }
#endif
  use(VectorProduct<T>(rows, size));
}

// The same with the fastest product for so many rows.
template <class T, class Use>
void with_product_of(int64_t rows, int64_t size, const Use& use) {
  with_product<T>(rows, size, [&](const auto& product) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    if constexpr (std::is_same_v<std::decay_t<decltype(product)>, VectorProduct<bfloat16>>) {
      if (rows >= PairProduct::kLeastRows) return use(PairProduct(rows, size));
    }
#endif
    use(product);
  });
}

// All rows times weight rows begin to end; `weights.rows(n)` are those from n on. Calls `store(m, count, n, outs, sums)` for rows m to
// m + count and weight rows n to n + outs: sums[i * kPanel + r] is that of row m + i with n + r.
template <class Product, class Weights, class Store>
ATOM_INLINE void multiply(const Product& product, const void* packed, const Weights& weights,
                          int64_t begin, int64_t end, const Store& store) {
  alignas(64) float sums[Product::kMostChunk * kPanel];
  for (int64_t n = begin; n < end; n += kPanel) {
    const int64_t outs = std::min(kPanel, end - n);
    const auto panel = product.prepare(weights.rows(n), outs);
    const auto use = [&](int64_t m, int64_t count, const float* found) {
      store(m, count, n, outs, found);
    };
    if constexpr (Product::kOverlaps) {
      product.for_sums(packed, panel, outs, use);
    } else {
      product.for_chunks([&](int64_t m, int64_t count) {
        product.multiply(packed, m, count, panel, outs, sums);
        use(m, count, sums);
      });
    }
  }
}

}  // namespace atom
