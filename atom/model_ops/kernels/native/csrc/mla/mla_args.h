// Arguments of latent attention, the same for all types of data.
#pragma once

#include <cstdint>

namespace atom {

struct MlaArgs {
  const void* q;       // [tokens, heads, nope + rope], tokens q_stride elements apart
  const void* latent;  // [num_blocks, block_size, rank + rope], of q's type or FP8
  const void* up;      // [heads, nope + v, rank]
  void* out;           // [tokens, heads, v]
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* context_lens;  // [sequences]
  const int32_t* cu_seqlens_q;  // [sequences + 1]
  const float* latent_scale;    // [1] of a cache in FP8, else null
  int64_t tokens, heads, nope, rope, v, rank, num_blocks, block_size, table_width, sequences;
  int64_t q_stride;
  int64_t causal;  // else queries see the keys after them, too
  int64_t threads;
  double scale;

  bool is_fp8() const { return latent_scale != nullptr; }
  // What stored numbers are multiplied with.
  float unit() const { return is_fp8() ? *latent_scale : 1.0f; }
};

// 0, or 1 + the sequence whose lengths or blocks make no sense.
template <class Args>
int64_t find_impossible(const Args& a, bool causal = true) {
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t context = a.context_lens[s];
    const int64_t queries = int64_t(a.cu_seqlens_q[s + 1]) - a.cu_seqlens_q[s];
    const int64_t blocks = (context + a.block_size - 1) / a.block_size;
    if (a.cu_seqlens_q[s] < 0 || queries < 0 || a.cu_seqlens_q[s + 1] > a.tokens) return s + 1;
    if ((causal && queries > context) || blocks > a.table_width) return s + 1;
    for (int64_t i = 0; i < blocks; ++i) {
      const int32_t block = a.block_tables[s * a.table_width + i];
      if (block < 0 || block >= a.num_blocks) return s + 1;
    }
  }
  return 0;
}

}  // namespace atom
