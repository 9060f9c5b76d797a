// Linear layers: float32 sums, rounded to the type of the weights.
#include "linear/linear_kernel.h"

#define ATOM_LINEAR(name, type)                                          \
  ATOM_EXPORT int64_t atom_linear_##name(const atom::LinearArgs* args) { \
    return atom::linear<type>(*args);                                    \
  }

ATOM_LINEAR(float32, float)
ATOM_LINEAR(bfloat16, atom::bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_LINEAR(float16, atom::float16)
#endif
