// Latent attention for each storage type, and writes to its cache.
#include "mla_kernel.h"

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
  const char* latent;    // [rows, latent_bytes], rows latent_stride bytes apart
  const char* rope;      // [rows, rope_bytes]
  char* cache;           // [num_slots, latent_bytes + rope_bytes]
  int64_t rows, latent_bytes, rope_bytes, num_slots, latent_stride, rope_stride;
};

// 0, or 1 + the row whose slot lies outside the cache.
int64_t write_latents(const LatentWriteArgs& a) {
  for (int64_t t = 0; t < a.rows; ++t) {
    if (a.slots[t] >= a.num_slots) return t + 1;
  }
  for (int64_t t = 0; t < a.rows; ++t) {
    if (a.slots[t] < 0) continue;
    char* to = a.cache + a.slots[t] * (a.latent_bytes + a.rope_bytes);
    std::memcpy(to, a.latent + t * a.latent_stride, a.latent_bytes);
    std::memcpy(to + a.latent_bytes, a.rope + t * a.rope_stride, a.rope_bytes);
  }
  return 0;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_mla_cache_write(const atom::LatentWriteArgs* args) {
  return atom::write_latents(*args);
}
ATOM_EXPORT int64_t atom_mla_attention_float32(const atom::MlaArgs* args) {
  return atom::attend<float>(*args);
}
ATOM_EXPORT int64_t atom_mla_attention_bfloat16(const atom::MlaArgs* args) {
  return atom::attend<atom::bfloat16>(*args);
}
#if defined(__F16C__) || defined(__aarch64__)
ATOM_EXPORT int64_t atom_mla_attention_float16(const atom::MlaArgs* args) {
  return atom::attend<atom::float16>(*args);
}
#endif
