// Logits: float32 sums as they are. In a file of its own, so that the compiler treats the kernel
// of linear layers as if it were the only one.
#include "linear/linear_kernel.h"

#define ATOM_LOGITS(name, type)                                          \
  ATOM_EXPORT int64_t atom_logits_##name(const atom::LinearArgs* args) { \
    return atom::linear<type, float>(*args);                             \
  }

ATOM_LOGITS(float32, float)
ATOM_LOGITS(bfloat16, atom::bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_LOGITS(float16, atom::float16)
#endif
