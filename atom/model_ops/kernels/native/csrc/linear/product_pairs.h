// Products of many bfloat16 rows with vectors of 16 lanes: see product.h.
//
// Lanes are features, so that no sum crosses lanes. Pairs of elements stay pairs, or both are packed as
// floats: see pairs.h. `VectorProduct` has one accumulator whose lane l sums pairs l, l + 16, ..., and
// folds its lanes at the end; here each of these residues of pairs is summed by itself, and the sums
// are joined in the order of that fold. So they have the same bits.
#pragma once

#include "dot.h"
#include "pairs.h"
#include "transpose.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <algorithm>

#include "parallel.h"

namespace atom {

class PairProduct {
 public:
  using Weight = bfloat16;

  // Rows that are packed together.
  static constexpr int64_t kPackRows = 12;
  static constexpr int64_t kMostChunk = kPackRows;
  static constexpr int64_t kBlockBytes = 768 * 1024;
  static constexpr int64_t kMostBlockRows = 512;
  static constexpr bool kOverlaps = false;
  // So few rows are not worth the transposition of the weights.
  static constexpr int64_t kLeastRows = 128;

  PairProduct(int64_t rows, int64_t size)
      : rows_(rows), size_(size), steps_((size + kDotStep - 1) / kDotStep) {}

  int64_t packed_bytes() const { return (rows_ + kPackRows - 1) / kPackRows * group_bytes(); }
  const void* as_packed(const bfloat16*, int64_t) const { return nullptr; }

  // packed[group][residue][step][part][row], of pairs of elements. Rows beyond the last are 0.
  void pack(const bfloat16* x, int64_t stride, int64_t first, int64_t last, void* packed) const {
    for (int64_t row = first; row < last; row += kPackRows) {
      char* to = static_cast<char*>(packed) + row / kPackRows * group_bytes();
      transpose_pairs<kPackRows>(x + row * stride, stride, std::min(kPackRows, last - row), to);
    }
  }

  struct Session {
    explicit Session(const PairProduct&) {}
  };

  // Two vectors of features: [half][residue][step][part][feature], of pairs of elements.
  struct Panel {
    const bfloat16* weight;
    const char* pairs;
  };
  Panel prepare(const bfloat16* weight, int64_t outs) const {
    static thread_local Scratch scratch;
    char* pairs = scratch.get<char>(2 * half_bytes());
    for (int64_t n = 0; n < outs; n += kLanes) {
      transpose_pairs<kLanes>(weight + n * size_, size_, std::min<int64_t>(kLanes, outs - n),
                              pairs + n / kLanes * half_bytes());
    }
    return {weight, pairs};
  }

  template <class Visit>
  void for_chunks(const Visit& visit) const {
    for (int64_t row = 0; row < rows_; row += kMostChunk) {
      visit(row, std::min(kMostChunk, rows_ - row));
    }
  }

  void multiply(const void* packed, int64_t first, int64_t count, const Panel& panel, int64_t outs,
                float* sums) const {
    fetch_next_panel(panel.weight, size_, first, count, rows_);
    const char* x = static_cast<const char*>(packed) + first / kPackRows * group_bytes();
    for (; count > 0; count -= kRows) {
      if (outs <= kLanes) tile<kRows, 1>(x, panel.pairs, sums);
      else if (count > kRows / 2) tile<kRows, 2>(x, panel.pairs, sums);
      else tile<kRows / 2, 2>(x, panel.pairs, sums);
      x += kRows * kPartBytes;
      sums += kRows * kPanel;
    }
  }

 private:
  // Rows that are multiplied together, with two vectors of features and for two residues: fewer sums
  // are kept in memory than with more rows and one residue.
  static constexpr int64_t kRows = 6;
  static constexpr int kParts = kPairParts;
  static constexpr int64_t kPartBytes = 4, kPairBytes = kParts * kPartBytes;
  static constexpr int kResidues = kDotStep / 2;

  int64_t group_bytes() const { return kResidues * steps_ * kPackRows * kPairBytes; }
  int64_t half_bytes() const { return kResidues * steps_ * kLanes * kPairBytes; }

