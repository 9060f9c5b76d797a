// What a caller asks of the library as a whole.
#include "parallel.h"
#include "simd.h"

ATOM_EXPORT int64_t atom_lanes() { return atom::kLanes; }

ATOM_EXPORT int64_t atom_has_float16() { return atom::kHasFloat16; }

// Whether the processor multiplies tiles of bfloat16, which these kernels do not use.
ATOM_EXPORT int64_t atom_has_amx() {
#if defined(__AMX_BF16__)
  return 1;
#else
  return 0;
#endif
}
