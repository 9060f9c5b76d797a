// Latent attention for each storage type, and writes to its cache.
#include "mla/mla_kernel.h"

namespace atom {
namespace {

template <class T>
int64_t attend(const MlaArgs& args) {
#if defined(ATOM_AMX)
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (amx::is_permitted()) return LatentAttention<T, Tiles>(args).run();
  }
#endif
  return LatentAttention<T, Vectors<T>>(args).run();
}

struct LatentWriteArgs {
  const int64_t* slots;  // [rows]; a negative one writes nothing
  const void* latent;    // [rows, rank], rows latent_stride elements apart
  const void* rope;      // [rows, rope]
  char* cache;           // [num_slots, rank + rope]
  const float* scale;    // [1] of a cache in FP8, else null
  int64_t rows, rank, rope_size, num_slots, latent_stride, rope_stride;
};

// 0, or 1 + the row whose slot lies outside the cache.
template <class T>
int64_t write_latents(const LatentWriteArgs& a) {
  for (int64_t t = 0; t < a.rows; ++t) {
    if (a.slots[t] >= a.num_slots) return t + 1;
  }
  const int64_t item = a.scale == nullptr ? sizeof(T) : 1;
  for (int64_t t = 0; t < a.rows; ++t) {
    if (a.slots[t] < 0) continue;
    char* to = a.cache + a.slots[t] * (a.rank + a.rope_size) * item;
    write_row(static_cast<const T*>(a.latent) + t * a.latent_stride, a.rank, a.scale, to);
    write_row(static_cast<const T*>(a.rope) + t * a.rope_stride, a.rope_size, a.scale,
              to + a.rank * item);
  }
  return 0;
}

}  // namespace
}  // namespace atom

#define ATOM_MLA(name, type)                                                           \
  ATOM_EXPORT int64_t atom_mla_cache_write_##name(const atom::LatentWriteArgs* args) { \
    return atom::write_latents<type>(*args);                                           \
  }                                                                                    \
  ATOM_EXPORT int64_t atom_mla_attention_##name(const atom::MlaArgs* args) {           \
    return atom::attend<type>(*args);                                                  \
  }

ATOM_MLA(float32, float)
ATOM_MLA(bfloat16, atom::bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_MLA(float16, atom::float16)
#endif
