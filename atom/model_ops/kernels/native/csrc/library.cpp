// What a caller asks of the library as a whole.
#include "parallel.h"
#include "simd.h"

ATOM_EXPORT int64_t atom_lanes() { return atom::kLanes; }

ATOM_EXPORT int64_t atom_has_float16() { return atom::kHasFloat16; }
