// Memory is fetched while what came from it before is multiplied.
#pragma once

#include "simd.h"

namespace atom {

// What a pass over weights fetches for those to come, so that memory rests in no pass: so many bytes
// with each of its steps.
struct Ahead {
  const void* at;
  int64_t step;

  ATOM_INLINE void fetch() {
    const char* from = static_cast<const char*>(at);
    for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(from + i);
    at = from + step;
  }
};

// A share of so many bytes, rounded up to what is fetched at once.
inline int64_t share_of(int64_t bytes, int64_t count, int64_t rows) {
  return (bytes * count / rows + 63) / 64 * 64;
}

// Fetches the share of rows `first` to `last` of `rows` in so many bytes at once, into the second cache.
ATOM_INLINE void fetch_share(const void* next, int64_t bytes, int64_t first, int64_t last,
                             int64_t rows) {
  const char* from = static_cast<const char*>(next);
  for (int64_t i = bytes * first / rows; i < bytes * last / rows; i += 64) {
    __builtin_prefetch(from + i, 0, 2);
  }
}

}  // namespace atom
