// New keys and values into the paged cache.
#include "fp8.h"
#include "parallel.h"

namespace atom {
namespace {

struct CacheWriteArgs {
  const int64_t* slots;  // [rows]; a negative one writes nothing
  const char* key;       // [rows, width], rows key_stride elements apart
  const char* value;
  char* key_cache;  // [blocks, block_size, width], blocks block_bytes apart
  char* value_cache;
  const float* key_scale;  // [1] of a cache in FP8, else null
  const float* value_scale;
  int64_t rows, width, num_slots, block_size, block_bytes, key_stride, value_stride, threads;
};

// Elements below which waking other threads costs more than it saves.
constexpr int64_t kSerialElements = 1 << 15;

// 0, or 1 + the row whose slot lies outside the cache.
template <class T>
int64_t kv_cache_write(const CacheWriteArgs& a) {
  for (int64_t t = 0; t < a.rows; ++t) {
    if (a.slots[t] >= a.num_slots) return t + 1;
  }
  const int64_t row_bytes = a.width * (a.key_scale == nullptr ? int64_t(sizeof(T)) : 1);
  const int64_t threads = a.rows * a.width < kSerialElements ? 1 : a.threads;
  run_shares(a.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (a.slots[t] < 0) continue;
      const int64_t at = a.slots[t] / a.block_size * a.block_bytes +
                         a.slots[t] % a.block_size * row_bytes;
      write_row(reinterpret_cast<const T*>(a.key) + t * a.key_stride, a.width, a.key_scale,
                a.key_cache + at);
      write_row(reinterpret_cast<const T*>(a.value) + t * a.value_stride, a.width, a.value_scale,
                a.value_cache + at);
    }
  });
  return 0;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_kv_cache_write_float32(const atom::CacheWriteArgs* args) {
  return atom::kv_cache_write<float>(*args);
}
ATOM_EXPORT int64_t atom_kv_cache_write_bfloat16(const atom::CacheWriteArgs* args) {
  return atom::kv_cache_write<atom::bfloat16>(*args);
}
#if defined(__F16C__) || defined(__aarch64__)
ATOM_EXPORT int64_t atom_kv_cache_write_float16(const atom::CacheWriteArgs* args) {
  return atom::kv_cache_write<atom::float16>(*args);
}
#endif
