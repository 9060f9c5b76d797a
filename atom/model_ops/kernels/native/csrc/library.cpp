// What a caller asks of the library as a whole.
#include "amx.h"
#include "parallel.h"
#include "simd.h"

ATOM_EXPORT int64_t atom_lanes() { return atom::kLanes; }

ATOM_EXPORT int64_t atom_has_float16() { return atom::kHasFloat16; }

// Whether products of bfloat16 run on matrix tiles.
ATOM_EXPORT int64_t atom_has_tiles() {
#if defined(ATOM_AMX) && defined(__AVX512BF16__)
  return atom::amx::is_permitted();
#else
  return 0;
#endif
}
