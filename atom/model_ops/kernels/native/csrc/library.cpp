// What a caller asks of the library as a whole.
#if defined(__linux__)
#include <sys/mman.h>
#endif

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

namespace atom {
namespace {

struct HugePagesArgs {
  void* at;  // where a page begins
  int64_t bytes, page_bytes;
};

}  // namespace
}  // namespace atom

// Asks for huge pages for the whole ones of a range. A system without them has others, and is as right.
ATOM_EXPORT int64_t atom_use_huge_pages(const atom::HugePagesArgs* args) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  madvise(args->at, args->bytes / args->page_bytes * args->page_bytes, MADV_HUGEPAGE);
#else
  (void)args;
#endif
  return 0;
}
