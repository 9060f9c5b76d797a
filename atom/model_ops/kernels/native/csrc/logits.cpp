// Logits: float32 sums as they are. In a file of its own, so that the compiler treats the kernel
// of linear layers as if it were the only one.
#include "linear_kernel.h"

namespace atom {
namespace {

template <class T>
int64_t logits(const LinearArgs& args) {
  if (std::is_same_v<T, bfloat16> && prefers_tiles(args)) {
    logits_by_tiles(args);
  } else {
    linear<T, float>(args);
  }
  return 0;
}

}  // namespace
}  // namespace atom

#define ATOM_LOGITS(name, type)                                          \
  ATOM_EXPORT int64_t atom_logits_##name(const atom::LinearArgs* args) { \
    return atom::logits<type>(*args);                                    \
  }

ATOM_LOGITS(float32, float)
ATOM_LOGITS(bfloat16, atom::bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_LOGITS(float16, atom::float16)
#endif