  // to[residue][step][part][row] of Rows rows `stride` elements apart, of which `count` are there.
  template <int64_t Rows>
  void transpose_pairs(const bfloat16* from, int64_t stride, int64_t count, char* to) const {
    for (int64_t step = 0; step < steps_; ++step) {
      const int64_t k = step * kDotStep;
      const __mmask32 mask = size_ - k < kDotStep ? (1u << (size_ - k)) - 1 : ~0u;
      __m512i rows[16];
      ATOM_UNROLL for (int i = 0; i < 16; ++i) {
        rows[i] = i < count ? _mm512_maskz_loadu_epi16(mask, from + i * stride + k)
                            : _mm512_setzero_si512();
      }
      for (int i = 0; i < Rows; ++i) __builtin_prefetch(from + (Rows + i) * stride + k);
      transpose(rows);
      for (int i = 0; i < kResidues; ++i) {
        char* at = to + (i * steps_ + step) * Rows * kPairBytes;
        ATOM_UNROLL for (int part = 0; part < kParts; ++part) {
          _mm512_mask_storeu_epi32(at + part * Rows * kPartBytes, (1u << Rows) - 1,
                                   (__m512i)part_of((vint)rows[i], part));
        }
      }
    }
  }

  template <int G, int H>
  using Sums = vfloat[G][H];

  // sums = those of a residue and of the one 8 behind it, of G rows and H vectors of features.
  template <int G, int H>
  ATOM_INLINE void sum_residues(const char* x, const char* pairs, int residue,
                                Sums<G, H> (&sums)[2]) const {
    x += residue * steps_ * kPackRows * kPairBytes;
    pairs += residue * steps_ * kLanes * kPairBytes;
    const int64_t half = half_bytes(), x_other = group_bytes() / 2, other = half / 2;
    ATOM_UNROLL for (int g = 0; g < G; ++g) {
      ATOM_UNROLL for (int h = 0; h < H; ++h) sums[0][g][h] = sums[1][g][h] = vfloat{};
    }
    for (int64_t step = 0; step < steps_; ++step) {
      ATOM_UNROLL for (int i = 0; i < 2 * kParts; ++i) {
        const int which = i / kParts, part = i % kParts;
        vint w[H];
        ATOM_UNROLL for (int h = 0; h < H; ++h) {
          w[h] = raw<vint>(pairs + which * other + h * half + part * kLanes * kPartBytes);
        }
        ATOM_UNROLL for (int g = 0; g < G; ++g) {
          const int64_t row = part * kPackRows + g;
          vint pair = raw<int32_t>(x + which * x_other + row * kPartBytes) - vint{};
          ATOM_IN_REGISTER(pair);
          ATOM_UNROLL for (int h = 0; h < H; ++h) {
            sums[which][g][h] = add_products(sums[which][g][h], w[h], pair);
          }
        }
      }
      x += kPackRows * kPairBytes;
      pairs += kLanes * kPairBytes;
    }
  }

  // out[g * kPanel + h * kLanes]. Joined are residues 8 apart, then 4, neighbours, and pairs of these.
  template <int G, int H>
  __attribute__((noinline)) void tile(const char* x, const char* pairs, float* out) const {
    Sums<G, H> sums[2], joined[2], part;
    const auto for_all = [](const auto& use) {
      ATOM_UNROLL for (int g = 0; g < G; ++g) {
        ATOM_UNROLL for (int h = 0; h < H; ++h) use(g, h);
      }
    };
    for (int i = 0; i < 4; ++i) {
      auto& total = joined[i / 2];
      sum_residues<G, H>(x, pairs, i, sums);
      for_all([&](int g, int h) { part[g][h] = sums[0][g][h] + sums[1][g][h]; });
      sum_residues<G, H>(x, pairs, i + 4, sums);
      for_all([&](int g, int h) {
        const vfloat four = part[g][h] + (sums[0][g][h] + sums[1][g][h]);
        total[g][h] = i % 2 == 0 ? four : total[g][h] + four;
      });
    }
    for_all([&](int g, int h) {
      store(out + g * kPanel + h * kLanes, joined[0][g][h] + joined[1][g][h]);
    });
  }

  int64_t rows_, size_, steps_;
};

}  // namespace atom
#endif
